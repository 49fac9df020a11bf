"""Experts' products for many tokens on the emulator: every kind of routing, operand and ragged edge."""

from dataclasses import fields, replace

import pytest
import torch

import emulate
from anybit import jit
from anybit.jit.tensor_map import Matrix
from anybit.kernels.common.types import Gate
from anybit.kernels.experts.sm90_grouped_digits import sm90_grouped_digits
from anybit.kernels.experts.sm90_grouped_gemm import sm90_grouped_gemm
from anybit.kernels.experts.sm90_grouped_gemm.sm90_grouped_gemm import Config
from cases_experts_grouped import Experts, as_matrix, experts


def run(made: Experts, tile_m: int, row_warpgroups: int = 2, seed: int = 0) -> torch.Tensor:
    """y of the launches on the emulator, with few stages and few blocks."""
    products = made.problem.products
    configs = [sm90_grouped_gemm.config_for(one, tile_m, row_warpgroups) for one in products]
    for launch in made.launches((_short(configs[0]), _short(configs[1]))):
        emulate.launched(boxed(launch), seed=seed)
    assert isinstance(made.operands.y, torch.Tensor)
    return made.operands.y


def run_halves(made: Experts, tile_m: int, seed: int = 0) -> torch.Tensor:
    """The same on bf16 activations as fp16."""
    configs = sm90_grouped_gemm.configs(made.problem, tile_m, halves=True)
    assert configs
    for launch in made.launches((_short(configs[0]), _short(configs[1]))):
        emulate.launched(boxed(launch), seed=seed)
    assert isinstance(made.operands.y, torch.Tensor)
    return made.operands.y


def _short(config: Config) -> Config:
    return replace(config, stages=2, prologue_stages=2)


def run_digits(made: Experts, tile_m: int, *shape: int, wgmma: bool = False, seed: int = 0) -> torch.Tensor:
    """The same on digits of activations."""
    first, second = (sm90_grouped_digits.config_for(one, tile_m, *shape, wgmma=wgmma) for one in made.problem.products)
    for launch in made.launches((first, second)):
        emulate.launched(launch, seed=seed)
    assert isinstance(made.operands.y, torch.Tensor)
    return made.operands.y


def boxed(launch: jit.Launch) -> jit.Launch:
    """The launch with tensor maps as the emulator reads them, on few blocks."""
    maps = {field.name: getattr(launch.params, field.name) for field in fields(launch.params)}  # type: ignore[arg-type]
    boxes = {
        name: emulate.Box(as_matrix(one), one.box_columns, one.box_rows)
        for name, one in maps.items()
        if isinstance(one, Matrix)
    }
    grid = (min(launch.grid[0], 3), 1, 1) if boxes else launch.grid
    return replace(launch, params=replace(launch.params, **boxes), grid=grid)  # type: ignore[type-var]


def error(made: Experts, y: torch.Tensor) -> float:
    wanted = made.expected()
    return float((y.double() - wanted).abs().mean() / wanted.abs().mean().clamp(min=1e-9))


def ids_of(kind: str, tokens: int, top_k: int, count: int) -> torch.Tensor:
    """Choices of experts: [tokens, top_k], int64."""
    found = torch.stack(
        [torch.randperm(count, generator=torch.Generator().manual_seed(i))[:top_k] for i in range(tokens)]
    )
    if kind == "one":
        found[:] = 2
    elif kind == "skewed":
        found = torch.where(torch.arange(tokens)[:, None] % 5 > 0, torch.arange(top_k).expand(tokens, -1), found)
    elif kind == "skipped":
        found[::3, 0] = -1
        found[1] = -1
    elif kind == "none":
        found[:] = -1
    return found


@pytest.mark.parametrize("kind", ["uniform", "one", "skewed", "skipped", "none"])
def test_any_routing(kind: str) -> None:
    made = experts("w4a16g128", ids_of(kind, 21, 2, 5), 5, 256, 128, torch.float16)
    for seed in range(2):
        for y in (run(made, 16, seed=seed), run_digits(made, 8, 2, 2, 2, 3, seed=seed)):
            assert error(made, y) < 2e-3


@pytest.mark.parametrize(
    "scheme", ["w4a8g128", "w4a8", "w3a16g64", "w8a16", "w4a16g32e2m1", "w4a8fpg128", "w2a16g128asym"]
)
def test_formats(scheme: str) -> None:
    made = experts(scheme, ids_of("uniform", 20, 3, 4).int(), 4, 256, 128, bias=True, routing=torch.bfloat16)
    assert error(made, run(made, 16)) < 2e-2


