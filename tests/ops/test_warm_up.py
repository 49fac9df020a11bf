"""Kernels compiled ahead are those that calls launch. No GPU: launches are recorded."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from anybit import ops
from anybit.jit import Kernel
from anybit.ops import compile_ahead as ahead
from anybit.ops import elementwise, experts, fused, product
from anybit.ops import pages as pages_ops
from anybit.ops.backend import LinearSpec
from anybit.ops.compile_ahead import LayerKind
from anybit.ops.pages import RopePagesArgs
from anybit.ops.plans import PLANS
from anybit.ops.prepared_experts import PreparedExperts
from anybit.scheme import ActivationFormat, WeightFormat
from cases_experts import Mixture
from cases_launches import Driver, install, prepared

HEADS, DIM, K = (4, 2), 64, 256
N = (HEADS[0] + 2 * HEADS[1]) * DIM


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    yield install(monkeypatch)
    PLANS.clear()


def launched(driver: Driver, kind: LayerKind, tensors: list[Tensor], m: int) -> set[Kernel]:
    """The kernels of all ops that a graph may run on a layer."""
    x, gamma, spec = torch.randn(m, K).half(), torch.ones(K).half(), LinearSpec.parse(kind.spec)
    bias = torch.randn(N).half() if kind.bias else None
    weight = tensors, bias, kind.spec
    if kind.rotated:
        fused._hadamard_linear(x, *weight)
    else:
        product.linear(x, tensors, bias, kind.spec)
    elementwise._add_rms_norm_cuda(x, x, gamma, 1e-5)
    for silu in (False, True) if kind.paired else (False,):
        fused._norm_linear(x, x, gamma, 1e-5, *weight, silu, kind.rotated)
    elementwise._silu_mul_cuda(torch.randn(m, N).half(), kind.paired)
    if spec.activations.quantized:
        fused._silu_linear(torch.randn(m, 2 * K).half(), *weight, kind.rotated)
    if kind.heads is not None:
        step = RopePagesArgs(torch.randn(9, DIM).half(), torch.zeros(m).long(), None, None, None, *HEADS)
        pages_ops.rotate_pages(step, torch.randn(m, N).half(), paired=kind.heads[3])
        fused.norm_turn(x, x, gamma, 1e-5, *weight, step, pages_ops._check_layer)
    return {launch.kernel for launch in driver.take()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("text", ["w4a16g128", "w3a16g64asym", "w4a8", "w4a8fp", "w2a2", "w2a4"])
def test_what_calls_launch_is_compiled_ahead(driver, monkeypatch, text, rotated, bias) -> None:
    layer = prepared(text, N, K)
    if rotated and not layer.spec.activations.quantized:
        return  # the rotation is a kernel of its own, which a CPU does not launch
    tensors = layer.tensors
    kind = LayerKind(layer.spec_text, torch.float16, bias, rotated, (*HEADS, DIM, True), paired=True)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    for m in (1, 2, 3, 16, 200):
        assert launched(driver, kind, tensors, m) == set(ahead.kernels_of(kind, tensors, m))
    head = replace(kind, heads=None, paired=False, most=8)
    assert set(ahead.kernels_of(head, tensors, 8)) < set(ahead.kernels_of(kind, tensors, 8))


def test_layers_with_an_activation_order_are_compiled_ahead(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = prepared("w4a16g32", N, K, ordered=True)
    kind = LayerKind(layer.spec_text, torch.float16, False)
    for m in (1, 16, 200):
        product.linear(torch.randn(m, K).half(), layer.tensors, None, kind.spec)
        assert {launch.kernel for launch in driver.take()} < set(ahead.kernels_of(kind, layer.tensors, m))


def test_every_count_is_planned_and_nothing_of_its_size_is_made(driver, monkeypatch) -> None:
    layer, asked, of = prepared("w4a8", N, K), list[int](), ahead.kernels_of
    kind = LayerKind(layer.spec_text, torch.float16, False)
    monkeypatch.setattr(ahead, "kernels_of", lambda kind, tensors, m: asked.append(m) or of(kind, tensors, m))
    monkeypatch.setattr(ahead, "make_ready", lambda kernels, *_: kernels)
    found = ahead.compile_ahead({kind: layer.tensors, replace(kind, most=6): layer.tensors}, 20000)
    assert len(found) == len(set(found)) > 10  # type: ignore[arg-type]
    assert {1, 2, 64, 8192, 16384, 20000} <= set(asked) and asked.count(6) == 3, "6 and 8 of a head are 6"
    assert not driver.launches


def test_one_of_several_products_before_turned_heads(driver: Driver) -> None:
    """Queries, keys and values of different formats are several products; the rotary kernel takes all their outputs."""
    layer = prepared("w4a16g128", 128, K)
    kind = LayerKind(layer.spec_text, torch.float16, False, heads=(*HEADS, DIM, False))
    kernels = ahead.kernels_of(kind, layer.tensors, 3)
    assert "rotate_pages" in {kernel.entry for kernel in kernels}


@pytest.mark.parametrize("gate", ["silu", "swigluoai"])
def test_experts_are_compiled_ahead(driver: Driver, gate: str) -> None:
    """And more tokens than the count that was planned before need no other kernels than those of the next."""
    mixture = Mixture(WeightFormat(4, "sym", 128), 16, 256, 128, 2000, bias=True)
    a16 = ActivationFormat()
    parts = [ops.Prepared(ops.backends["packed"].prepare(one, a16), LinearSpec("packed", *one.shape, one.format, a16))
             for one in (mixture.gate_up, mixture.down)]  # fmt: skip
    prepared, (ids, weights) = PreparedExperts(*parts, 16, gate), mixture.routing(4)
    kind = ahead.ExpertsKind(prepared.spec_text, torch.float16, 4, True)
    compiled = set(ahead.kernels_of_experts(kind, mixture.x, 2000))
    for m in (1, 2, 5, 8, 9, 23, 64, 111, 300, 777, 1999):
        given = mixture.x[:m], ids[:m].int(), weights[:m]
        experts._cuda(*given, *(one.tensors for one in parts), *mixture.biases, prepared.spec_text)
        assert {launch.kernel for launch in driver.take()} <= compiled, m
