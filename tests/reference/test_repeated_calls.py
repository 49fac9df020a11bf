"""A layer's second call relaunches the first one's kernels from a cache. No GPU: launches are recorded."""

import ctypes
import importlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anybit import jit, ops
from anybit.choose import dispatch as dispatching
from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import tensor_map
from anybit.jit.params import layout_of
from anybit.kernels.block import rope
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.ops import call_cache, elementwise, fused, packed, packed_calls
from anybit.ops import pages as pages_ops
from anybit.ops.backend import LinearSpec
from anybit.ops.pages import RopePagesArgs
from anybit.scheme import Scheme
from cases import random_weight

launching = importlib.import_module("anybit.jit.launch")  # not the function of that name
N, K = 192, 256
SCHEMES = ("w4a16g128", "w3a16g64asym", "w4a8", "w8a8", "w4a8fp", "w2a8")


class Driver:
    """Records the launches of one call: each kernel's entry and its parameters as the driver gets them."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, dict[str, Any]]] = []
        self.slow = 0

    def cuLaunchKernelEx(self, config: Any, function: jit.Kernel, address: int, extra: int) -> tuple[int]:
        layout = layout_of(function.params)
        buffer = ctypes.string_at(ctypes.c_void_p.from_address(address).value or 0, layout.size)
        names = [field.name for field in layout.fields]
        self.launches.append((function.entry, dict(zip(names, layout.packer.unpack(buffer), strict=True))))
        return (0,)

    def take(self, y: Tensor, x: Tensor) -> list[tuple[str, dict[str, Any]]]:
        """The launches since the last time, with addresses of y, x and of codes by name."""
        launches, self.launches = self.launches, []
        known = {y.data_ptr(): "y", x.data_ptr(): "x"}
        base = launches[0][1].get("codes", 0)
        if base:
            first = launches[0][1]
            known |= {
                first[name]: f"{name} {first[name] - base}" for name in ("codes", "scale", "sum", "zero") if first[name]
            }
        for _, values in launches:
            for name, value in values.items():
                address = int.from_bytes(value[:8], "little") if isinstance(value, bytes) else value
                if address in known and address > 1 << 20:
                    rest = value[8:] if isinstance(value, bytes) else b""
                    values[name] = known[address], rest
        return launches


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found, device = Driver(), Device.named("sm_90a")

    def encode_at(*values: int) -> bytes:
        return b"".join(value.to_bytes(8, "little") for value in values).ljust(128, b"\0")

    def encode(matrix: Tensor, *box: int) -> bytes:
        size = matrix.element_size()
        return encode_at(matrix.data_ptr(), size, *matrix.shape, matrix.stride(0) * size, *box)

    whole = packed.PackedTiles.linear

    def linear(*args: Any) -> Tensor:
        found.slow += 1
        return whole(*args)

    monkeypatch.setattr(packed.PackedTiles, "linear", linear)
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: device))
    monkeypatch.setattr(launching, "_device", lambda index: device)
    monkeypatch.setattr(launching, "_function", lambda kernel, index: kernel)
    monkeypatch.setattr(launching, "_launchers", {})
    monkeypatch.setattr(launching, "driver", lambda: found)
    monkeypatch.setattr(launching.Launcher, "_config", lambda self, stream: SimpleNamespace())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(packed_calls, "encode_at", encode_at)
    for module in (tensor_map, sm90_packed_gemm):
        monkeypatch.setattr(module, "encode", encode)
    dispatching.use()
    yield found
    dispatching.use()


def prepared(text: str, seed: int = 0) -> ops.Prepared:
    scheme = Scheme.parse(text)
    tensors = ops.backends["packed"].prepare(random_weight(N, K, scheme.weights, seed=seed), scheme.activations)
    spec = LinearSpec("packed", N, K, scheme.weights, scheme.activations)
    return ops.Prepared(tensors, str(spec))


def slowly(driver: Driver, x: Tensor, layer: ops.Prepared, bias: Tensor | None = None) -> list[Any]:
    """A backend's launches without the call cache."""
    y = ops.backends["packed"].linear(x, layer.tensors, bias, layer.spec)
    driver.slow = 0
    return driver.take(y, x)


