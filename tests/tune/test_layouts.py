"""Layers in two layouts, with backends that record calls: what is kept, which part runs, its arguments."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from anybit import ops
from anybit.choose import dispatch as dispatching
from anybit.choose.builtin import step
from anybit.choose.dispatch import Dispatcher
from anybit.choose.families import Layout
from anybit.choose.policy import Measured, Origin, Point, Policy
from anybit.choose.space import space
from anybit.codes.packing import QuantizedWeight
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.ops import layouts
from anybit.ops.backend import LinearSpec
from anybit.ops.layouts import MultiLayoutBackend
from anybit.ops.reference import ReferencePacked
from anybit.scheme import ActivationFormat, Scheme
from cases import random_weight

H200 = Device.named("sm_90a")
N, K = 64, 512


class Part(ReferencePacked):
    """The reference, under another name, with an extra tensor; records its calls."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, list[tuple[int, LinearSpec]]()

    def prepare(self, weight: QuantizedWeight, activations: ActivationFormat) -> list[Tensor]:
        return [*super().prepare(weight, activations), torch.tensor(activations.bits)]

    def linear(self, x: Any, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        assert len(tensors) == 7
        assert int(tensors[6]) == spec.activations.bits
        self.calls.append((x.numel() // spec.k, spec))
        return super().linear(x, tensors, bias, spec)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: H200))
    monkeypatch.setattr(dispatching, "_told", set())
    yield
    dispatching.use()
    dispatching.allow()


def obey(monkeypatch: pytest.MonkeyPatch, scheme: str, times: dict[int, dict[str, float]]) -> None:
    parsed = Scheme.parse(scheme)
    policy = Policy(Origin.here(H200.name, H200.arch))
    for m, us in times.items():
        one = LinearProblem(m, N, K, parsed.weights, parsed.activations)
        candidates = space(one, ["a8"]).candidates
        found = {
            strategy: Measured.of(next(c for c in candidates if c.strategy == strategy), one, time)
            for strategy, time in us.items()
        }
        policy.put(one, Point(max(us.values()), found))
    monkeypatch.setattr(dispatching, "_dispatchers", {H200.name: Dispatcher(H200.name, [policy])})


def prepared(backend: MultiLayoutBackend, scheme: str) -> tuple[QuantizedWeight, ops.Prepared]:
    parsed = Scheme.parse(scheme)
    weight = random_weight(N, K, parsed.weights)
    spec = LinearSpec(backend.name, N, K, weight.format, parsed.activations)
    return weight, ops.Prepared(backend.prepare(weight, parsed.activations), str(spec))


def test_each_token_count_runs_the_part_that_won(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Part("bitwise"), Part("packed")
    both = MultiLayoutBackend("test-both", (one, two), (Layout.planes, Layout.tiles_a8), 7)
    monkeypatch.setitem(ops.backends, both.name, both)
    few, many = {"bitwise": 2.0, "padding to int8": 3.0}, {"bitwise": 9.0, "padding to int8": 4.0}
    obey(monkeypatch, "w2a4", {1: few, 64: many})
    weight, ready = prepared(both, "w2a4")
    for m in (1, 40, 64, 1):
        x = torch.randn(m, K).half()
        y = ops.linear(x, ready)
        assert torch.equal(y, ops.linear(x, ops.prepare(weight, ready.spec.activations, "reference-packed")))
    assert [m for m, _ in one.calls] == [1, 1]
    assert [m for m, _ in two.calls] == [40, 64]
    assert {spec.backend for _, spec in one.calls} == {"bitwise"}
    assert one.calls[0][1] is one.calls[1][1]  # plans are keyed by a spec's identity
    assert torch.equal(ready.restore().words, weight.words)
    assert both.linear(torch.zeros(0, K).half(), ready.tensors, None, LinearSpec.parse(ready.spec_text)).shape == (0, N)


@pytest.mark.parametrize(
    ("scheme", "m", "fused", "which"),
    [
        ("w2a4", 2, False, 1),
        ("w2a4", 2, True, 0),
        ("w2a4", 16, True, 1),
        ("w4a4", 4, True, 1),
        ("w4a4", 5, True, 0),
        ("w4a4", 8, False, 1),
        ("w4a4", 9, True, 1),
        ("w4a8", 8, True, 1),
        ("w2a8", 8, True, 1),
    ],
)
def test_few_tokens_of_a_fused_layer_run_one_layout(
    scheme: str, m: int, fused: bool, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in one, and planes of w4a4 from 5 tokens to 8."""
    parts = Part("bitwise"), Part("packed")
    both = MultiLayoutBackend("test-both", parts, (Layout.planes, Layout.tiles_a8), 7)
    monkeypatch.setitem(ops.backends, both.name, both)
    obey(monkeypatch, scheme, {step(m): {"bitwise": 3.0, "padding to int8": 2.0}})
    ops.linear(torch.randn(m, K).half(), prepared(both, scheme)[1].in_fused(fused))
    assert [len(part.calls) for part in parts] == [1 - which, which]


def test_eight_bits_run_where_they_won_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = Part("packed"), Part("packed")
    both = MultiLayoutBackend("test-a8", (wide, narrow), (Layout.tiles_a16, Layout.tiles_a8), 7)
    monkeypatch.setitem(ops.backends, both.name, both)
    few, many = {"dequantize": 2.0, "padding to int8": 3.0}, {"dequantize": 9.0, "padding to int8": 4.0}
    obey(monkeypatch, "w4a16g128", {1: few, 64: many})
    weight, ready = prepared(both, "w4a16g128")
    assert "is not allowed" in str(both.why_not(weight, ready.spec.activations))
    dispatching.allow("a8")
    assert both.why_not(weight, ready.spec.activations) is None
    ops.linear(torch.randn(1, K).half(), ready)
    with pytest.warns(UserWarning, match="quantized to int8, as allowed"):
        ops.linear(torch.randn(64, K).half(), ready)
    assert [spec.activations.bits for _, spec in wide.calls] == [16]
    assert [spec.activations.bits for _, spec in narrow.calls] == [8]


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ((Layout.tiles_a16, Layout.tiles_a8), True),
        ((Layout.tiles_a8,), True),  # 16-bit tiles remain for what no map decides
        ((Layout.tiles_a16,), False),
    ],
)
def test_eight_bits_that_won_everywhere_are_kept_too(
    found: tuple[Layout, ...], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map's only layout did not match the combined backend: what had been allowed never ran."""
    monkeypatch.setattr(layouts, "layouts_of", lambda *_: found)
    monkeypatch.setattr(layouts, "_room", lambda weight: True)
    parts = Part("test-16"), Part("test-8")
    both = MultiLayoutBackend("test-a8", parts, (Layout.tiles_a16, Layout.tiles_a8), 7, ("cuda",))
    parsed = Scheme.parse("w4a16g128")
    assert (both.cost(random_weight(N, K, parsed.weights), parsed.activations) < 0) == wanted
    assert both.cost(random_weight(N, K, parsed.weights), Scheme.parse("w4a8").activations) == (
        -1 if len(found) == 2 else layouts._UNWANTED
    )
    planes = MultiLayoutBackend("test-both", parts, (Layout.planes, Layout.tiles_a8), 7, ("cuda",))
    assert planes.cost(random_weight(N, K, parsed.weights), parsed.activations) > 0
