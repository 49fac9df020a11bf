"""sm90_experts_gemv on the CPU: widths, codes, groups, ragged shapes, and every kind of routing.

Some of the formats are tested, all with ANYBIT_EXHAUSTIVE=1 in the environment.
"""

from dataclasses import replace

import pytest
import torch

from anybit.kernels.experts.sm90_experts_gemv import sm90_experts_gemv
from anybit.kernels.experts.sm90_experts_gemv.sm90_experts_gemv import Config, Problem
from anybit.scheme import ActivationFormat, WeightFormat
from cases import EXHAUSTIVE
from cases_experts import HOPPER, Mixture, error
from cases_packed import FOREIGN, TOLERANCE, scheme_of

HALVES = (torch.float16, torch.bfloat16)


def check(mixture: Mixture, ids: torch.Tensor, weights: torch.Tensor, seed: int = 0, changes: object = None) -> None:
    y = mixture.emulated(ids, weights, seed, changes)
    found = error(y, mixture.expected(ids, weights))
    assert found < 2 * TOLERANCE[mixture.dtype], f"error {found:.2e}"


@pytest.mark.parametrize("bits", range(1, 9) if EXHAUSTIVE else (1, 2, 3, 8))
def test_all_widths(bits: int) -> None:
    format = WeightFormat(bits, ("sym", "asym", "bipolar")[bits % 3], 128)
    mixture = Mixture(format, 5, 256, 128, 1 + bits % 4, HALVES[bits % 2], seed=bits)
    check(mixture, *mixture.routing(3, bits), seed=bits)


@pytest.mark.parametrize("group", [32, 64, None] if EXHAUSTIVE else [32, None])
@pytest.mark.parametrize("code", ["sym", "asym"] if EXHAUSTIVE else ["asym"])
def test_groups_and_zeros(code: str, group: int | None) -> None:
    mixture = Mixture(WeightFormat(4, code, group), 4, 128, 136, 2, seed=3, bias=True)  # type: ignore[arg-type]
    check(mixture, *mixture.routing(2))


@pytest.mark.parametrize("format", FOREIGN if EXHAUSTIVE else FOREIGN[::3], ids=scheme_of)
def test_formats_of_other_tools(format: WeightFormat) -> None:
    place = FOREIGN.index(format)
    mixture = Mixture(format, 4, 128, 264, 1 + place % 3, HALVES[place % 2], seed=place)
    check(mixture, *mixture.routing(2))


@pytest.mark.parametrize(("hidden", "inner"), [(100, 40), (72, 8), (332, 200)])
def test_ragged_shapes(hidden: int, inner: int) -> None:
    mixture = Mixture(WeightFormat(4, "sym", 128), 3, hidden, inner, 3, bias=True)
    check(mixture, *mixture.routing(2))


@pytest.mark.parametrize("gate", ["gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("dtype", HALVES)
def test_gates(gate: str, dtype: torch.dtype) -> None:
    mixture = Mixture(WeightFormat(4, "e2m1", 32), 4, 128, 64, 2, dtype, gate=gate, bias=True)
    check(mixture, *mixture.routing(2))


@pytest.mark.parametrize("tile_m", [1, 2, 4])
def test_kinds_of_routing(tile_m: int) -> None:
    """All to one expert, duplicates in a token, ids out of range, tokens without any; both widths of ids."""
    mixture = Mixture(WeightFormat(4, "sym", 128), 4, 128, 64, 6)

    def tiled(problem: Problem) -> Config:
        return sm90_experts_gemv.fitted(problem, 4, 8, tile_m)

    _, weights = mixture.routing(3)
    for i, ids in enumerate(
        (
            [[2, 1, 0]] * 6,
            [[3, 3, 3]] * 6,
            [[0, 1, 0], [-1, 2, -1], [-1, -1, -1], [3, 4, 1 << 30], [1, 1, -1], [2, 0, 1]],
            [[0, 1, 2], [3, 0, 1], [2, 3, 0], [0, 3, 2], [1, 0, 3], [0, 2, 1]],
        )
    ):
        check(mixture, torch.tensor(ids, dtype=(torch.int64, torch.int32)[i % 2]), weights, i, tiled)
    none = mixture.emulated(torch.full((6, 3), -1), weights, changes=tiled)
    assert torch.equal(none, torch.zeros_like(none))


@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_rings_and_clusters(cluster: int) -> None:
    """Pipelines that wrap around, activations converted again, warps without columns, blocks that split K."""
    mixture = Mixture(WeightFormat(4, "sym", 128), 3, 640, 384, 3, bias=cluster == 2)
    for i, (warps, kibibytes, tile_m, blocks, x_stages) in enumerate(
        ((2, 8, 1, 4, 1), (3, 20, 2, 6, 2), (5, 16, 4, 8, 4))
    ):

        def made(p: Problem, shape: tuple[int, ...] = (warps, kibibytes, tile_m, blocks, 0, x_stages)) -> Config:
            return sm90_experts_gemv.fitted(p, *shape, cluster=cluster if p.down else 1)

        check(mixture, *mixture.routing(2), seed=i, changes=made)


def test_nan_stays_in_its_token() -> None:
    mixture = Mixture(WeightFormat(4, "sym", 128), 4, 128, 64, 4)
    mixture.x[1, 3], mixture.x[2, 5] = torch.nan, torch.inf
    ids, weights = torch.tensor([[0, 1], [0, 1], [1, 0], [1, 2]]), torch.full((4, 2), 0.5)
    y = mixture.emulated(ids, weights)
    assert not y[1:3].isfinite().any()
    rest = torch.tensor([0, 3])
    expected = mixture.expected(ids, weights)[rest]
    assert error(y[rest], expected) < 2 * TOLERANCE[torch.float16]


def test_says_what_it_refuses() -> None:
    problem = Problem(1, 2, 4, 128, 128, WeightFormat(4, "sym", 128), False, device=HOPPER)
    assert "tokens" in str(sm90_experts_gemv.why_not(replace(problem, tokens=9)))
    assert "experts" in str(sm90_experts_gemv.why_not(replace(problem, top=33)))
    assert "eight" in str(sm90_experts_gemv.why_not(replace(problem, n=72)))
    config = sm90_experts_gemv.default(problem)
    assert "another problem" in str(sm90_experts_gemv.why_not(replace(problem, down=True), config))
    assert "do not cover" in str(sm90_experts_gemv.why_not(replace(problem, n=4096), config))
    assert "choices" in str(
        sm90_experts_gemv.why_not(replace(problem, top=16, down=True), replace(config, down=True, tile_m=4, places=64))
    )
    assert ActivationFormat().bits == 16
    assert all(sm90_experts_gemv.why_not(problem, c) is None for c in sm90_experts_gemv.configs(problem))
