"""House rules that a machine can check: layered imports, readable file sizes, asm in one place."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "anybit"

# A module may import from its own room and from rooms on lower floors.
FLOORS = [
    {"errors", "scheme", "device", "version"},
    {"codes"},
    {"jit"},
    {"kernels"},
    {"choose"},
    {"tune"},
    {"ops"},
    {"layers", "cache"},
    {"models"},
    {"checkpoints"},
    {"quantization"},
    {"hf"},
    {"vllm"},
    {"cli"},
    {"registration"},
    {"__init__", "__main__"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    """A file's top-level room: the folder under anybit, or the module itself."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_rooms(path: Path) -> set[str]:
    """The rooms of anybit that a module imports, anywhere in its code."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "anybit":
            names = [node.module.split(".")[1]] if "." in node.module else [alias.name for alias in node.names]
            rooms.update(names)
        elif isinstance(node, ast.Import):
            rooms.update(a.name.split(".")[1] for a in node.names if a.name.startswith("anybit."))
    return {room for room in rooms if room in FLOOR_OF}


def test_imports_point_one_way() -> None:
    for path in PACKAGE.rglob("*.py"):
        room = room_of(path)
        assert room in FLOOR_OF, f"{room} has no floor: give it one in tests/test_house.py and docs/map.md"
        for other in imported_rooms(path):
            assert other == room or FLOOR_OF[other] < FLOOR_OF[room] or {room, other} <= FLOORS[0], (
                f"{path.name} ({room}) imports {other}, which is not on a floor below"
            )


def test_imports_of_kernels_go_through_ops() -> None:
    """Elsewhere only the layout of a KV page is known, which is a memory format and not a kernel."""
    layout, line = "anybit.kernels.attention", r"^\s*(?:from|import) (anybit\.(?:kernels|jit)[\w.]*)(?: import (\w+))?"
    for path in PACKAGE.rglob("*.py"):
        if room_of(path) not in ("kernels", "jit", "choose", "tune", "ops"):
            found = set(re.findall(line, path.read_text(), re.MULTILINE))
            found |= set(re.findall(r"^\s*from (anybit) import (jit)\b", path.read_text(), re.MULTILINE))
            other = {one for one in found if one[0] != f"{layout}.kv_page" and one != (layout, "kv_page")}
            assert not other, f"{path.name} imports {other}: reach kernels through anybit.ops"


def test_imports_below_hf_take_model_classes_for_types_alone() -> None:
    """Loading them runs anybit.registration, which imports hf and, from there, the module that is half loaded."""
    registered = {path for room in ("layers", "cache", "models") for path in (PACKAGE / room).rglob("*.py")}
    for path in sorted({*registered, *(PACKAGE / "checkpoints").glob("*.py")}):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
                found = [alias.name for alias in node.names if alias.name.startswith(("PreTrained", "Pretrained"))]
                assert not found, f"{path.name} imports {found} at run time: import them under TYPE_CHECKING"


def test_imports_have_no_circle() -> None:
    """Imports inside functions and under TYPE_CHECKING count, too."""
    modules = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[name] = found & modules.keys() - {name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"imports go in a circle: {' -> '.join((*trail[trail.index(name) :], name))}"
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_files_stay_readable() -> None:
    for path in (p for top in ("src", "tests", "benchmarks", "tools") for p in (ROOT / top).rglob("*.*")):
        if path.suffix in (".py", ".cuh", ".h", ".cpp"):
            lines = len(path.read_text().splitlines())
            assert lines <= 500, f"{path.relative_to(ROOT)} has {lines} lines; 500 is the most, 300 the aim"


def test_headers_keep_asm_in_ptx() -> None:
    for path in (PACKAGE / "kernels").rglob("*.cuh"):
        asm = re.search(r"\basm\b", re.sub(r"//.*", "", path.read_text()))
        assert path.parent.name == "ptx" or not asm, f"{path.name}: asm belongs in kernels/common/ptx"
