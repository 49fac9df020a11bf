"""docs/formats.md is true, cell by cell: what is read, where it runs, what it converts to."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tests.checkpoints.test_formats import CASES

from anybit.checkpoints.configuration import why_not
from anybit.checkpoints.formats import FORMATS, gguf_encode, gptq_write
from anybit.checkpoints.formats.gguf_blocks import BLOCKS
from anybit.checkpoints.formats.write import TARGETS
from anybit.checkpoints.gguf import SCHEMES
from anybit.choose.families import FAMILIES
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme, WeightFormat

PAGE = (Path(__file__).parent.parent.parent / "docs" / "formats.md").read_text()
TABLE = re.search(r"<!-- formats -->(.*?)<!-- end -->", PAGE, re.DOTALL)
assert TABLE is not None
ROWS = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in TABLE[1].strip().splitlines()[2:]]
BY_HAND = {("gptq", "w4a16g128min"), ("modelopt NVFP4", "w4a16g16e2m1"), ("mxfp4", "w4a16g32e2m1")}
"""Read only by tests/checkpoints/test_format_layouts.py and test_expert_formats.py, since no tool here writes it."""


_FAMILIES = {
    "gemv": (("sm90_packed_gemv", "sm_90a"),),
    "skinny": (("sm90_packed_skinny", "sm_90a"),),
    "gemm": (("sm90_packed_gemm", "sm_90a"), ("sm80_packed_gemm", "sm_80")),
}


def scheme_runs(scheme: Scheme) -> Callable[[tuple[str, str]], bool]:
    """Whether a family on an architecture runs a one-token layer in a scheme."""

    def runs(where: tuple[str, str]) -> bool:
        family, arch = where
        device = Device.named(arch)
        product = LinearProblem(1, 4096, 4096, scheme.weights, scheme.activations, device=device)
        return FAMILIES[family].why_not(product) is None

    return runs


def kind_of(weights: WeightFormat) -> tuple[int, str]:
    return weights.bits, weights.code


def kinds_of(names: Iterable[str]) -> set[tuple[str, tuple[int, str]]]:
    """Formats and layer kinds of fixtures."""
    return {
        (CASES[name].format, kind_of(Scheme.parse(text).weights))
        for name in names
        for text in (CASES[name].q_proj, CASES[name].down_proj)
    }


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS])
def test_a_row_of_the_format_table_is_true(row: tuple[str, ...]) -> None:
    name, layers, cell, runs, targets = row
    scheme = Scheme.parse(cell.strip("`"))
    if name == "gguf":
        assert {SCHEMES[kind] for kind in layers.split(", ")} == {str(scheme)}
    elif (name, str(scheme)) not in BY_HAND:
        assert (name, kind_of(scheme.weights)) in kinds_of(CASES), "no fixture of this kind is read"
    running = [name for name, places in _FAMILIES.items() if all(map(scheme_runs(scheme), places))]
    assert runs == ("all" if len(running) == len(_FAMILIES) else ", ".join(running))
    possible = ["anybit"]
    possible += ["compressed-tensors"] if why_not(scheme) is None else []
    possible += ["gptq"] if gptq_write.why_not(scheme) is None else []
    possible += ["gguf"] if gguf_encode.why_not(scheme) is None else []
    assert targets == ("all" if len(possible) == len(TARGETS) else ", ".join(possible))


def test_every_format_has_rows() -> None:
    assert {row[0] for row in ROWS} == {format.name for format in FORMATS} | {"gguf"}
    assert {kind for row in ROWS if row[0] == "gguf" for kind in row[1].split(", ")} == set(BLOCKS)
