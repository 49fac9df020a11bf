"""The wgmma GEMM on a GPU: every pair of widths and code family is exact, at every edge, over poisoned memory.

Every seventh of the 192 pairs and families is tested, all with ANYBIT_EXHAUSTIVE=1 in the environment.
"""

import itertools
import os
from typing import Any

import pytest
import torch

from anybit import reference
from anybit.device import Device
from anybit.jit import Kernel
from anybit.kernels.elementwise import quantize_activations
from anybit.kernels.gemm import bitplane_layout, sm90_bitplane
from anybit.kernels.gemm.sm90_bitplane import (
    Config,
    Output,
    Path,
    Problem,
    Turns,
    Walk,
)
from anybit.scheme import ActivationFormat, Scheme, WeightFormat
from cases import PAIRS, random_weight
from cases_bitplane import H200, code_pairs, large, once, operands, small


def present() -> bool:
    return torch.cuda.is_available() and Device.of(torch.empty(0, device="cuda")).arch == "sm_90a"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not present(), reason="needs an sm_90 GPU")]

EXACT = [(p, q, *codes) for (p, q), codes in itertools.product(PAIRS, code_pairs()[:3])]
EXACT = EXACT if os.environ.get("ANYBIT_EXHAUSTIVE") else EXACT[::7]
TOKENS = [1, 2, 7, 8, 9, 16, 31, 33, 64, 65, 100, 129, 255, 257, 1000, 1024, 4097]
EDGES = [(5, 1, 1), (130, 7, 31), (3, 8, 255), (70, 63, 1023), (66, 65, 1025), (9, 129, 5000), (129, 1000, 14336)]
OUTPUTS = [Output.f16, Output.bf16, Output.f32]
VARIANTS = [
    *({"tokens": t, "slab": s, "turns": o} for t, s, o in [(64, 32, Turns.none), (128, 64, Turns.diagonals)]),
    {"tokens": 256, "slab": 64, "turns": Turns.diagonals},
    {"tokens": 128, "slab": 128, "buffers": 2, "turns": Turns.staggered, "weight_groups": 2, "activation_groups": 2},
    {"tokens": 64, "resident": True, "activation_groups": 3, "weight_groups": 3, "turns": Turns.tiles},
    {"tokens": 64, "resident": True, "activation_groups": 3, "weight_groups": 2},
    *({"tokens": t, "walk": Walk.weights, "cluster": c} for t, c in [(8, 1), (8, 4), (16, 2), (32, 1)]),
    {"tokens": 32, "walk": Walk.weights, "span": 3, "stages": 3, "slots": 5},
    {"tokens": 32, "walk": Walk.tokens, "span": 2, "stages": 4, "slots": 3},
    {"tokens": 32, "walk": Walk.tokens, "cluster": 2},
    {"tokens": 16, "walk": Walk.weights, "groups": 2, "slots": 6, "stages": 3, "span": 3},
    {"tokens": 32, "walk": Walk.tokens, "groups": 4, "slots": 9, "stages": 3, "span": 3},
    {"tokens": 32, "walk": Walk.tokens, "groups": 2, "slots": 9, "stages": 3, "span": 3, "blocks": 2},
    {"tokens": 16, "walk": Walk.weights, "multicast": True, "cluster": 2, "span": 3, "stages": 3, "slots": 4},
    {
        "tokens": 32,
        "walk": Walk.weights,
        "multicast": True,
        "cluster": 2,
        "span": 3,
        "stages": 3,
        "groups": 4,
        "slots": 6,
    },
    {"tokens": 64, "walk": Walk.tokens, "multicast": True, "cluster": 2, "span": 3, "stages": 3, "slots": 9},
    {"tokens": 64, "walk": Walk.tokens, "multicast": True, "cluster": 2, "span": 3, "stages": 3, "slots": 4},
    {"tokens": 32, "walk": Walk.tokens, "by_columns": True, "groups": 2, "stacked": 32, "span": 3, "stages": 3},
    {"tokens": 32, "walk": Walk.tokens, "by_columns": True, "groups": 4, "stacked": 16, "slots": 6},
    {"tokens": 32, "walk": Walk.weights, "by_columns": True, "groups": 2, "stacked": 48, "slots": 6},
    {"tokens": 128, "tail": 64},
    {"tokens": 256, "cluster": 2, "multicast": True, "turns": Turns.none},
    {"tokens": 32, "walk": Walk.weights, "path": Path.once, "even": True},
    {"tokens": 32, "walk": Walk.weights, "path": Path.once, "sets": 2, "early": 1, "even": True},
    {"tokens": 16, "walk": Walk.weights, "path": Path.once, "reserve": 4096},
    {"tokens": 32, "walk": Walk.weights, "path": Path.once, "early": 1, "threads_copy": True},
    {"tokens": 32, "walk": Walk.tokens, "path": Path.once, "sets": 2, "early": 2, "threads_copy": True},
    {"tokens": 32, "walk": Walk.tokens, "path": Path.once, "sets": 3, "early": 2},
    {"tokens": 32, "walk": Walk.tokens, "path": Path.once, "sets": 2},
]
AT_ONCE: list[dict[str, Any]] = [
    {"tokens": 32, "walk": Walk.weights, "even": True},
    {"tokens": 32, "walk": Walk.weights, "sets": 2, "early": 1, "even": True},
    {"tokens": 32, "walk": Walk.tokens, "sets": 2},
    {"tokens": 32, "walk": Walk.weights, "sets": 2, "early": 1, "threads_copy": True},
    {"tokens": 32, "walk": Walk.tokens, "sets": 2, "early": 1, "threads_copy": True},
    {"tokens": 16, "walk": Walk.weights, "sets": 2},
]
CUTS = [
    {"tokens": 128, "tail": 64, "streamed": True},
    {"tokens": 256, "tail": 128, "turns": Turns.staggered},
    {"tokens": 256, "tail": 64, "cluster": 2, "multicast": True, "turns": Turns.none},
    {"tokens": 128, "tail": 64, "turns": Turns.tiles, "weight_groups": 3, "activation_groups": 3},
]
IN_PIECES = [(1024, 4096, 4096), (300, 264, 2100), (100, 72, 1024)]
PIECES = {"tokens": 256, "starts": 2, "tensor": True, "turns": Turns.none, "weight_groups": 2, "activation_groups": 2}


