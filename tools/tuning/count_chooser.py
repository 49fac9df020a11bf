"""Count what decides which kernel and config runs: lines and numeric literals.

    python tools/tuning/count_chooser.py

Legality (``why_not`` and what it asks), the search space (``configs``), launches and measured points do not count.
Modules that only choose count whole; of others the functions and constants named here, where they still exist.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "anybit"
WHOLE = tuple(SRC / "choose" / f"{name}.py" for name in ("heuristics", "builtin", "choose", "dispatch"))
ROOMS = ("choose", "tune", "kernels/packed", "kernels/bitplane")
MOST_LINES, MOST_LITERALS = 700, 200
DECIDE = {
    "default", "_default", "_sparse", "norm_default", "fitted", "_fitted", "estimate", "config_for", "_early_sparse",
    "_EPILOGUES", "_owners", "_config", "_cost_of_one_eight", "_cost_of_several_eights", "preferred", "fills_one_wave",
    "_skinny", "family", "promising", "kinds", "builtins_of", "preserves_pdl_overlap", "_room", "_hopeless", "near",
    "among_small", "limit_occupancy", "limit_occupancy_normed", "CLUSTERS", "_SKINNY", "_SPARSE_STAGES",
    "_STAGES_OF_THREE", "_EARLY_BYTES", "_MOST_STAGES", "_STAGGER", "_PLANES_AHEAD", "_CLUSTER_K", "_ROOM_OF_CLUSTERS",
    "_CHUNKS_COPIED", "_PREFERRED_CHUNKS", "_RESIDENT_BYTES", "_AHEAD", "block_units", "_MOST_UNITS",
    "_MOST_IN_A_WAVE", "clearly_faster", "FEW_TOKENS", "_ANOTHER", "_EVERYTHING", "_MANY_TOKENS",
}  # fmt: skip
"""Functions and constants of other modules that decide."""


def pieces(path: Path) -> Iterator[ast.AST]:
    """What of a module decides."""
    tree = ast.parse(path.read_text())
    if path in WHOLE:
        yield tree
        return
    for node in ast.walk(tree):
        name = getattr(node, "name", None)
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name | ast.Tuple):
            name = target.id if isinstance(target, ast.Name) else getattr(target.elts[0], "id", None)
        if name in DECIDE:
            yield node


def counted(path: Path) -> tuple[int, int]:
    """(lines, numeric literals) of a module."""
    lines = literals = 0
    for node in pieces(path):
        whole = isinstance(node, ast.Module)
        lines += len(path.read_text().splitlines()) if whole else node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]
        literals += sum(isinstance(one, ast.Constant) and type(one.value) in (int, float) for one in ast.walk(node))
    return lines, literals


def files() -> list[Path]:
    """The modules that may decide."""
    return [path for folder in ROOMS for path in sorted((SRC / folder).rglob("*.py"))]


def main() -> None:
    found = {path: counted(path) for path in files()}
    for path, (lines, literals) in sorted(found.items()):
        if lines or literals:
            print(f"{lines:6} lines {literals:5} literals  {path.relative_to(SRC)}")
    lines, literals = map(sum, zip(*found.values(), strict=True))
    print(f"{lines:6} lines {literals:5} literals")


if __name__ == "__main__":
    main()
