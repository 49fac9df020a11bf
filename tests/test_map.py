"""docs/map.md is true: the rooms it names are those that exist; other pages' links and names are valid, too."""

import re
from pathlib import Path

from typer.main import get_command

from anybit.cli import app

ROOT = Path(__file__).parent.parent


def test_map_names_every_room() -> None:
    block = (ROOT / "docs" / "map.md").read_text().split("```")[1]
    named = set(re.findall(r"^  (\S+)", block, flags=re.MULTILINE))
    package = ROOT / "src" / "anybit"
    rooms = {p.name for p in package.glob("*.py")} | {f"{p.parent.name}/" for p in package.glob("*/*.py")}
    assert named == rooms, f"on the map alone: {named - rooms}; not on the map: {rooms - named}"


def test_pages_link_to_what_exists() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_pages_name_files_that_exist() -> None:
    examples = {"NAME.py", "NAME.cuh", "config.json", "map.json", ".anybit-files.json"}
    tops = (ROOT / top for top in ("src", "benchmarks", "tests", "scripts", "examples", "tools"))
    there = [str(path.relative_to(ROOT)) for top in tops for path in top.rglob("*")]
    for page in pages():
        for name in set(re.findall(r"`([\w/.-]+\.(?:py|cuh|json|h|cpp))`", page.read_text())) - examples:
            assert any(f"/{file}".endswith(f"/{name}") for file in there), f"{page.name}: {name} is not there"


def test_contributing_shows_a_real_diff() -> None:
    shown = (ROOT / "docs" / "contributing.md").read_text().split("```diff\n")[1].split("```")[0]
    text = ""
    for line in filter(None, shown.splitlines()):
        if line.startswith(("+++ ", "--- ")):
            text = (ROOT / line[4:]).read_text()
        assert line.startswith(("+++ ", "--- ")) or line[1:] in text, f"docs/contributing.md: not so any more: {line}"


def test_pages_show_options_that_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    known = {name: {o for p in one.params for o in (*p.opts, *p.secondary_opts)} for name, one in commands.items()}
    shown = re.compile(rf"\banybit ({'|'.join(commands)})\b([^`\n#;]*)")
    for page in [*pages(), *(ROOT / "src" / "anybit" / "cli").glob("*.py")]:
        for command, words in shown.findall(page.read_text()):
            for option in re.findall(r"(?<!\w)--?[a-z][a-z-]*", words.partition(" -- ")[0]):
                assert option in known[command] | {"--help"}, f"{page.name}: anybit {command} has no {option}"


def test_pages_are_short() -> None:
    """Pages for users, README among them, and design pages: words as ``wc -w`` counts them."""
    users = [page for page in pages() if page.name != "CHANGELOG.md"]
    design = list((ROOT / "docs" / "design").glob("*.md"))
    for most, read in ((13_000, users), (10_000, design)):
        words = {page.name: len(page.read_text().split()) for page in read}
        assert sum(words.values()) <= most, f"{sum(words.values())} words of {most}: {words}"
    assert all(len(page.read_text().split()) <= 2_000 for page in design)
