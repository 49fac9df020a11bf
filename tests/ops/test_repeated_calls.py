"""An op's plan launches what its kernels ask for, with each call's own addresses. No GPU: launches are recorded."""

import sys
import time
import timeit
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import anybit
import cases_launches
from anybit import ops
from anybit.cache.kvcache import KVCache
from anybit.choose import dispatch as dispatching
from anybit.errors import KernelError
from anybit.kernels.block import rope
from anybit.ops import elementwise, fused, kv, plans, product
from anybit.ops import pages as pages_ops
from anybit.ops.pages import RopePagesArgs
from cases_launches import Driver, install, launching, multiplied

N, K = 192, 256
SCHEMES = ("w4a16g128", "w3a16g64asym", "w4a8", "w8a8", "w4a8fp", "w2a8", "w2a2", "w3a4bipolar-xasym")
Launches = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    yield install(monkeypatch)
    plans.PLANS.clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The plans that were made."""
    found = list[object]()

    def watched(*how: Any) -> plans.OpPlan:
        found.append(plan := plans.new_plan(*how))
        return plan

    for module in (product, fused, elementwise, pages_ops):
        monkeypatch.setattr(module, "new_plan", watched)
    return found


def prepared(text: str, seed: int = 0, ordered: bool = False) -> ops.Prepared:
    return cases_launches.prepared(text, N, K, seed, ordered)


def taken(driver: Driver, **known: Tensor) -> Launches:
    """Entries and parameters of the launches since the last time, with tensors by name and codes by their offset."""
    launches = driver.take()
    names = {tensor.data_ptr(): name for name, tensor in known.items() if tensor.numel()}
    base = launches[0].values.get("codes", 0)
    if base:
        first = launches[0].values
        names |= {first[name]: f"codes + {first[name] - base}" for name in ("codes", "scale", "sum", "zero")}
    names.pop(0, None)
    for launch in launches:
        for name, value in launch.values.items():
            address = int.from_bytes(value[:8], "little") if isinstance(value, bytes) else value
            if address in names and address > 1 << 20:
                rest = value[8:] if isinstance(value, bytes) else b""
                launch.values[name] = names[address], rest
    return [(launch.kernel.entry, launch.values | {"grid": launch.grid, "how": launch.how}) for launch in launches]


def weights_of(layer: ops.Prepared) -> dict[str, Tensor]:
    return {f"weight {i}": tensor for i, tensor in enumerate(layer.tensors[:4])}


def by_kernels(driver: Driver, x: Tensor, layer: ops.Prepared, bias: Tensor | None) -> Launches:
    """What the chosen kernels launch without a plan."""
    y = multiplied(x, layer, bias)
    return without_bias(taken(driver, x=x, y=y, **weights_of(layer)))


def without_bias(launches: Launches) -> Launches:
    """Launches with the bias only as a yes or no: bit planes read a copy."""
    for _, values in launches:
        if "bias" in values:
            values["bias"] = bool(values["bias"])
    return launches


@pytest.mark.parametrize("m", [1, 4, 16, 40, 128, 600])
@pytest.mark.parametrize("text", SCHEMES)
def test_plans_launch_what_kernels_do(driver: Driver, made: list[object], text: str, m: int) -> None:
    layers = prepared(text), prepared(text, seed=1)
    for bias in (None, torch.randn(N).half()):
        made.clear()
        xs = torch.randn(2, m, K).half().unbind()
        expected = by_kernels(driver, xs[0], layers[0], bias)
        assert by_kernels(driver, xs[1], layers[1], bias) == expected
        for layer in layers:
            for x in (*xs, xs[0]):
                got = ops.linear(x, layer, bias)
                assert (got.shape, got.dtype) == ((m, N), x.dtype)
                assert without_bias(taken(driver, x=x, y=got, **weights_of(layer))) == expected
                got = torch.ops.anybit.linear(x, layer.tensors, bias, layer.spec_text)
                assert without_bias(taken(driver, x=x, y=got, **weights_of(layer))) == expected
        assert len(made) == 1


@pytest.mark.parametrize("tokens", [1, 20, 300])
def test_tokens_are_stored_by_the_launches_of_their_kernel(driver: Driver, tokens: int) -> None:
    cache = KVCache("kv4g128", layers=3, kv_heads=2, head_dim=128, sequences=2, capacity=512)
    for rows in (None, torch.tensor([1, 0], dtype=torch.int32)):
        for layer in range(3):
            k, v = torch.randn(2, 2, tokens, 2, 128).half()
            kv.run(kv.storing(cache.view(layer), rows, k, v), -1)
            expected = driver.take()
            kv.store(cache.view(layer), rows, k, v)
            assert driver.take() == expected and len(expected) == 1 + (tokens == 300)
            odd = torch.zeros(k.numel() + 1).half()[1:].view(k.shape)  # its copy is stored
            kv.store(cache.view(layer), rows, odd, v)
            assert [launch.values["v"] for launch in driver.take()] == [v.data_ptr()] * len(expected)
    assert len(plans.PLANS) == 2


def test_what_looks_different_is_planned_anew(driver: Driver, made: list[object]) -> None:
    layer, x, bias = prepared("w4a16g128"), torch.randn(4, K).half(), torch.randn(N).half()
    wide, odd = torch.randn(4, K + 8).half()[:, :K], torch.randn(4 * K + 1).half()[1:].view(4, K)
    others = [x, x.bfloat16(), x[:2], x[None], wide, odd]
    for other, added in [(one, None) for one in others] + [(x, bias), (x, bias.float()), (x, bias.repeat(2)[::2])]:
        before = len(made)
        for _ in range(3):
            y = ops.linear(other, layer, added)
            assert y.shape == (*other.shape[:-1], N) and y.dtype == other.dtype
            ((_, values),) = taken(driver, x=other, y=y)
            assert values["x"] == ("x", b"") and values["y"] == ("y", b"")
        assert len(made) == before + 1
    assert ops.linear(x.to("meta"), layer).is_meta
    driver.take()  # without a GPU, its signature is that of a tensor of a CPU
    for wrong in (torch.randn(4, K + 8).half(), x.float()):
        with pytest.raises(KernelError):
            ops.linear(wrong, layer)
    with pytest.raises(KernelError, match="bias"):
        ops.linear(x, layer, torch.randn(N + 8).half())
    assert not driver.launches


@pytest.mark.parametrize("m", [3, 300])
@pytest.mark.parametrize("text", ["w4a8", "w8a8", "w4a16g128"])
def test_fused_and_small_calls_launch_the_same_again(driver, made, monkeypatch, text, m) -> None:
    """Rows, residuals and weights are each call's own; otherwise only addresses change."""
    monkeypatch.setattr(fused, "silu_mul", elementwise._silu_mul_cuda)
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

    def launches(layer: ops.Prepared) -> list[Launches]:
        found = []
        for results, inputs in calls(layer):
            known = {f"input {i}": one for i, one in enumerate(inputs)} | weights_of(layer)
            known |= {f"result {i}": one for i, one in enumerate(results if type(results) is tuple else [results])}
            found.append(taken(driver, **known))
            for _, values in found[-1]:
                for name, value in values.items():
                    if isinstance(value, int) and value > 1 << 20:
                        values[name] = "scratch"
        return found

    first = launches(one)
    kinds = len(made)
    coded = "a8" in text
    entries = [[entry for entry, _ in some] for some in first]
    gemm = "packed::sm90_packed_gemm"
    if m == 3:  # the map's choice
        gemm = entries[0][1]
        assert gemm in ("sm90_packed_skinny", "sm90_packed_skinny_f16")
    ends = [gemm + "<Gate::silu>"] if coded or m == 300 else [gemm, "silu_mul"]
    before = "quantize" if coded else "add_rms_norm"
    assert entries[:2] == [[before, gemm], [before, *ends]]
    assert entries[2:] == [
        ["quantize" if coded else "silu_mul", gemm],
        ["add_rms_norm"],
        ["silu_mul"],
        ["rotate_pages"],
    ]
    gemm_values = first[0][1][1]
    assert (gemm_values["tiles"], gemm_values["row_scale"]) == (("weight 0", b""), ("weight 1", b""))
    assert gemm_values["y"] == ("result 0", b"") and first[0][0][1]["residual_sum"] == ("result 1", b"")
    assert {name: first[5][0][1][name][0] for name in ("qkv", "q", "keys", "values")} == {
        "qkv": "input 0", "q": "result 0", "keys": "input 2", "values": "input 3",
    }  # fmt: skip

    def without_maps(found: list[Launches]) -> list[Launches]:
        return [
            [(entry, {name: v for name, v in values.items() if not isinstance(v, bytes)}) for entry, values in some]
            for some in found
        ]

    for layer in (one, one, other):
        assert without_maps(launches(layer)) == without_maps(first)
    assert len(made) == kinds