@pytest.mark.parametrize("scheme", ["w4a16g128", "w4a16g32e2m1"])
def test_bf16_as_fp16(scheme: str) -> None:
    """Rows of any size, and one with NaN."""
    made = experts(scheme, ids_of("uniform", 20, 3, 4), 4, 328, 200, bias=True)
    assert isinstance(made.operands.x, torch.Tensor)
    made.operands.x[::2] *= 1e3
    made.operands.x[3] = 0
    assert error(made, run_halves(made, 16)) < 2e-2
    made.operands.x[4, 7] = torch.nan
    y = run_halves(made, 64)
    assert y[4].isnan().all() and not y[torch.arange(20) != 4].isnan().any()


@pytest.mark.parametrize("scheme", ["w4a16", "w3a16g64", "w2a16g128asym", "w1a16bipolar"])
@pytest.mark.parametrize("wgmma", [False, True])
def test_digits(scheme: str, wgmma: bool) -> None:
    """Ragged K and rows, more stages than blocks of columns."""
    made = experts(scheme, ids_of("uniform", 20, 3, 4).int(), 4, 328, 200, bias=True, routing=torch.bfloat16)
    y = run_digits(made, 16, 4 if wgmma else 1, 2, 3, 2, wgmma=wgmma)
    assert error(made, y) < 2e-2


@pytest.mark.parametrize("scheme", ["w4a16g32e2m1", "w4a16g16e2m1", "w4a16e2m1"])
@pytest.mark.parametrize("tile_m", [8, 16])
def test_e2m1_of_few_tokens(scheme: str, tile_m: int) -> None:
    """Codes as fp16, activations of any size, and one of NaN."""
    made = experts(scheme, ids_of("skewed", 20, 3, 4), 4, 328, 200, torch.float16, bias=True)
    assert error(made, run_digits(made, tile_m, 1, 2, 3, 2)) < 2e-3
    made = experts(scheme, ids_of("uniform", 20, 3, 4), 4, 328, 200, bias=True)
    assert isinstance(made.operands.x, torch.Tensor)
    made.operands.x[::2] *= 1e3
    made.operands.x[3] = 0
    assert error(made, run_digits(made, tile_m, 2, 1, 2, 3)) < 2e-2
    made.operands.x[4, 7] = torch.nan
    y = run_digits(made, tile_m, 2, 1, 2, 3)
    assert y[4].isnan().all() and not y[torch.arange(20) != 4].isnan().any()


@pytest.mark.parametrize("gate", [Gate.gelu_tanh, Gate.swigluoai])
def test_gates(gate: Gate) -> None:
    made = experts("w4a16g32", ids_of("skewed", 20, 2, 3), 3, 128, 72, bias=True, gate=gate)
    assert isinstance(made.operands.x, torch.Tensor)
    made.operands.x[:] *= 8  # far enough to be clamped
    for y in (run(made, 16), run_halves(made, 16), run_digits(made, 8, 2, 2, 2, 3)):
        assert error(made, y) < 2e-2


@pytest.mark.parametrize("tile_m, row_warpgroups", [(64, 3), (48, 4)])
def test_ragged_tiles(tile_m: int, row_warpgroups: int) -> None:
    """Small boxes of x, rows of an expert that fill neither its last tile of 64 nor a block's row tiles."""
    made = experts("w4a16g128", ids_of("skewed", 70, 2, 3), 3, 200, 72, torch.float16, bias=True)
    assert error(made, run(made, tile_m, row_warpgroups)) < 2e-3


def test_even_tiles() -> None:
    """Tiles of 144 and 136 of an expert's 280 tokens, not of 160 and 120."""
    made = experts("w4a16g128", ids_of("one", 280, 1, 3), 3, 128, 64, torch.float16)
    assert error(made, run(made, 160, 1)) < 2e-3


def test_a_tokens_nan_stays_in_it() -> None:
    made = experts("w4a16g128", ids_of("uniform", 9, 2, 3), 3, 128, 64)
    assert isinstance(made.operands.x, torch.Tensor)
    made.operands.x[4, 7] = torch.nan
    y = run(made, 16)
    assert y[4].isnan().all() and not y[torch.arange(9) != 4].isnan().any()
    y = run_digits(made, 8, 2, 4, 4, 2)
    assert y[4].isnan().all() and not y[torch.arange(9) != 4].isnan().any()


def test_default_configs_are_legal() -> None:
    shapes = ((128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 8, 7168, 2048), (128, 4, 2880, 2880))
    for tokens in (1, 64, 256, 1024, 4096, 16384):
        made = experts("w4a16g128", ids_of("uniform", 1, 2, 3), 3, 128, 64).problem
        for count, top_k, hidden, inner in shapes:
            problem = replace(made, tokens=tokens, experts=count, top_k=top_k, hidden=hidden, inner=inner)
            assert sm90_grouped_gemm.why_not(problem, sm90_grouped_gemm.default(problem)) is None