def asked(m: int, n: int, k: int, scheme: str | Scheme, output: Output = Output.s32) -> Problem:
    parsed = Scheme.parse(scheme)
    return Problem(m, n, k, parsed.weights, parsed.activations, output, H200)


def exact_problems(p: int, q: int, w: str, x: str) -> list[Problem]:
    scheme = Scheme(WeightFormat(p, w), ActivationFormat(q, x))
    return [asked(m, 200, 1100, scheme) for m in (11, 150)]


def variant(problem: Problem, change: dict[str, object]) -> Config:
    if change.get("path") is Path.once:
        return once(problem, **change)
    return small(problem, **change) if "walk" in change else large(problem, **change)


def kernels_used() -> list[Kernel]:
    """What the tests below launch, for precompile.py."""
    problems = [one for case in EXACT for one in exact_problems(*case)]
    problems += [asked(m, 136, 2048, "w2a2") for m in TOKENS] + [asked(*e, "w3a2asym-xbipolar") for e in EDGES]
    problems += [asked(m, 264, 1500, "w2a3-xasym", output) for m in (20, 300) for output in OUTPUTS]
    problems += [asked(m, 28672, 4096, "w1a1", Output.f16) for m in (64, 4096)]
    problems += [asked(33, 320, 1300, "w4a4", Output.f16)]
    configs = {sm90_bitplane.default(problem) for problem in problems}
    configs |= {variant(asked(300, 328, 2100, "w2a3asym"), change) for change in VARIANTS}
    configs |= {variant(asked(1000, 6000, 2100, "w1a1", Output.f16), change | {"tensor": True}) for change in CUTS}
    configs |= {variant(asked(*shape, "w2a2", Output.f16), PIECES) for shape in IN_PIECES}
    configs |= {once(asked(64, 4096, 4096, "w2a2", Output.f16), **change) for change in AT_ONCE}
    for slab, buffers, tensor in itertools.product((32, 64), (2, 3), (True, False)):
        problem = asked(300, 328, 2100, "w2a3asym", Output.f16)
        configs.add(large(problem, tokens=128, tensor=tensor, slab=slab, buffers=buffers))
    return [sm90_bitplane.kernel(config) for config in configs]


def check(problem: Problem, config: Config | None = None, *, padding: int = 0, bias: bool = False) -> torch.Tensor:
    """Multiply into poisoned memory, compare with the exact integers; returns what was written."""
    m, n, k = problem.m, problem.n, problem.k
    given = operands(m, n, k, problem.weights, problem.activations, "cuda")
    dtype = problem.output.dtype
    room = torch.full((m + 2, n + padding), 77, dtype=dtype, device="cuda")
    y = room[1 : m + 1, :n]
    added = torch.linspace(-1, 1, n, device="cuda") if bias else None
    sm90_bitplane.multiply(given.x, given.weight, problem.output, bias=added, y=y, config=config)
    if problem.output is Output.s32:
        assert torch.equal(y.double(), given.exact), f"{int((y.double() != given.exact).sum())} of {m * n} are wrong"
    else:
        expected = given.exact * given.unit + (0 if added is None else added.double())
        # fp32 arithmetic of a handful of roundings, then one to the output type.
        step = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 0.0}[dtype] + 2**-21
        bound = expected.abs() * step + 2**-24 * (dtype is torch.float16) + 1e-6 * bias
        assert bool(((y.double() - expected).abs() <= bound).all())
    assert bool((room[0] == 77).all() and (room[m + 1] == 77).all() and (room[:, n:] == 77).all())
    return y


