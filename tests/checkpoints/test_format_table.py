"""docs/formats.md is true, cell by cell: what is read, on what it runs, what it converts to."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.checkpoints.test_formats import CASES

from anybit.checkpoints import convert
from anybit.checkpoints.formats import FORMATS, gguf_encode, gptq_write
from anybit.checkpoints.formats.gguf_blocks import BLOCKS
from anybit.device import Device
from anybit.kernels.gemm.families import FAMILIES
from anybit.kernels.gemm.linear_problem import LinearProblem
from anybit.scheme import Scheme, WeightFormat

PAGE = (Path(__file__).parent.parent.parent / "docs" / "formats.md").read_text()
TABLE = re.search(r"<!-- formats -->(.*?)<!-- end -->", PAGE, re.DOTALL)
assert TABLE is not None
ROWS = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in TABLE[1].strip().splitlines()[2:]]
BY_HAND = {("gptq", "w4a16g128min"), ("bitsandbytes", "w8a16"), ("modelopt NVFP4", "w4a16g16e2m1")}
"""What tests/checkpoints/test_format_layouts.py reads, since no tool here writes it."""


_FAMILIES = {
    "gemv": (("sm90_packed_gemv", "sm_90a"),),
    "skinny": (("sm90_packed_skinny", "sm_90a"),),
    "gemm": (("sm90_packed_gemm", "sm_90a"), ("sm80_packed_gemm", "sm_80")),
}


def scheme_runs(scheme: Scheme) -> Callable[[tuple[str, str]], bool]:
    """Whether a family on an architecture runs a layer of one token in a scheme."""

    def runs(where: tuple[str, str]) -> bool:
        family, arch = where
        device = Device.named(arch)
        product = LinearProblem(1, 4096, 4096, scheme.weights, scheme.activations, device=device)
        return FAMILIES[family].why_not(product) is None

    return runs


def kind_of(weights: WeightFormat) -> tuple[int, str]:
    return weights.bits, weights.code


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS])
def test_a_row_is_true(row: tuple[str, ...]) -> None:
    name, layers, cell, runs, targets = row
    scheme = Scheme.parse(cell.strip("`"))
    if name == "gguf":
        assert BLOCKS[layers].scheme == str(scheme)
    elif (name, str(scheme)) not in BY_HAND:
        made = [
            Scheme.parse(text)
            for case in CASES.values()
            if case.format == name
            for text in (case.q_proj, case.down_proj)
        ]
        assert kind_of(scheme.weights) in {kind_of(found.weights) for found in made}, "no fixture of this kind is read"
    assert runs == ", ".join(name for name, places in _FAMILIES.items() if all(map(scheme_runs(scheme), places)))
    possible = ["anybit"]
    possible += ["compressed-tensors"] if convert.why_not(scheme) is None else []
    possible += ["gptq"] if gptq_write.why_not(scheme) is None else []
    possible += ["gguf"] if gguf_encode.why_not(scheme) is None else []
    assert targets == ", ".join(possible)


def test_every_format_has_rows() -> None:
    assert {row[0] for row in ROWS} == {format.NAME for format in FORMATS} | {"gguf"}
    assert {row[1] for row in ROWS if row[0] == "gguf"} == set(BLOCKS)
