"""The search on a GPU, and layers that follow its map."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anybit.choose import dispatch as dispatching
from anybit.choose.builtin import builtin
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.layers.linear import QuantLinear
from anybit.scheme import Scheme
from anybit.tune.roofline import floor_us
from anybit.tune.search import Options, search
from anybit.tune.worker import TimingBudget
from cases import random_weight

N, K = 512, 1024


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    dispatching.use()


def product(scheme: str, m: int, n: int = N, k: int = K) -> LinearProblem:
    parsed = Scheme.parse(scheme)
    return LinearProblem(m, n, k, parsed.weights, parsed.activations, device=Device.of(torch.empty(0, device="cuda")))


def close(layer: QuantLinear, reference: QuantLinear, m: int) -> None:
    x = torch.randn(m, layer.in_features, generator=torch.Generator().manual_seed(m)).half()
    actual, expected = layer(x.cuda()).float().cpu(), reference(x).float()
    error = float((actual - expected).norm() / expected.norm())
    assert error < 2e-3, f"{m} tokens: relative error {error:.2e}"


def both(scheme: str, backend: str | None = None, act_order: bool = False) -> tuple[QuantLinear, QuantLinear]:
    weight = random_weight(N, K, Scheme.parse(scheme).weights)
    if act_order:
        order = torch.randperm(K, generator=torch.Generator().manual_seed(1))
        weight = replace(weight, group_index=(order // (weight.format.group or K)).to(torch.int32))
    on_gpu = QuantLinear.from_weight(weight.to("cuda"), scheme, backend=backend)
    return on_gpu, QuantLinear.from_weight(weight, scheme)


def test_a_search_finds_nothing_slower_than_built_in_choices(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    wanted = [product("w4a8", 1), product("w2a2", 64), product("w4a16g128", 256)]
    policy = search(wanted, path, Options(2, TimingBudget(30, 1, 2)))
    assert not policy.excluded
    for one in wanted:
        point = policy.exact(one)
        assert point is not None
        own = point.strategies[builtin(one).strategy]
        assert 0 < own.us <= 1.02 * point.default_us
        assert floor_us(one) < 1.2 * own.us
    dispatching.use(path)
    for scheme in ("w4a8", "w2a2", "w4a16g128"):
        on_gpu, reference = both(scheme)
        for m in (1, 50, 200):
            close(on_gpu, reference, m)


def test_activation_order_with_quantized_activations() -> None:
    on_gpu, reference = both("w4a8g128", "packed", act_order=True)
    for m in (1, 40):
        close(on_gpu, reference, m)
