"""Layers whose weights are dequantized in registers: 16-bit activations, or 8-bit ones quantized per token.

ADAngel's padding and dequantizing strategies (section 4.3), except that global and shared memory only ever hold packed
weights.
"""

from dataclasses import replace

import torch
from torch import Tensor

from anybit.codes.packing import QuantizedWeight, pack_words
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_layout, packed_tiles, sparse_layout
from anybit.kernels.packed.packed_layout import PackedWeight
from anybit.kernels.packed.rows import packed_rows
from anybit.kernels.packed.sm80_gemm import sm80_packed_gemm
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.ops.backend import Backend, LinearSpec
from anybit.scheme import ActivationFormat

_BY_ROW = (1, 2, 4, 5, 7)
"""Places of tensors that have a value or more a row."""


class PackedTiles(Backend):
    """Weights of 1 to 8 bits in tiles, dequantized in registers: `sm90_packed_gemm`, or a kernel for few tokens.

    Without wgmma (all but sm_90a), `sm80_packed_gemm` replaces `sm90_packed_gemm`.
    """

    name = "packed"
    unasked = ("cuda",)
    codes = True
    norm_tokens = sm90_packed_gemv.NORM_TOKENS

    def why_not(self, weight: QuantizedWeight, activations: ActivationFormat) -> str | None:
        """Why no kernel runs this layer on its device, as a sentence; None if one does."""
        if weight.device.type != "cuda":
            return f"its kernels need a CUDA device, and the weight is on {weight.device}"
        return why_not(weight, activations, Device.of(weight.words))

    def cost(self, weight: QuantizedWeight, activations: ActivationFormat) -> int:
        """1: after bit planes where they cost 0, before them where they cost 2."""
        return 1

    def prepare(self, weight: QuantizedWeight, activations: ActivationFormat) -> list[Tensor]:
        """Tiles, row scales, row zeros, permutation; then the original scale, zero, group index and minimum."""
        packed = packed_tiles.prepare(weight, "a8" if activations.quantized else "a16")
        saved = (weight.scale, weight.zero, weight.group_index, weight.minimum)
        tensors = (packed.tiles, packed.row_scale, packed.row_zero, packed.permutation, *saved)
        return [torch.empty(0, device=weight.device) if tensor is None else tensor for tensor in tensors]

    def restore(self, tensors: list[Tensor], spec: LinearSpec) -> QuantizedWeight:
        """The packed weight, exactly as it was."""
        packed, indices = _weight(tensors, spec), None
        if spec.weights.sparse:
            words, indices = sparse_layout.words_of(packed.tiles, spec.weights.bits, packed.order, spec.n, spec.k)
        else:
            words = pack_words(packed_tiles.codes(packed), spec.weights.bits)
        scale, (zero, group_index, minimum) = tensors[4], map(_optional, tensors[5:8])
        return QuantizedWeight(words, scale, zero, (spec.n, spec.k), spec.weights, group_index, indices, minimum)

    def restore_rows(self, tensors: list[Tensor], spec: LinearSpec, rows: slice) -> QuantizedWeight:
        """From the tiles of these rows alone."""
        unit = packed_layout.TILE_ROWS
        tiles = slice(rows.start // unit, -(-rows.stop // unit))
        start, stop = unit * tiles.start, min(unit * tiles.stop, spec.n)
        part = [
            one[:, tiles].contiguous() if place == 0 else one[start : unit * tiles.stop] if place in _BY_ROW else one
            for place, one in enumerate(tensors)
        ]
        found = self.restore(part, replace(spec, n=stop - start))
        return found.rows(slice(rows.start - start, rows.stop - start))

    def ends_with_silu(self, weight: QuantizedWeight) -> bool:
        """On sm_90a, for dense weights: all kernels that are fast with quantized activations have the epilogue."""
        arch, whole = Device.of(weight.words).arch, weight.shape[0] % packed_layout.UNIT_ROWS == 0
        return arch == "sm_90a" and whole and not weight.format.sparse and weight.group_index is None

    def rows(self, ids: Tensor, tensors: list[Tensor], spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        """Embedding lookup from the tiles, in one launch. KernelError for tiles of 8-bit activations, and float32."""
        y = torch.empty(ids.numel(), spec.k, dtype=dtype, device=ids.device)
        if y.numel():
            packed_rows.launch(_weight(tensors, spec), ids.reshape(-1).contiguous(), y)
        return y.view(*ids.shape, spec.k)


def why_not(weight: QuantizedWeight, activations: ActivationFormat, device: Device) -> str | None:
    """Why no kernel on ``device`` runs a weight in tiles at any token count, as a sentence; None if one does."""
    n, k = weight.shape
    ordered = packed_tiles.is_ordered(weight)
    problem = LinearProblem(1, n, k, weight.format, activations, device=device, act_order=ordered)
    reason = sm90_packed_gemm.why_not(problem)
    return reason if reason is None or device.arch == "sm_90a" else sm80_packed_gemm.why_not(problem)


def _weight(tensors: list[Tensor], spec: LinearSpec) -> PackedWeight:
    tiles, row_scale, row_zero, permutation = tensors[:4]
    shape, order = (spec.n, spec.k), "a8" if spec.activations.quantized else "a16"
    return PackedWeight(tiles, row_scale, _optional(row_zero), _optional(permutation), shape, spec.weights, order)  # type: ignore[arg-type]


def _optional(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None
