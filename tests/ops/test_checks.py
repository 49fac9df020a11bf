"""Invalid input of the ops that norm, quantize and multiply is reported before anything is launched."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anybit import jit, ops
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.bitplane import bitplane_layout, bitplane_problem
from anybit.kernels.block import norm_act, quantize_activations, rope, rope_pages
from anybit.kernels.packed import packed_layout, packed_problem, packed_tiles
from anybit.kernels.packed.rows import packed_rows
from anybit.ops import elementwise, fused
from anybit.ops.backend import LinearSpec
from anybit.ops.checks import check_input
from anybit.ops.plans import Rows
from anybit.scheme import Scheme, WeightFormat
from cases import random_weight
from cases_launches import install

INT8 = Scheme.parse("w4a8").activations


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object, **__: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(jit, "launch", launch)


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def spec(n: int = 8, k: int = 64) -> LinearSpec:
    scheme = Scheme.parse("w4a8")
    return LinearSpec("packed", n, k, scheme.weights, scheme.activations)


@pytest.mark.parametrize(
    ("x", "bias", "said"),
    [
        (half(2, 64).float(), None, "x is float32, and the kernels take float16 or bfloat16"),
        (half(2, 60), None, r"x has shape \(2, 60\), and the layer takes 64 features"),
        (half(2, 64).to("meta"), None, "x is on meta, and the weight was prepared on cpu"),
        (half(2, 64), half(7), r"the bias has shape \(7,\), and the layer has 8 outputs"),
        (half(2, 64), half(8).to("meta"), "the bias is on meta, and x is on cpu"),
        (half(2, 64), half(8, 1), r"the bias has shape \(8, 1\), and the layer has 8 outputs"),
    ],
)
def test_input_of_a_layer(x: Tensor, bias: Tensor | None, said: str) -> None:
    with pytest.raises(KernelError, match=said):
        check_input(x, half(1), spec(), bias)


@pytest.mark.parametrize(
    ("residual", "gamma", "said"),
    [
        (None, half(60), r"gamma must be torch.float16 \[64\] on cpu as x is, not torch.float16 \(60,\)"),
        (None, half(64).float(), r"gamma must be torch.float16 .* not torch.float32 \(64,\)"),
        (None, half(64).to("meta"), "gamma must be .* on meta"),
        (None, half(128)[::2], r"gamma must be contiguous, and its strides are \(2,\)"),
        (half(2, 60), half(64), r"residual must be torch.float16 \(2, 64\) on cpu as x is, not .* \(2, 60\)"),
        (half(2, 64).bfloat16(), half(64), "residual must be torch.float16 .* not torch.bfloat16"),
    ],
)
def test_a_norm_whose_result_is_coded(residual, gamma, said, monkeypatch) -> None:
    monkeypatch.setattr(fused, "_planned", lambda *_: True)  # as on a GPU
    for call in (
        lambda x: elementwise.check_norm(x, residual, gamma),
        lambda x: fused._norm_linear(x, residual, gamma, 1e-5, 4 * [half(1)], None, str(spec())),
    ):
        with pytest.raises(KernelError, match=said):
            call(half(2, 64))


def test_ids_on_another_device_than_their_table() -> None:
    with pytest.raises(KernelError, match="ids are on cpu, and the embedding is on meta: move one of them"):
        ops._rows(torch.tensor([1]), [half(1).to("meta")], torch.float16, str(spec()))


def test_gate_and_up_of_another_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_planned", lambda *_: True)
    with pytest.raises(KernelError, match=r"gate_up has shape \(2, 256\), and the layer takes 64 features of each"):
        fused._silu_linear(half(2, 256), 4 * [half(1)], None, str(spec()))
    with pytest.raises(KernelError, match="its last dimension must be even, not 7"):
        elementwise._silu_mul_cuda(half(1, 7))


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: Device.named("sm_90a")))


@pytest.mark.parametrize(
    ("x", "stride", "copied"),
    [
        *((torch.randn(shape), 64, False) for shape in ((3, 64), (2, 3, 64), (1, 64), (64,), (0, 64))),
        (torch.randn(4, 80)[:, :64], 80, False),
        (torch.randn(64).expand(3, 64), 64, True),
        (torch.randn(64, 3).t(), 64, True),
        (torch.randn(200).as_strided((3, 64), (32, 1)), 64, True),  # rows that overlap
        (torch.randn(3, 2, 64).transpose(0, 1), 64, True),
    ],
)
def test_rows_are_copied_unless_they_are_dense_and_apart(x: Tensor, stride: int, copied: bool, anywhere: None) -> None:
    rows = Rows.of(x)
    assert (rows.m, rows.k, rows.stride, rows.copied) == (x.numel() // 64, 64, stride, copied)
    assert rows.aligned or not copied


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_far_apart_are_a_copy(rows: int, anywhere: None) -> None:
    """Two prompts of 131,072 tokens of 8,192 values: kernels for few tokens use 32-bit row offsets."""
    last = torch.empty(rows, 1 << 17, 8192, dtype=torch.float16, device="meta")[:, -1:]
    assert Rows.of(last).stride == 8192 and Rows.of(last).copied == (rows > 1)
    near = torch.empty(rows, (1 << 17) - 1, 8192, dtype=torch.float16, device="meta")[:, -1:]
    assert not Rows.of(near).copied and Rows.of(near).stride == near.view(rows, 8192).stride(0)


@pytest.mark.parametrize("k", [1, 7, 8, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_rows_in_order_start_on_16_bytes(k: int, dtype: torch.dtype) -> None:
    weight = packed_tiles.prepare(random_weight(64, k, WeightFormat(4)), "a16")
    for x in (torch.randint(-9, 9, (5, k)).to(dtype), torch.randint(-9, 9, (5, k + 1)).to(dtype)[:, 1:]):
        found = packed_layout.in_order(weight.permutation, x)
        assert torch.equal(found, x) and quantize_activations.rows_aligned(found)
        assert found.stride(0) in (x.stride(0), quantize_activations.pitch(k, x.element_size()))


ROTARY = {"cosine": half(3, 16), "sine": half(3, 16), "q_gamma": half(16), "k_gamma": half(16)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cosine": half(3, 16).float()}, r"cosine must be torch.float16 \(3, 16\) on cpu as qkv is, not torch.f"),
        ({"sine": half(2, 16)}, r"sine must be torch.float16 \(3, 16\) .* not torch.float16 \(2, 16\)"),
        ({"q_gamma": half(8)}, r"q_gamma must be torch.float16 \(16,\)"),
        ({"k_gamma": half(32)[::2]}, r"k_gamma must be contiguous, and its strides are \(2,\)"),
    ],
)
def test_rotary_tables_of_another_kind(changes: dict[str, Tensor], said: str) -> None:
    """A kernel would read raw 16-bit patterns where the CPU promotes."""
    with pytest.raises(KernelError, match=said):
        elementwise._rotate_cuda(
            half(3, 64), query_heads=2, key_heads=1, epsilon=1e-5, paired=False, **(ROTARY | changes)
        )


@pytest.mark.parametrize(
    ("lengths", "sequences", "said"),
    [
        (torch.ones(2, dtype=torch.int64), None, "lengths must be a contiguous int32 vector on cpu, not torch.int64"),
        (torch.ones(2, dtype=torch.int32), torch.zeros(2), "sequences must be a contiguous int32 vector"),
        (torch.ones(4, dtype=torch.int32)[::2], None, r"lengths must be a contiguous int32 .* strides \(2,\)"),
    ],
)
def test_lengths_of_a_cache_of_another_kind(lengths: Tensor, sequences: Tensor | None, said: str) -> None:
    with pytest.raises(KernelError, match=said):
        elementwise._rotate_store_cuda(
            half(3, 64), *half(2, 3, 16), half(2, 1, 2, 64), lengths, sequences, 2, 1, 1, None, None, 1e-5, False
        )


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_no_tokens_launch_nothing(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    driver, x, gamma = install(monkeypatch), half(*shape), half(16)
    assert elementwise._silu_mul_cuda(x).shape == (*shape[:-1], 8)
    assert elementwise._rms_norm_cuda(x, gamma, 1e-5).shape == shape
    assert [t.shape for t in elementwise._add_rms_norm_cuda(x, x, gamma, 1e-5)] == [shape, shape]
    none, table, rest = half(0, 64), half(0, 16), (2, 1, None, None, 1e-5, False)
    assert elementwise._rotate_cuda(none, table, table, *rest)[0].shape == (0, 2, 16)
    lengths = torch.ones(1, dtype=torch.int32)
    stored = elementwise._rotate_store_cuda(
        none, table, table, half(1, 1, 2, 64), lengths, None, 2, 1, 1, None, None, 1e-5, False
    )
    assert stored.shape == (0, 2, 16) and not driver.launches


def strides(found: Any) -> list[tuple[int, ...]]:
    return [one.stride() for one in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.parametrize("name", ["hadamard", "rms_norm", "add_rms_norm", "silu_mul"])
def test_what_torch_compile_expects_is_what_comes(name: str) -> None:
    """With an input in another row order, results are dense, and so are their fakes."""
    x = torch.randn(3, 5, 64).transpose(0, 1)
    rest = {"rms_norm": (torch.ones(64), 1e-6), "add_rms_norm": (torch.randn(5, 3, 64), torch.ones(64), 1e-6)}
    op = getattr(torch.ops.anybit, name)
    real = op(x, *rest.get(name, ()))
    with FakeTensorMode() as mode:
        arguments = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in (x, *rest.get(name, ()))]
        assert strides(op(*arguments)) == strides(real)
    assert all(one.is_contiguous() for one in (real if isinstance(real, tuple) else (real,)))


def coded(k: int = 64, target: Any = quantize_activations.Target.planes) -> quantize_activations.Packed:
    return quantize_activations.Packed(2, k, Scheme.parse("w2a2").activations, target, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": coded(60)}, "x must be 64 columns of codes"),
        ({"x": coded(64, quantize_activations.Target.bytes)}, "planes, and these are 64 in bytes"),
        ({"bias": torch.zeros(16)[::2]}, r"bias must be a dense float32 \[8\]"),
        ({"bias": half(8)}, r"bias must be a dense float32 \[8\], not torch.float16"),
        ({"y": half(3, 8)}, r"y must be \[2, 8\] on cpu with adjacent columns, not torch.float16 \(3, 8\)"),
        ({"y": half(8, 2).t()}, r"y must be .* strided \(1, 8\)|y must be .* strided \(1, 2\)"),
    ],
)
def test_products_of_planes(changes: dict[str, Any], said: str) -> None:
    weight = bitplane_layout.prepare(random_weight(8, 64, WeightFormat(2)))
    given = {"x": coded(), "bias": None, "y": half(2, 8)} | changes
    with pytest.raises(KernelError, match=said):
        bitplane_problem.product(given["x"], weight, given["y"], given["bias"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x": half(2, 60)}, r"x must be \[m, 64\] with adjacent columns, not \(2, 60\) strided \(60, 1\)"),
        ({"x": half(2, 65)[:, :64]}, "rows of x must start on 16 bytes, not 65 values apart"),
        ({"x": half(64, 2).t()}, r"with adjacent columns, not \(2, 64\) strided \(1, 2\)"),
        ({"y": half(2, 16)[:, :8]}, r"y must be a contiguous \[2, 8\], not \(2, 8\) strided \(16, 1\)"),
        ({"y": half(3, 8)}, r"y must be a contiguous \[2, 8\]"),
        ({"bias": half(16)[::2]}, r"bias must be a dense float16 \[8\], not float16 \(8,\) strided \(2,\)"),
    ],
)
def test_products_of_large_tiles(changes: dict[str, Tensor], said: str) -> None:
    weight = packed_tiles.prepare(random_weight(8, 64, WeightFormat(4)))
    given: dict[str, Any] = {"x": half(2, 64), "bias": None, "y": half(2, 8)} | changes
    with pytest.raises(KernelError, match=said):
        packed_problem.product(given["x"], weight, given["y"], given["bias"])


def test_what_no_kernel_turns_or_norms_says_what_to_do() -> None:
    wide = {"dtype": torch.float32}
    reasons = [norm_act.why_not(norm_act.Problem(1, 8, **wide)), rope.why_not(rope.Problem(1, 1, 1, 16, **wide))]
    reasons.append(packed_rows.why_not(WeightFormat(4), torch.float32))
    assert all("not float32: load the model with dtype=torch.float16 or" in (one or "") for one in reasons)
    many = rope_pages.Problem(1 << 22, 48, 8, 128)
    assert "4194304 tokens need more threads" in (rope_pages.why_not(many) or "")
    assert rope_pages.why_not(replace(many, tokens=1 << 21)) is None
