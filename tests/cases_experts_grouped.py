"""Mixtures of experts for tests of the kernels of many tokens: tall weights, routing, exact results."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anybit import jit
from anybit.codes.packing import QuantizedWeight
from anybit.codes.reference import join, quantize_activations
from anybit.jit.tensor_map import Matrix
from anybit.kernels.common.types import Gate, Output
from anybit.kernels.experts.sm90_grouped_gemm import sm90_grouped_gemm
from anybit.kernels.experts.sm90_grouped_gemm.sm90_grouped_gemm import Config, Operands, Problem
from anybit.kernels.packed.packed_layout import TILE_ROWS, round_up
from anybit.kernels.packed.packed_tiles import prepare
from anybit.scheme import Scheme
from cases import random_weight

_OUTPUTS = {torch.float32: Output.f32, torch.float16: Output.f16, torch.bfloat16: Output.bf16}


@dataclass(frozen=True, eq=False)
class Experts:
    """A layer's experts. gate_up: [experts, 2 * inner, hidden], down: [experts, hidden, inner], in kernels' order."""

    problem: Problem
    operands: Operands
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def expected(self) -> Tensor:
        """y in float64, rounded where the kernels round: inner values, slots' rows, codes of 8-bit activations."""
        p, o = self.problem, self.operands
        assert isinstance(o.x, Tensor) and isinstance(o.ids, Tensor) and isinstance(o.weights, Tensor)
        y = torch.zeros(p.tokens, p.hidden, dtype=torch.float64, device=o.x.device)
        for expert in range(p.experts):
            token, choice = (o.ids == expert).nonzero(as_tuple=True)
            if not len(token):
                continue
            rows = _coded(o.x[token], p) @ self.gate_up[expert].double().T
            if self.gate_up_bias is not None:
                rows = rows + self.gate_up_bias[expert].double()
            inner = join(rows.to(p.dtype), p.gate.value)
            rows = _coded(inner, p) @ self.down[expert].double().T
            if self.down_bias is not None:
                rows = rows + self.down_bias[expert].double()
            y.index_add_(0, token, o.weights[token, choice, None].double() * rows.to(p.dtype).double())
        return y

    def launches(self, configs: tuple[Config, Config] | None = None) -> list[jit.Launch]:
        """What the kernels run."""
        assert sm90_grouped_gemm.why_not(self.problem, configs or sm90_grouped_gemm.default(self.problem)) is None
        size = sm90_grouped_gemm.scratch(self.problem, configs)
        room = torch.full((size,), 255, dtype=torch.uint8, device=self.gate_up.device)  # NaN, and counts far too large
        return sm90_grouped_gemm.launches(self.problem, replace(self.operands, scratch=room), configs)


def _coded(x: Tensor, p: Problem) -> Tensor:
    if not p.activations.quantized:
        return x.double()
    return quantize_activations(x, p.activations).dequantize(torch.float64)


def experts(
    scheme: str, ids: Tensor, experts: int, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16,
    bias: bool = False, device: str = "cpu", routing: torch.dtype = torch.float32, gate: Gate = Gate.silu,
) -> Experts:  # fmt: skip
    """A random layer of experts whose tokens chose ``ids`` [tokens, top_k]."""
    form, (tokens, top_k) = Scheme.parse(scheme), ids.shape
    problem = Problem(
        tokens, top_k, experts, hidden, inner, form.weights, form.weights, form.activations, dtype,
        id_words=ids.itemsize // 4, routing=_OUTPUTS[routing], gate=gate,
    )  # fmt: skip
    order = "a8" if form.activations.quantized else "a16"
    made, dense = [], []
    for place, (n, k) in enumerate(((2 * inner, hidden), (hidden, inner))):
        rows = round_up(n, TILE_ROWS)
        tall = random_weight(experts * rows, k, form.weights, seed=place)
        tall = replace(tall, scale=tall.scale / (k**0.5 / 4)) if tall.minimum is None else tall
        tall = tall.to(device)
        packed = prepare(tall, order)
        made.append(packed.pointers[:3])
        dense.append(_dense(tall).view(experts, rows, k)[:, :n])
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
    weights = torch.rand(tokens, top_k, generator=generator).to(device, routing)
    biases: list[Tensor | None] = [None, None]
    if bias:
        biases = [
            torch.randn(experts, round_up(n, TILE_ROWS), generator=generator).to(device, dtype)
            for n in (2 * inner, hidden)
        ]
    y = torch.full((tokens, hidden), torch.nan, dtype=dtype, device=device)
    operands = Operands(x, hidden, ids.to(device), weights, made[0], made[1], y, y, *biases)
    own = [None if one is None else one[:, :n] for one, n in zip(biases, (2 * inner, hidden), strict=True)]
    return Experts(problem, operands, dense[0], dense[1], own[0], own[1])


def _dense(weight: QuantizedWeight) -> Tensor:
    return weight.dequantize(torch.float32)


def as_matrix(matrix: Matrix) -> Tensor:
    """The rows that a tensor map names, as a tensor."""
    at, size = matrix.at, matrix.element_bytes
    assert isinstance(at, Tensor)
    values = at.reshape(-1).view(torch.int16 if size == 2 else torch.int8)
    return values.as_strided((matrix.rows, matrix.columns), (matrix.pitch // size, 1))
