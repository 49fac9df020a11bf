"""sm90_bitplane.cuh on the CPU: every walk and kind of tile, the three code families, ragged in every dimension.

Every 37th of the 192 pairs of widths and code families is tested, all with ANYBIT_EXHAUSTIVE=1 in the environment.
"""

import pytest
import torch

import emulate
from anybit.kernels.gemm import sm90_bitplane
from anybit.kernels.gemm.sm90_bitplane import (
    Config,
    Output,
    Problem,
    Turns,
    Walk,
)
from anybit.scheme import ActivationFormat, Scheme, WeightFormat
from cases import EXHAUSTIVE, PAIRS
from cases_bitplane import DEPENDENT, code_pairs, emulated, large, on_host, once, operands, small

pytestmark = pytest.mark.emulate

EVERY = [(p, q, codes) for p, q in PAIRS for codes in code_pairs()[:3]]
EVERY = EVERY if EXHAUSTIVE else EVERY[::37]


def problem(scheme: str, m: int, n: int, k: int, output: Output = Output.s32) -> Problem:
    return emulated(scheme, m, n, k, output)


def run(asked: Problem, config: Config, seed: int = 0, padding: int = 0, bias: bool = False) -> None:
    assert sm90_bitplane.why_not(asked, config) is None
    m, n, k = asked.m, asked.n, asked.k
    given = operands(m, n, k, asked.weights, asked.activations, seed=seed)
    y = torch.full((m, n + padding), 77, dtype=asked.output.dtype)
    added = torch.linspace(-1, 1, n) if bias else None
    y_map = emulate.Box(y[:, :n], 64, config.slab) if config.tensor else bytes(128)
    params = on_host(given, y, added, y_map)
    emulate.run(sm90_bitplane.kernel(config), params, sm90_bitplane.grid(asked, config), seed=seed, dependent=DEPENDENT)
    assert bool((y[:, n:] == 77).all())
    y = y[:, :n]
    if asked.output is Output.s32:
        assert torch.equal(y.double(), given.exact)
    else:
        expected = given.exact * given.unit + (0 if added is None else added.double())
        step = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 0.0}[y.dtype] + 2**-21
        assert bool(((y.double() - expected).abs() <= expected.abs() * step + 1e-6).all())


@pytest.mark.parametrize(
    ("scheme", "m", "n", "k", "change"),
    [
        ("w1a1", 9, 70, 2100, {"tokens": 8}),
        ("w2a3asym-xasym", 5, 20, 1100, {"tokens": 8, "span": 2, "stages": 2, "slots": 3}),
        ("w3a2bipolar-xasym", 33, 72, 3000, {"tokens": 16, "cluster": 2}),
        ("w2a2asym-xbipolar", 3, 65, 4200, {"tokens": 8, "cluster": 4}),
        ("w2a1", 20, 40, 2500, {"tokens": 32, "walk": Walk.tokens}),
        ("w3a4", 70, 50, 2100, {"tokens": 32, "walk": Walk.tokens, "span": 3, "stages": 3, "slots": 4}),
        ("w1a1", 23, 40, 5000, {"tokens": 32, "walk": Walk.tokens, "slots": 4}),  # slots for more chunks than stages
        ("w1a2bipolar-xasym", 12, 33, 2100, {"tokens": 32, "walk": Walk.tokens, "cluster": 2}),
        ("w1a1", 9, 70, 4100, {"tokens": 8, "groups": 2, "span": 5, "stages": 5, "slots": 5}),
        ("w2a2", 40, 100, 2100, {"tokens": 16, "multicast": True, "cluster": 2, "span": 3, "stages": 3, "slots": 4}),
        (
            "w2a3",
            50,
            125,
            1100,
            {"tokens": 32, "walk": Walk.tokens, "multicast": True, "cluster": 4, "groups": 2}
            | {"span": 2, "stages": 2, "slots": 6},
        ),
        (
            "w2a3",
            70,
            60,
            2100,
            {"tokens": 16, "walk": Walk.tokens, "multicast": True, "cluster": 4, "groups": 2}
            | {"span": 3, "stages": 3, "slots": 9},
        ),
        ("w2a1", 70, 60, 2100, {"tokens": 32, "walk": Walk.tokens, "by_columns": True, "groups": 2, "stacked": 32}),
        (
            "w1a3asym-xasym",
            70,
            70,
            3100,
            {"tokens": 32, "walk": Walk.tokens, "by_columns": True, "groups": 4, "stacked": 8, "span": 2, "stages": 4}
            | {"slots": 4},
        ),
        (
            "w2a2",
            30,
            60,
            2100,
            {"tokens": 32, "walk": Walk.tokens, "by_columns": True, "groups": 2, "stacked": 32, "cluster": 2}
            | {"multicast": True, "span": 3, "stages": 3, "slots": 4},
        ),
        ("w3a4", 70, 50, 2100, {"tokens": 32, "walk": Walk.tokens, "span": 3, "stages": 3, "slots": 12, "groups": 2}),
        ("w2a1", 20, 40, 2500, {"tokens": 32, "walk": Walk.tokens, "groups": 4, "slots": 6, "stages": 3, "span": 3}),
    ],
)
def test_few_tokens(scheme: str, m: int, n: int, k: int, change: dict[str, object]) -> None:
    asked = problem(scheme, m, n, k)
    for seed in range(2):
        run(asked, small(asked, **change), seed)