@pytest.mark.parametrize("m", [1, 4, 16, 40, 128, 600])
@pytest.mark.parametrize("text", SCHEMES)
def test_calls_launch_what_the_backend_does(driver: Driver, text: str, m: int) -> None:
    layer, other = prepared(text), prepared(text, seed=1)
    for bias in (None, torch.randn(N).half()):
        first, second = torch.randn(2, m, K).half()
        expected, of_other = slowly(driver, first, layer, bias), slowly(driver, first, other, bias)
        assert of_other != expected
        for one, wanted in ((layer, expected), (other, of_other)):
            for x in (first, second, first):
                got = ops.linear(x, one, bias)
                assert driver.take(got, x) == wanted
                assert driver.slow == 0 and (got.shape, got.dtype) == ((m, N), x.dtype)
                assert (
                    driver.take(torch.ops.anybit.linear(x, one.tensors, bias, one.spec_text), x)[-1][0] == wanted[-1][0]
                )


def test_what_looks_different_is_looked_at(driver: Driver) -> None:
    layer, x, bias = prepared("w4a16g128"), torch.randn(4, K).half(), torch.randn(N).half()
    wide, odd = torch.randn(4, K + 8).half()[:, :K], torch.randn(4 * K + 1).half()[1:].view(4, K)
    for other, added in [(one, None) for one in (x, x.bfloat16(), x[:2], x[None], wide, odd)] + [(x, bias)]:
        expected = slowly(driver, other, layer, added)
        y = ops.linear(other, layer, added)
        assert y.shape == (*other.shape[:-1], N)
        assert driver.take(y, other) == expected
        assert driver.slow == (other is odd), "only rows not aligned to 16 bytes"
    assert ops.linear(x.to("meta"), layer).is_meta
    for wrong in (torch.randn(4, K + 8).half(), x.float()):
        with pytest.raises(KernelError):
            ops.linear(wrong, layer)
    with pytest.raises(KernelError, match="bias"):
        ops.linear(x, layer, torch.randn(N + 8).half())


@pytest.mark.parametrize("m", [3, 300])
@pytest.mark.parametrize("text", ["w4a8", "w8a8", "w4a16g128"])
def test_fused_and_small_calls_launch_the_same_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, text: str, m: int
) -> None:
    """Rows, residuals and weights are each call's own; otherwise only addresses change."""
    for name in ("rms_norm", "add_rms_norm", "silu_mul"):
        monkeypatch.setattr(fused, name, getattr(elementwise, f"_{name}_cuda"), raising=False)
    one, other = prepared(text), prepared(text, seed=1)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    gamma, table = torch.randn(K).half(), torch.randn(64, 64).half()
    pages = torch.zeros(2, 8, 16, 2, 64).half()
    step = RopePagesArgs(table, torch.zeros(m, dtype=torch.int64), *pages, torch.zeros(m, dtype=torch.int64), 4, 2)

    def calls(layer: ops.Prepared) -> Iterator[tuple[Any, tuple[Tensor, ...]]]:
        x, residual, gated, qkv = (torch.randn(m, size).half() for size in (K, K, 2 * K, 8 * 64))
        weight = layer.tensors, None, layer.spec_text
        yield fused._norm_linear(x, residual, gamma, 1e-5, *weight), (x, residual, gamma)
        yield fused._norm_linear(x, residual, gamma, 1e-5, *weight, silu=True), (x, residual, gamma)
        yield fused._silu_linear(gated, *weight), (gated,)
        yield elementwise._add_rms_norm_cuda(x, residual, gamma, 1e-6), (x, residual, gamma)
        yield elementwise._silu_mul_cuda(gated, True), (gated,)
        yield pages_ops.rotate_pages(step, qkv), (qkv, table, *pages)

    def launches(layer: ops.Prepared) -> list[list[tuple[str, dict[str, Any]]]]:
        found = []
        for results, inputs in calls(layer):
            known = {one.data_ptr(): f"input {i}" for i, one in enumerate(inputs)}
            known |= {
                one.data_ptr(): f"result {i}" for i, one in enumerate(results if type(results) is tuple else [results])
            }
            known |= {one.data_ptr(): f"weight {i}" for i, one in enumerate(layer.tensors) if one.numel()}
            made, driver.launches = driver.launches, []
            for _, values in made:
                for name, value in values.items():
                    if isinstance(value, int) and value > 1 << 20:
                        values[name] = known.get(value, "scratch")
                for name in ("x_sum", "codes", "scale", "sum", "zero", "x_scale", "x_tail", "positions", "slots"):
                    values.pop(name, None)
                values["x"] = values.get("x") if isinstance(values.get("x"), str) else None  # in a map, or codes
            found.append(made)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(jit, "watched", lambda: True)  # then nothing is cached
        expected = launches(one)
    assert all(expected)
    assert launches(one) == expected  # made
    assert launches(one) == expected  # kept
    assert launches(other) == expected


