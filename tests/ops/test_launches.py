"""What ops pass to the driver, without a GPU: all operands are accepted, parameters pack, grids are valid.

Nothing runs: devices are named, and launches are recorded.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from anybit import ops
from anybit.codes import hadamard
from anybit.codes.packing import QuantizedWeight
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.block.rope import RopeStoreArgs
from anybit.ops import backends, bitwise, elementwise, fused, packed, product
from anybit.ops.backend import LinearSpec
from anybit.ops.plans import PLANS
from anybit.scheme import Scheme
from cases import EXHAUSTIVE, random_weight
from cases_launches import Driver, install

N, K = 192, 256
TOKENS = (1, 2, 3, 4, 5, 8, 9, 16, 33, 64, 100, 300)
SCHEMES = (
    "w4a16g128", "w3a16g64asym", "w8a16g32", "w1a16g128", "w4a8", "w8a8", "w4a8fp", "w2a8", "w2a2", "w2a4", "w1a1",
    "w4a4", "w3a4bipolar-xasym",
)  # fmt: skip


@pytest.fixture(params=["sm_90a", "sm_80", "sm_89", "sm_100a"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    yield install(monkeypatch, request.param)
    PLANS.clear()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))


def inputs(m: int, dtype: torch.dtype) -> list[Tensor]:
    """Dense rows, padded rows, unaligned rows, columns, overlapping rows, and three dimensions."""
    return [
        torch.randn(m, K).to(dtype),
        torch.randn(m, K + 8).to(dtype)[:, :K],
        torch.randn(m, K + 3).to(dtype)[:, 3:],
        torch.randn(K, m).to(dtype).t(),
        torch.randn(1, K).to(dtype).expand(m, K),
        torch.randn(1, m, K).to(dtype),
    ]


def prepared(
    text: str, n: int = N, k: int = K, name: str = "packed", weight: QuantizedWeight | None = None
) -> tuple[list[Tensor], LinearSpec] | None:
    """A layer prepared for a backend, if one of its kernels runs it on the device."""
    scheme = Scheme.parse(text)
    weight = random_weight(n, k, scheme.weights) if weight is None else weight
    device = Device.of(weight.words)
    if name == "packed":
        reason = packed.why_not(weight, scheme.activations, device)
    else:
        reason = bitwise.why_not(n, k, weight, scheme.activations, device)
    if reason is not None or (name == "bitwise" and not scheme.activations.quantized):
        return None
    spec = LinearSpec.parse(str(LinearSpec(name, n, k, scheme.weights, scheme.activations)))
    with pytest.MonkeyPatch.context() as patch:  # weights are laid out on the CPU
        patch.setattr(Tensor, "is_cuda", property(lambda self: False))
        return backends[name].prepare(weight, scheme.activations), spec


@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_layers(scheme: str, driver: Driver) -> None:
    ran = 0
    for name in ("packed", "bitwise"):
        found = prepared(scheme, name=name)
        for i, m in enumerate(TOKENS if found else ()):
            tensors, spec = found
            for dtype, bias in ((torch.float16, None), (torch.bfloat16, torch.randn(2 * N).bfloat16()[::2])):
                for x in inputs(m, dtype)[(i + (bias is None)) % 2 :: 2]:  # each with both types, at some count
                    for _ in range(2):  # the second time by the first one's choice
                        before = len(driver.launches)
                        y = product.linear(x, tensors, bias, str(spec))
                        assert y.shape == (*x.shape[:-1], N) and y.dtype == dtype
                        assert len(driver.launches) > before
                        ran += 1
    assert ran or driver.device.arch != "sm_90a"


@pytest.mark.parametrize("scheme", ["w4a16g64", "w3a16g64asym", "w4a8g64"])
def test_layers_with_an_activation_order(scheme: str, driver: Driver) -> None:
    weight = random_weight(N, K, Scheme.parse(scheme).weights)
    found = prepared(scheme, weight=replace(weight, group_index=torch.randperm(K).to(torch.int32) // 64))
    for i, m in enumerate(TOKENS if found else ()):
        for x in inputs(m, torch.float16)[i % 2 :: 2]:
            before = len(driver.launches)
            assert product.linear(x, found[0], None, str(found[1])).shape == (*x.shape[:-1], N)
            assert len(driver.launches) > before
    assert found or driver.device.arch != "sm_90a"


@pytest.mark.parametrize("k", [260, 252, 250, 247])
@pytest.mark.parametrize("scheme", ["w4a16", "w4a8", "w2a2", "w4a16s24", "w4a8s24"])
def test_layers_of_ragged_inputs(scheme: str, k: int, driver: Driver) -> None:
    """Tensor maps need rows aligned to 16 bytes: ``cases_launches.encode_at`` refuses others, as the driver does."""
    if Scheme.parse(scheme).weights.sparse and k % 4:
        return
    for name in ("packed", "bitwise"):
        found = prepared(scheme, k=k, name=name)
        for m in TOKENS if found else ():
            x = torch.randn(m, k).half()
            assert product.linear(x, found[0], None, str(found[1])).shape == (m, N)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("scheme", ["w4a16g64", "w2a16g64", "w4a16g32"])
def test_products_that_norm_their_inputs(scheme: str, silu: bool, driver: Driver) -> None:
    found = prepared(scheme)
    if found is None:
        return
    tensors, spec = found
    for m in (1, 2):
        x, gamma = torch.randn(m, K).half(), torch.ones(K).half()
        for residual in (None, torch.randn(m, K).half()):
            made = fused._norm_linear(x, residual, gamma, 1e-5, tensors, None, str(spec), silu)
            assert [one.shape for one in made] == [(m, N // (1 + silu)), (m, K)]
            names = [launch.kernel.entry for launch in driver.take()]
            fused_names = ["sm90_packed_gemv<NormParams, Gate::silu>" if silu else "sm90_packed_gemv<NormParams>"]
            assert names == fused_names if driver.device.capability >= 90 else len(names) == 2 + silu


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("scheme", ["w4a16g64", "w4a8"])
def test_gate_and_up_of_no_whole_eights_are_refused(scheme: str, m: int, driver: Driver) -> None:
    found = prepared(scheme, N - 8)
    assert found is not None
    x = torch.randn(m, K).half()
    with pytest.raises(KernelError, match="gate and up have 92 outputs each, and paired ones need a multiple of 8"):
        fused._norm_linear(x, x, torch.ones(K).half(), 1e-5, found[0], None, str(found[1]), True)
    assert not driver.launches


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("batch", [1, 2])
def test_products_that_turn_and_store(batch: int, driver: Driver) -> None:
    heads, dim = (2, 1), 64
    found = prepared("w4a16g64", sum(heads) * dim + heads[1] * dim)
    if found is None:
        return
    x, gamma = torch.randn(batch, K).half(), torch.ones(K).half()
    tables = torch.randn(batch, dim).half(), torch.randn(batch, dim).half()
    ring, lengths = torch.zeros(batch, heads[1], 2, 128 * dim).half(), torch.ones(batch, dtype=torch.int32)
    step = RopeStoreArgs(*tables, ring, lengths, None, *heads, 1)
    made = fused.norm_turn(x, x, gamma, 1e-5, found[0], None, str(found[1]), step, elementwise.check_step)
    assert (made is None) == (driver.device.capability < 90)
    if made is not None:
        assert made[0].shape == (batch, heads[0], dim) and made[1].shape == x.shape
        (launch,) = driver.take()
        assert launch.kernel.entry == "sm90_packed_gemv<RotaryParams>" and launch.values["ring"] == ring.data_ptr()
    q = elementwise._rotate_store_cuda(torch.randn(batch, 4 * dim).half(), *step.operands(), None, None, 1e-5, False)
    assert q.shape == (batch, heads[0], dim) and driver.launches


def test_kernels_between_products(driver: Driver) -> None:
    x, gamma = torch.randn(3, 5, 64).half().transpose(0, 1), torch.ones(64).half()
    assert elementwise._rms_norm_cuda(x, gamma, 1e-5).shape == x.shape
    assert elementwise._add_rms_norm_cuda(x, x, gamma, 1e-5)[1].shape == x.shape
    assert elementwise._silu_mul_cuda(x).shape == (5, 3, 32)
    tables = torch.randn(6, 64).half(), torch.randn(6, 64).half()
    gammas = torch.ones(64).half(), torch.ones(64).half()
    q, k = elementwise._rotate_cuda(torch.randn(6, 256).half(), *tables, 2, 1, *gammas, 1e-5, False)
    assert (q.shape, k.shape) == ((6, 2, 64), (6, 1, 64))
    assert len(driver.launches) == 4


def test_a_prompt_of_many_tokens_is_turned(driver: Driver) -> None:
    tokens, qkv, table = 16 * 8192, torch.empty(16 * 8192, 64).half(), torch.empty(16 * 8192, 16).half()
    q, k = elementwise._rotate_cuda(qkv, table, table, 2, 1, None, None, 1e-5, False)
    assert (len(q), len(k)) == (tokens, tokens) and len(driver.launches) == 3


@pytest.mark.parametrize("k", [14336, 28672])
def test_rotations_of_wide_rows(k: int, driver: Driver) -> None:
    """28,672 values take 130 KiB of shared memory, which sm_89 does not have: torch rotates them there."""
    x, room = torch.randn(2, k).half(), driver.device.shared_bytes
    y = ops._hadamard_cuda(x)
    fits = k == 14336 or room > 130 << 10
    assert [launch.kernel.entry for launch in driver.launches] == ["transform"] * fits
    if not fits:
        torch.testing.assert_close(y, hadamard.transform(x))
    assert (ops.rotation_refused(k, x.dtype, driver.device) is None) == fits


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("which", ["x", "gamma", "residual"])
def test_norms_of_operands_anywhere(which: str, driver: Driver) -> None:
    """Kernels use 16-byte vectors only if all three operands are aligned to them."""
    found = prepared("w4a8")
    assert found is not None
    operands = {"x": torch.empty(3 * K + 1).half(), "gamma": torch.empty(K + 1).half()}
    operands["residual"] = torch.empty(3 * K + 1).half()
    for shift in (0, 1):
        x, gamma, other = (
            one[(shift if name == which else 0) :][: one.numel() - 1].view(-1, K) for name, one in operands.items()
        )
        fused._norm_linear(x, other, gamma[0], 1e-5, found[0], None, str(found[1]))
        assert driver.take()[0].kernel.config.aligned == (shift == 0)
        elementwise._add_rms_norm_cuda(x, other, gamma[0], 1e-5)
        assert driver.take()[0].kernel.config.aligned == (shift == 0)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("scheme", ["w4a8", "w2a4", "w2a2", "w4a8fp"])
def test_products_whose_inputs_are_made_while_they_are_coded(scheme: str, rotated: bool, driver: Driver) -> None:
    ran = 0
    for name in (name for name, backend in ops.backends.items() if backend.codes):
        found = prepared(scheme, name=name)
        for m in (TOKENS if EXHAUSTIVE else TOKENS[::3]) if found else ():
            tensors, spec = found
            for x in inputs(m, torch.float16)[len(scheme) % 2 :: 2]:
                gamma, text = torch.ones(K).half(), str(spec)
                for residual in (None, torch.randn(x.shape).half()):
                    for silu in (False, True):
                        how = tensors, None, text, silu, rotated
                        y, total = fused._norm_linear(x, residual, gamma, 1e-5, *how)
                        assert y.shape == (*x.shape[:-1], N // (1 + silu))
                        assert total.shape == x.shape and total.is_contiguous() and total.data_ptr() != x.data_ptr()
                        names = [launch.kernel.entry for launch in driver.take()]
                        inside = names[-1].endswith("<Gate::silu>")
                        assert len(names) == 2 + (silu and not inside) and names[0] == "quantize"
                        assert name != "packed" or (silu and driver.device.arch == "sm_90a") <= inside <= silu
                assert fused._hadamard_linear(x, tensors, None, text).shape == (*x.shape[:-1], N)
                both = torch.cat((x, x), -1)
                assert fused._silu_linear(both, tensors, None, text, rotated).shape == (*x.shape[:-1], N)
                assert [launch.kernel.entry for launch in driver.take()][::2] == ["quantize"] * 2
                ran += 1
    assert ran or driver.device.arch != "sm_90a"