@pytest.mark.parametrize(("p", "q", "codes"), EVERY)
def test_every_pair_is_exact(p: int, q: int, codes: tuple[str, str]) -> None:
    scheme = str(Scheme(WeightFormat(p, codes[0]), ActivationFormat(q, codes[1])))
    few, many = problem(scheme, 11, 70, 1100), problem(scheme, 70, 132, 1031)
    run(few, small(few, 8))
    run(many, large(many, 64))


@pytest.mark.parametrize(
    ("scheme", "m", "n", "k", "change"),
    [
        ("w1a1", 40, 64, 2100, {"tokens": 32, "walk": Walk.weights}),
        ("w2a3asym-xasym", 37, 136, 2000, {"tokens": 32, "walk": Walk.weights}),
        ("w3a2bipolar-xasym", 64, 70, 4000, {"tokens": 32, "walk": Walk.tokens, "even": True, "sets": 2}),
        ("w2a2", 64, 64, 2100, {"tokens": 32, "walk": Walk.tokens, "reserve": 64, "even": True, "sets": 2, "early": 1}),
        ("w1a2asym", 21, 300, 2100, {"tokens": 16, "walk": Walk.weights}),
        ("w2a1", 100, 96, 4096, {"tokens": 16, "walk": Walk.tokens, "early": 0}),
        ("w4a2", 70, 128, 2100, {"tokens": 32, "walk": Walk.weights, "sets": 2, "early": 2}),
        ("w3a3asym", 64, 120, 2100, {"tokens": 32, "walk": Walk.weights, "sets": 3}),
        ("w4a4", 40, 64, 2100, {"tokens": 32, "walk": Walk.weights, "sets": 3, "early": 1}),
        ("w3a4", 37, 136, 3100, {"tokens": 32, "walk": Walk.weights, "sets": 3, "early": 1, "threads_copy": True}),
        ("w2a2-xasym", 70, 72, 2100, {"tokens": 32, "walk": Walk.tokens, "early": 2, "threads_copy": True}),
        ("w1a4", 21, 100, 1100, {"tokens": 16, "walk": Walk.weights, "threads_copy": True}),
    ],
)
def test_everything_of_a_tile_at_once(scheme: str, m: int, n: int, k: int, change: dict[str, object]) -> None:
    for output in (Output.s32, Output.f16):
        asked = problem(scheme, m, n, k, output)
        run(asked, once(asked, **change), bias=output is Output.f16)
    run(asked, once(asked, **change), seed=1, padding=3)  # rows that begin anywhere


@pytest.mark.parametrize(
    ("scheme", "m", "n", "k", "change"),
    [
        ("w1a1", 70, 200, 2100, {"tokens": 64, "turns": Turns.none}),
        ("w2a3asym-xasym", 50, 140, 3000, {"tokens": 64, "turns": Turns.diagonals}),
        ("w3a1bipolar-xasym", 130, 100, 1000, {"tokens": 128}),
        ("w1a2", 100, 300, 2000, {"tokens": 64, "resident": True, "activation_groups": 2, "turns": Turns.tiles}),
        ("w2a1", 100, 300, 3000, {"tokens": 64, "turns": Turns.staggered, "weight_groups": 2, "activation_groups": 2}),
        ("w1a2", 100, 300, 1000, {"tokens": 64, "turns": Turns.staggered, "weight_groups": 3, "activation_groups": 2}),
        ("w2a2", 100, 300, 1100, {"tokens": 64, "resident": True, "activation_groups": 2, "weight_groups": 1}),
        ("w2a1", 300, 300, 1100, {"tokens": 128, "tail": 64}),  # the tile that is left has one piece with tokens
        ("w1a1", 120, 300, 1100, {"tokens": 128, "tail": 64, "turns": Turns.tiles}),
        ("w2a1", 150, 140, 2100, {"tokens": 64, "cluster": 2, "multicast": True}),
        ("w1a2", 300, 300, 1100, {"tokens": 128, "tail": 64, "cluster": 2, "multicast": True}),
        ("w1a2", 200, 100, 1100, {"tokens": 256, "tail": 64}),  # less than a round: all of it is cut
    ],
)
def test_many_tokens(scheme: str, m: int, n: int, k: int, change: dict[str, object]) -> None:
    asked = problem(scheme, m, n, k)
    for seed in range(2):
        run(asked, large(asked, **change), seed)


@pytest.mark.parametrize(("m", "k"), [(100, 2100), (260, 1100)])  # pieces without tokens; tiles without
def test_first_planes_in_pieces(m: int, k: int) -> None:
    asked = problem("w2a2", m, 136, k, Output.f16)
    rings = {"weight_groups": 2, "activation_groups": 2}
    run(asked, large(asked, tokens=256, turns=Turns.none, tensor=True, starts=2, **rings), bias=True)


@pytest.mark.parametrize("output", [Output.f16, Output.bf16, Output.f32])
def test_results_are_rounded_once(output: Output) -> None:
    for n, padding in ((72, 0), (71, 2), (72, 8)):
        asked = problem("w2a3-xasym", 66, n, 1024, output)
        run(asked, large(asked, tokens=64), padding=padding, bias=True)
        if output is not Output.f32 and n % 8 == 0:
            ways = {"buffers": 2 + padding // 8, "streamed": padding > 0}
            run(asked, large(asked, tokens=64, tensor=True, **ways), padding=padding, bias=True)
        run(asked, small(asked, tokens=16), padding=padding, bias=True)


def test_tensor_stores_want_whole_sixteens() -> None:
    asked = problem("w2a2", 5, 71, 1024, Output.f16)
    assert "end within them" in (sm90_bitplane.why_not(asked, large(asked, tokens=64, tensor=True)) or "")