@pytest.mark.parametrize("m", [4, 300])
def test_layers_with_activation_order_end_with_silu_too(driver: Driver, made: list[object], m: int) -> None:
    layer, x = prepared("w4a16g32", ordered=True), torch.randn(m, K).half()
    for _ in range(3):
        assert product.linear(x, layer.tensors, None, layer.spec_text, silu=True).shape == (m, N // 2)
        entries = [launch.kernel.entry.removesuffix("_f16") for launch in driver.take()]
        assert entries == (["packed::sm90_packed_gemm<Gate::silu>"] if m == 300 else ["sm90_packed_skinny", "silu_mul"])
    assert len(made) == 1


def test_projections_that_begin_at_odd_places_are_copied(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernel reads 16-byte vectors."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    step = RopePagesArgs(torch.randn(64, 64).half(), torch.zeros(3, dtype=torch.int64), None, None, None, 4, 2)
    qkv = torch.randn(3 * 8 * 64 + 1).half()[1:].view(3, 8 * 64)
    pages_ops.rotate_pages(step, qkv)
    (launch,) = driver.launches
    assert qkv.data_ptr() % 16 and launch.values["qkv"] % 16 == 0


def test_no_tokens_are_rotated_by_no_launch(driver: Driver) -> None:
    qkv, table = torch.zeros(0, 2 * 8 * 64).half()[:, ::2], torch.zeros(0, 64).half()
    q, k = elementwise._rotate_cuda(qkv, table, table, 4, 2, None, None, 0.0, False)
    ring, lengths = torch.zeros(1, 2, 2, 32 * 64).half(), torch.ones(1, dtype=torch.int32)
    stored = elementwise._rotate_store_cuda(qkv, table, table, ring, lengths, None, 4, 2, 0, None, None, 0.0, False)
    assert (q.shape, k.shape, stored.shape) == ((0, 4, 64), (0, 2, 64), (0, 4, 64))
    assert not driver.launches


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
    with torch.profiler.profile() as trace:
        ops.linear(x, layer)
    assert any(event.name == "anybit::linear" for event in trace.events())


class Wrapped(Tensor):
    """A tensor without memory of its own, as a DTensor is."""

    @staticmethod
    def __new__(cls, x: Tensor) -> "Wrapped":
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


@torch.inference_mode()
def test_subclasses_of_tensors_see_ops_of_which_they_are_any_operand(driver: Driver, monkeypatch) -> None:
    x, gamma = torch.randn(4, K).half(), torch.randn(K).half()
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    elementwise.rms_norm(x, torch.nn.Parameter(gamma), 1e-5)
    assert [launch.kernel.entry for launch in driver.take()] == ["add_rms_norm"]
    with pytest.raises(NotImplementedError, match=r"anybit\.rms_norm"):
        elementwise.rms_norm(x, Wrapped(gamma), 1e-5)
    assert not driver.launches


def test_a_plan_holds_no_tensor_of_a_call(driver: Driver) -> None:
    for text in ("w4a16g128", "w4a8", "w2a2"):
        ops.linear(torch.randn(4, K).half(), prepared(text), torch.randn(N).half())
    kept = [vars(launch.params) for plan in plans.PLANS.values() for launch in plan.launches]
    assert len(kept) == 5
    assert not any(isinstance(value, Tensor) for values in kept for value in values.values())


def test_plans_are_forgotten_with_the_maps_that_chose_them(driver: Driver, made: list[object]) -> None:
    layer, x = prepared("w4a8"), torch.randn(4, K).half()
    for _ in range(2):
        ops.linear(x, layer)
        dispatching.use()
    assert len(made) == 2


def test_a_look_up_is_cheap(driver: Driver) -> None:
    """From a call's input to its plan, as in every eager call: a key, and a dictionary."""
    layer, x = prepared("w2a2"), torch.randn(37, K).half()
    ops.linear(x, layer)

    def look_up() -> plans.OpPlan | None:
        return plans.PLANS.get(plans.key_of((layer.spec_text, False), (x, None), layer.tensors))

    assert look_up() is look_up() is not None
    seconds = min(timeit.repeat(look_up, timer=time.process_time, number=500, repeat=20)) / 500
    assert seconds < 20e-6  # about 4 us on an idle core


def test_a_first_call_takes_few_functions(driver: Driver) -> None:
    """From a layer to its launch, besides choosing a kernel and a kernel's own arithmetic."""
    layer, x = anybit.QuantLinear(K, N, "w4a16g128", bias=False), torch.randn(1, K).half()
    layer._prepared, seen = prepared("w4a16g128"), list[str]()

    def trace(frame: Any, event: str, _: Any) -> None:
        room, _, module = frame.f_code.co_filename.rpartition("/anybit/")[2].partition("/")
        if event == "call" and room in ("ops", "jit") and frame.f_code.co_name[0] != "<":  # comprehensions
            seen.append(f"{module} {frame.f_code.co_qualname}")

    with torch.inference_mode():
        sys.setprofile(trace)
        try:
            layer(x)
        finally:
            sys.setprofile(None)
    assert len(driver.launches) == 1
    assert len(set(seen)) <= 25, set(seen)


@pytest.mark.parametrize("grid", [(1 << 31, 1, 1), (1, 65536, 1), (1, 1, 65536)])
def test_grids_beyond_cuda_are_refused_before_anything_changes(grid: tuple[int, int, int]) -> None:
    launcher = object.__new__(launching.Launcher)
    launcher.kernel = rope.kernel(rope.default(rope.Problem(1, 1, 1, 16)))
    ready = SimpleNamespace(config=SimpleNamespace(gridDimX=1))
    with pytest.raises(KernelError, match=r"beyond CUDA's limit.*pass fewer tokens or sequences"):
        launcher._place(ready, 0, grid, True)
    assert ready.config == SimpleNamespace(gridDimX=1)
