"""Random mixtures of experts, their routing, and both kernels on the emulator."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import emulate
from anybit.codes import reference
from anybit.codes.packing import QuantizedWeight
from anybit.device import Device
from anybit.kernels.experts.sm90_experts_gemv import sm90_experts_gemv
from anybit.kernels.experts.sm90_experts_gemv.sm90_experts_gemv import Config, Gate, Problem
from anybit.kernels.packed import packed_tiles
from anybit.kernels.packed.packed_layout import TILE_ROWS, round_up
from anybit.ops.experts import experts, prepare_experts
from anybit.ops.prepared_experts import PreparedExperts, resized
from anybit.scheme import ActivationFormat, WeightFormat
from cases import random_weight

HOPPER = replace(Device.named("sm_90a"), sms=2)


def unit_gain(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight whose outputs are about as large as its inputs, so that float16 holds them."""
    gain = 1.0 / (float(weight.dequantize().square().mean().sqrt()) * weight.shape[1] ** 0.5)
    minimum = None if weight.minimum is None else weight.minimum * gain
    return replace(weight, scale=weight.scale * gain, minimum=minimum)


class Mixture:
    """A layer of ``count`` experts, hidden x inner, with normal activations for some tokens."""

    def __init__(
        self, format: WeightFormat, count: int, hidden: int, inner: int, tokens: int,
        dtype: torch.dtype = torch.float16, *, bias: bool = False, gate: str = "silu", seed: int = 0,
        activations: ActivationFormat | None = None,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.activations = activations or ActivationFormat()
        self.count, self.gate, self.dtype, self.hidden, self.inner = count, gate, dtype, hidden, inner
        self.gate_up, self.down = (
            unit_gain(random_weight(count * n, k, format, seed)) for n, k in ((2 * inner, hidden), (hidden, inner))
        )
        self.x = torch.randn(tokens, hidden, generator=generator).to(dtype)
        self.biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if bias:
            self.biases = tuple(torch.randn(count, n, generator=generator).to(dtype) for n in (2 * inner, hidden))  # type: ignore[assignment]

    def routing(self, top: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Uniform ids without duplicates in a token, int64 [T, top], and weights that sum to 1."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.rand(len(self.x), self.count, generator=generator).argsort(1)[:, :top].contiguous()
        return ids, torch.rand(len(self.x), top, generator=generator).softmax(1)

    def expected(self, ids: Tensor, weights: Tensor) -> Tensor:
        """The reference, rounded between the products as kernels round."""
        rows = 2 * self.inner, self.hidden
        return reference.experts(
            self.x, ids, weights, self.gate_up, self.down, rows, self.count, self.activations, self.gate,
            *self.biases,
        )  # fmt: skip

    def emulated(self, ids: Tensor, weights: Tensor, seed: int = 0, changes: Any = None) -> Tensor:
        """Both kernels, one after the other. changes: a function of the problem that makes its config."""
        tokens, top = ids.shape
        stride = -(-self.inner // 8) * 8
        h = torch.full((tokens * top, stride), torch.nan, dtype=self.dtype)
        y = torch.full((tokens, self.hidden), torch.nan, dtype=self.dtype)
        first = Problem(
            tokens, top, self.count, 2 * self.inner, self.hidden, self.gate_up.format, False, Gate(self.gate),
            self.dtype, HOPPER, self.hidden % 8 == 0,
        )  # fmt: skip
        second = replace(first, n=self.hidden, k=self.inner, down=True, aligned=True)
        self._launch(first, self.gate_up, self.x, h, ids, None, self.biases[0], ("x", "y", "ids"), seed, changes)
        self._launch(second, self.down, h, y, ids, weights, self.biases[1], ("x", "y"), seed, changes)
        return y

    def _launch(
        self, problem: Problem, weight: QuantizedWeight, x: Tensor, y: Tensor, ids: Tensor, weights: Tensor | None,
        bias: Tensor | None, dependent: tuple[str, ...], seed: int, changes: Any,
    ) -> None:  # fmt: skip
        rows = round_up(weight.shape[0] // self.count, TILE_ROWS)
        packed = packed_tiles.prepare(resized(weight, self.count, rows))
        config: Config = (changes or sm90_experts_gemv.default)(problem)
        assert (reason := sm90_experts_gemv.why_not(problem, config)) is None, reason
        launch = sm90_experts_gemv.launch(
            problem, config, packed.pointers[:3], x, x.stride(0), y, y.stride(0), ids, ids.itemsize // 4, weights, bias
        )
        emulate.launched(launch, seed=seed, dependent=dependent)


def on_gpu(mixture: Mixture) -> PreparedExperts:
    """A mixture's weights, prepared on the GPU."""
    gate_up, down = mixture.gate_up.to("cuda"), mixture.down.to("cuda")
    return prepare_experts(gate_up, down, mixture.count, mixture.activations, mixture.gate)


def run(mixture: Mixture, prepared: PreparedExperts, ids: Tensor, weights: Tensor) -> Tensor:
    """The op's result on the GPU, back on the CPU."""
    biases = [None if bias is None else bias.cuda() for bias in mixture.biases]
    return experts(mixture.x.cuda(), ids.cuda(), weights.cuda(), prepared, *biases).cpu()


def error(y: Tensor, expected: Tensor) -> float:
    """Mean relative error."""
    return float((y.double() - expected.double()).abs().mean() / expected.double().abs().mean().clamp(min=1e-6))
