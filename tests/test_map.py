"""docs/map.md is true: every room it names exists, and every room that exists is named."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_room_is_on_the_map() -> None:
    block = (ROOT / "docs" / "map.md").read_text().split("```")[1]
    named = set(re.findall(r"^  (\S+)", block, flags=re.MULTILINE))
    package = ROOT / "src" / "anybit"
    rooms = {p.name for p in package.glob("*.py")} | {f"{p.parent.name}/" for p in package.glob("*/*.py")}
    assert named == rooms, f"on the map alone: {named - rooms}; not on the map: {rooms - named}"


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
