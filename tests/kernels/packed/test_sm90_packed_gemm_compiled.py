"""sm90_packed_gemm compiles without a GPU: the intended instruction, no spills, no calls."""

import re
from dataclasses import replace

import pytest
import torch

import machine_code
from anybit.choose.choose import Map
from anybit.choose.policy import SHIPPED, read
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.scheme import ActivationFormat, Scheme, WeightFormat
from cases import in_turn
from cases_packed_gemm import A16, FP8, INT8
from machine_code import count

INSTRUCTION = {"f16": "HGMMA.64x{}x16.F32 ", "bf16": "HGMMA.64x{}x16.F32.BF16 ", "s8": "IGMMA.64x{}x32.{}8.S8 ",
               "e4m3": "QGMMA.64x{}x32.F32.E4M3.E4M3 "}  # fmt: skip
BY_MAP = (None, False, 1, None, None, 0, True)
CASES = [
    (WeightFormat(4, "sym", 128), A16, torch.float16, (64, 4, 1, 1, 1)),
    (WeightFormat(4, "sym", 128), A16, torch.float16, (256, 2, 1, 1, 2)),
    (WeightFormat(4, "asym", 64), A16, torch.float16, (128, 4, 1, 1, 1)),
    (WeightFormat(3, "asym", 32), A16, torch.bfloat16, (64, 2, 2, 2, 1)),
    (WeightFormat(8, "asym", 128), A16, torch.bfloat16, (128, 2, 1, 1, 2)),
    (WeightFormat(1, "bipolar", None), A16, torch.float16, (16, 1, 4, 1, 1)),
    (WeightFormat(4, "sym", None), INT8, torch.float16, (128, 4, 1, 1, 2)),
    (WeightFormat(2, "sym", None), INT8, torch.float16, (256, 2, 1, 1, 2)),
    (WeightFormat(2, "sym", None), INT8, torch.float16, (256, 2)),
    (WeightFormat(4, "sym", 128), A16, torch.float16, (64, 1, 2, 2, 1, None, False, 1, 2)),
    (WeightFormat(3, "asym", 64), A16, torch.bfloat16, (48, 1, 2, 1, 1, None, False, 1, 3)),
    (WeightFormat(7, "asym", 64), INT8, torch.bfloat16, (128, 2, 1, 1, 1)),
    (WeightFormat(4, "asym", 128), FP8, torch.float16, (128, 2, 1, 1, 1)),
    (WeightFormat(4, "asym", 128, True), A16, torch.float16, (128, 4, 1, 1, 1)),
    (WeightFormat(3, "asym", 64, True), A16, torch.bfloat16, (64, 4, 1, 1, 1, None, True)),
    (WeightFormat(4, "sym", 128, True), A16, torch.float16, (128, 4, 1, 1, 1, None, False, 1, None, None, 7, True)),
    (WeightFormat(4, "asym", None, True), INT8, torch.float16, (128, 4, 1, 1, 1, None, False, 1, None, None, 0, True)),
    (WeightFormat(8, "sym", 32, True), INT8, torch.bfloat16, (64, 2, 1, 1, 1)),
    (WeightFormat(4, "sym", None, True), INT8, torch.bfloat16, (192, 3, 1, 1, 2, *BY_MAP)),
    (WeightFormat(2, "asym", None, True), INT8, torch.float16, (256, 2, 1, 1, 2, *BY_MAP)),
    (WeightFormat(4, "asym", 64, True), A16, torch.bfloat16, (128, 4, 1, 1, 2, *BY_MAP)),
]


@pytest.mark.parametrize(("weights", "activations", "dtype", "cut"), CASES, ids=str)
def test_gemm_uses_wgmma_without_spills(weights, activations, dtype, cut) -> None:
    check(LinearProblem(cut[0], 28672, 4096, weights, activations, dtype), cut)


@pytest.mark.parametrize(("text", "cut"), [
    ("w4a8", (128, 4)), ("w4a8", (128, 3)), ("w4a8", (192, 2)), ("w4a8", (64, 4)), ("w4a16g128", (256, 2)),
])  # fmt: skip
def test_ends_with_silu(text: str, cut: tuple[int, int]) -> None:
    scheme = Scheme.parse(text)
    check(LinearProblem(cut[0], 28672, 4096, scheme.weights, scheme.activations), cut, silu=True)


def check(problem: LinearProblem, cut: tuple[int, ...], silu: bool = False) -> None:
    weights, config = problem.weights, sm90_packed_gemm.config_for(problem, *cut)
    assert sm90_packed_gemm.why_not(problem, config) is None
    instruction = INSTRUCTION[problem.operand.name].format(
        config.tile_m, "S" if weights.group or weights.sparse else "U"
    )
    if weights.sparse:
        instruction = instruction.replace("GMMA.", "GMMA.SP.").replace("x32.", "x64.").replace("x16.", "x32.")
    compiled = machine_code.check(sm90_packed_gemm.kernel(config, silu), "sm_90a", has=re.escape(instruction))
    if config.register_sets == 2 and not config.promotes:
        waits = count(compiled.cubin, "WARPGROUP.DEPBAR.LE gsb0, 0x0")
        assert waits == 1, "the assembler serializes MMAs"


