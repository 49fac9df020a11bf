"""Bad input of the ops that norm, code and multiply is named before anything is launched."""

import pytest
import torch
from torch import Tensor

from anybit import jit
from anybit.errors import KernelError
from anybit.kernels import pack
from anybit.ops import elementwise, sources
from anybit.ops.backend import LinearSpec
from anybit.ops.inputs import check_input
from anybit.scheme import Scheme

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
        (
            half(2, 60),
            half(64),
            r"residual must be torch.float16 \(2, 64\) on cpu as x is, not torch.float16 \(2, 60\)",
        ),
        (half(2, 64).bfloat16(), half(64), "residual must be torch.float16 .* not torch.bfloat16"),
    ],
)
def test_a_norm_whose_result_is_coded(
    residual: Tensor | None, gamma: Tensor, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_codes", lambda *_: True)  # as on a GPU
    for call in (
        lambda x: elementwise.check_norm(x, residual, gamma),
        lambda x: sources._norm_linear(x, residual, gamma, 1e-5, [half(1)], None, str(spec())),
    ):
        with pytest.raises(KernelError, match=said):
            call(half(2, 64))


def test_gate_and_up_of_another_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_codes", lambda *_: True)
    with pytest.raises(KernelError, match=r"gate_up has shape \(2, 256\), and the layer takes 64 features of each"):
        sources._silu_linear(half(2, 256), [half(1)], None, str(spec()))


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (half(64, 2).t(), r"adjacent columns, not \(2, 64\) strided \(1, 2\)"),
        (half(2, 3, 64), r"x must be \[m, k\] with adjacent columns, not \(2, 3, 64\)"),
        (half(2, 64), "x is on cpu, and quantize-and-pack needs a CUDA device"),
    ],
)
def test_quantize_and_pack(x: Tensor, said: str) -> None:
    with pytest.raises(KernelError, match=said):
        pack.quantize(x, INT8)