@pytest.mark.parametrize("m", [4, 300])
def test_products_that_are_not_kept_end_with_silu_too(driver: Driver, monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    """Layers with activation order are not cached: those with fused SiLU repeat it, others are asked once."""
    scheme, asked = Scheme.parse("w4a16g32"), []
    fmt, activations = scheme.weights, scheme.activations
    weight = replace(random_weight(N, K, fmt), group_index=torch.arange(K, dtype=torch.int32) % fmt.groups(K))
    spec = str(LinearSpec("packed", N, K, fmt, activations))
    tensors, x = ops.backends["packed"].prepare(weight, activations), torch.randn(m, K).half()
    whole = packed.PackedTiles.linear_silu
    monkeypatch.setattr(packed.PackedTiles, "linear_silu", lambda *given: asked.append(m) or whole(*given))
    found = [call_cache.linear_silu(x, tensors, None, spec) for _ in range(3)]
    many = m == 300
    assert [None if y is None else y.shape for y in found] == [(m, N // 2) if many else None] * 3
    assert len(asked) == (3 if many else 1)


def test_projections_that_begin_at_odd_places_are_copied(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernel reads 16-byte vectors."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    step = RopePagesArgs(torch.randn(64, 64).half(), torch.zeros(3, dtype=torch.int64), None, None, None, 4, 2)
    qkv = torch.randn(3 * 8 * 64 + 1).half()[1:].view(3, 8 * 64)
    pages_ops.rotate_pages(step, qkv)
    ((_, values),) = driver.launches
    assert qkv.data_ptr() % 16 and values["qkv"] % 16 == 0


def test_who_looks_at_ops_sees_them(driver: Driver) -> None:
    layer, x = prepared("w4a8"), torch.randn(4, K).half()
    ops.linear(x, layer)
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        ops.linear(x, layer)
    assert "anybit.linear.default" in seen
    assert len(jit.record(lambda: ops.linear(x, layer))) == 2
    assert len(jit.kernels_of(lambda: ops.linear(x, layer))) == 2
    with torch.profiler.profile() as trace:
        ops.linear(x, layer)
    assert any(event.name == "anybit::linear" for event in trace.events())
    assert driver.slow == 2, "the two that record launches"
    ops.linear(x, layer)
    assert driver.slow == 2


@pytest.mark.parametrize("grid", [(1 << 31, 1, 1), (1, 65536, 1), (1, 1, 65536)])
def test_grids_beyond_cuda_are_refused_before_anything_changes(grid: tuple[int, int, int]) -> None:
    launcher = object.__new__(launching.Launcher)
    launcher.kernel = rope.kernel(rope.default(rope.Problem(1, 1, 1, 16)))
    known = launching._Gridded(SimpleNamespace(gridDimX=1), (1, 1, 1))
    with pytest.raises(KernelError, match=r"beyond CUDA's limit.*pass fewer tokens or sequences"):
        launcher._on_grid(known, 0, grid)
    assert known.config == SimpleNamespace(gridDimX=1)