@pytest.mark.parametrize("m", [16, 64, 128, 256, 4096])
def test_bytes_that_are_not_widened_have_one_register_set(m: int) -> None:
    """Loaded directly as operands: with two register sets, the next load would overwrite operands of MMAs in flight."""
    problem = LinearProblem(m, 4096, 4096, WeightFormat(8), ActivationFormat(8, "sym"), torch.float16)
    config = sm90_packed_gemm.default(problem)
    assert config.register_sets == 1
    assert "1 register set" in (sm90_packed_gemm.why_not(problem, replace(config, register_sets=2)) or "")
    machine_code.check(sm90_packed_gemm.kernel(config), "sm_90a", lacks="WARPGROUP.DEPBAR.LE gsb0, 0x1")


@pytest.mark.parametrize("text", ["w4a16g128", "w4a8", "w8a8", "w4a8fp", "w4a16g128s24"])
def test_configs_of_many_tokens_are_those_of_their_own_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = Scheme.parse(text)
    problems = [
        LinearProblem(m, n, k, scheme.weights, scheme.activations)
        for m, n, k in in_turn((65, 6144, 4096), (96, 4096, 14336), (129, 576, 1536), (1000, 6144, 4096), at=len(text))
    ]
    kept = [list(sm90_packed_gemm.configs(problem)) for problem in problems]
    monkeypatch.setattr(sm90_packed_gemm, "_MANY", 1 << 20)
    sm90_packed_gemm._of_tiles.cache_clear()
    assert kept == [list(sm90_packed_gemm.configs(problem)) for problem in problems]


@pytest.mark.parametrize(
    ("m", "n", "k", "blocks"),
    [
        (1024, 28672, 4096, (256, 2, 2)),
        (4096, 28672, 4096, (192, 3, 2)),
        (1024, 4096, 14336, (256, 2, 1)),
        (4096, 4096, 14336, (256, 2, 1)),
    ],
)
def test_sparse_bytes_of_many_tokens_leave_by_maps(m: int, n: int, k: int, blocks: tuple[int, int, int]) -> None:
    """And with many tiles per block, X is multicast."""
    scheme = Scheme.parse("w4a8s24")
    by = Map([read(SHIPPED / "nvidia-h200.json")])
    config = by.choose(LinearProblem(m, n, k, scheme.weights, scheme.activations)).candidate.config
    assert (config.tile_m, config.row_warpgroups, config.cluster_n) == blocks
    assert config.tensor_store


def test_refusals_are_sentences() -> None:
    assert "8-bit asym" in str(sm90_packed_gemm.why_not(LinearProblem(16, 64, 128, WeightFormat(8, "asym"), INT8)))
    assert "e4m3" in str(sm90_packed_gemm.why_not(LinearProblem(16, 64, 128, WeightFormat(6), FP8)))
    assert (
        sm90_packed_gemm.why_not(LinearProblem(16, 64, 131, WeightFormat(4))) is None
    )  # rows of x have their own pitch
    sparse = LinearProblem(256, 512, 1024, WeightFormat(4, "sym", None, True), INT8)
    apart = sm90_packed_gemm.config_for(sparse, 128, 4, cluster_n=2, block_tiles=7)
    assert "cluster_n=1" in str(sm90_packed_gemm.why_not(sparse, apart))
    problem = LinearProblem(16, 4096, 14336, WeightFormat(4, "sym", 128))
    config = sm90_packed_gemm.config_for(problem, 16, 1, 3)
    assert config.span == 2 and config.split_k_warpgroups == 3 and config.stages % 3 == 0
    assert "stages must be a multiple of split_k_warpgroups" in str(
        sm90_packed_gemm.why_not(problem, replace(config, stages=config.stages - 1))
    )
    shared = replace(sm90_packed_gemm.config_for(problem, 24, 1, 2, 2, min_blocks_per_sm=2), register_sets=1)
    assert sm90_packed_gemm.why_not(problem, shared) is None
    hangs = replace(shared, reallocates=True)
    assert "min_blocks_per_sm=1" in str(sm90_packed_gemm.why_not(problem, hangs))
    assert hangs not in sm90_packed_gemm.refit(problem, hangs)
    assert "span must be 1, or 2" in str(sm90_packed_gemm.why_not(replace(problem, k=128 * 111), config))
    older = LinearProblem(16, 64, 128, WeightFormat(4), device=Device.named("sm_80"))
    assert "sm_80" in str(sm90_packed_gemm.why_not(older))