@pytest.mark.parametrize(("p", "q", "w", "x"), EXACT)
def test_every_pair_is_exact(p: int, q: int, w: str, x: str) -> None:
    for problem in exact_problems(p, q, w, x):
        check(problem)


@pytest.mark.parametrize("m", TOKENS)
def test_any_number_of_tokens(m: int) -> None:
    check(asked(m, 136, 2048, "w2a2"), padding=3)


@pytest.mark.parametrize(("m", "n", "k"), EDGES)
def test_ragged_weights_and_k(m: int, n: int, k: int) -> None:
    check(asked(m, n, k, "w3a2asym-xbipolar"))


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("m", [20, 300])
def test_results_are_rounded_once(m: int, output: Output) -> None:
    problem = asked(m, 264, 1500, "w2a3-xasym", output)
    check(problem, bias=True)
    check(problem, padding=1)  # rows that do not start on 16 bytes
    check(asked(m, 263, 1500, "w2a3-xasym", output))


@pytest.mark.parametrize(("m", "n", "k"), IN_PIECES)
def test_first_planes_in_pieces(m: int, n: int, k: int) -> None:
    problem = asked(m, n, k, "w2a2", Output.f16)
    config = variant(problem, PIECES)
    assert sm90_bitplane.why_not(problem, config) is None
    check(problem, config, bias=True)
    check(problem, config, padding=3)  # by threads, and whole


@pytest.mark.parametrize("change", CUTS, ids=str)
def test_tiles_after_whole_rounds_are_cut(change: dict[str, object]) -> None:
    problem = asked(1000, 6000, 2100, "w1a1", Output.f16)
    check(problem, variant(problem, change | {"tensor": True}))


@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_every_kind_of_config(change: dict[str, object]) -> None:
    problem = asked(300, 328, 2100, "w2a3asym")
    config = variant(problem, change)
    assert sm90_bitplane.why_not(problem, config) is None
    check(problem, config)


@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize(("m", "n", "slab"), [(300, 328, 32), (300, 320, 64), (5, 8, 32)])
def test_tensor_stores(m: int, n: int, slab: int, buffers: int) -> None:
    problem = asked(m, n, 2100, "w2a3asym", Output.f16)
    config = large(problem, tokens=128, tensor=True, slab=slab, buffers=buffers)
    assert sm90_bitplane.why_not(problem, config) is None
    check(problem, config, padding=8, bias=True)
    check(problem, config, padding=3)  # rows that do not start on 16 bytes: stored by threads


@pytest.mark.parametrize("m", [64, 4096])
def test_large_layer_and_repeats(m: int) -> None:
    problem = asked(m, 28672, 4096, "w1a1", Output.f16)
    given = operands(m, 28672, 4096, problem.weights, problem.activations, "cuda")
    first = sm90_bitplane.multiply(given.x, given.weight, Output.f16)
    expected = given.exact * given.unit
    assert bool(((first.double() - expected).abs() <= expected.abs() * 2**-10.9 + 2**-24).all())
    for _ in range(20):
        assert torch.equal(first, sm90_bitplane.multiply(given.x, given.weight, Output.f16))


@pytest.mark.parametrize("change", AT_ONCE, ids=str)
def test_chains_of_products_that_overlap(change: dict[str, object]) -> None:
    """Kernels that load their weights while those ahead of them still run: every result is the same."""
    problem = asked(64, 4096, 4096, "w2a2", Output.f16)
    config = once(problem, **change)
    assert sm90_bitplane.why_not(problem, config) is None
    given = operands(64, 4096, 4096, problem.weights, problem.activations, "cuda")
    results = [sm90_bitplane.multiply(given.x, given.weight, Output.f16, config=config) for _ in range(24)]
    expected = given.exact * given.unit
    assert bool(((results[0].double() - expected).abs() <= expected.abs() * 2**-10.9 + 2**-24).all())
    assert all(torch.equal(results[0], result) for result in results)


def test_after_quantize_and_pack() -> None:
    weight = random_weight(320, 1300, WeightFormat(4))
    x = torch.randn(33, 1300, generator=torch.Generator().manual_seed(5)).half()
    form = ActivationFormat(4, "sym")
    packed = quantize_activations.quantize(x.cuda(), form)
    y = sm90_bitplane.multiply(packed, bitplane_layout.prepare(weight).to("cuda"), Output.f16)
    expected = reference.linear(x.double(), weight, form)
    assert bool(((y.cpu().double() - expected).abs() <= expected.abs() * 2**-10 + 1e-5).all())
