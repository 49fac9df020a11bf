"""Parameters for vLLM's weight loaders: each takes a checkpoint's whole tensor and keeps its rank's shard.

vLLM's ``weight_loader_v2`` of column-parallel, fused and row-parallel layers calls the ``load_*`` methods. Rows
(outputs) are sharded by vLLM's offsets; inputs by ``cut``, since words and groups may straddle a shard's border.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.parameter import ModelWeightParameter, PackedColumnParameter, PerTensorScaleParameter

from anybit.codes.packing import unpack_words, words_per_row
from anybit.errors import CheckpointError, LayerError

Cut = Callable[[Tensor], Tensor]
"""Whole tensor -> the part for this rank's inputs."""
ANOTHER = "the folder is damaged, or its config.json is another model's: download it, or quantize the model, again"
"""Advice for errors about tensors that do not fit the model."""


class _Rows:
    """Loaders for a tensor with a row per output. name_: the layer's and tensor's name, for errors."""

    data: Tensor
    tp_rank: int
    tp_size: int
    name_: str
    cut: Cut

    def read(self, loaded: Tensor, rows: int) -> Tensor:
        """Unpack the checkpoint's tensor to ``rows`` rows, one per output."""
        return loaded

    def part(self, start: int, count: int) -> Tensor | None:
        """What was loaded for outputs start .. start + count - 1; None if their format has no such tensor."""
        return self.data[start : start + count]

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:
        self._place(loaded_weight, 0, self.data.shape[0], self.tp_rank, self.tp_size)

    def load_merged_column_weight(self, loaded_weight: Tensor, **where: Any) -> None:
        self._place(loaded_weight, where["shard_offset"], where["shard_size"], self.tp_rank, self.tp_size)

    def load_qkv_weight(self, loaded_weight: Tensor, **where: Any) -> None:
        copies = 1 if where["shard_id"] == "q" else where["num_heads"]  # ranks that share a KV head
        rank, ranks = self.tp_rank // copies, self.tp_size // copies
        self._place(loaded_weight, where["shard_offset"], where["shard_size"], rank, ranks)

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        self._place(loaded_weight, 0, self.data.shape[0], 0, 1)

    def _place(self, loaded: Tensor, offset: int, size: int, rank: int, ranks: int) -> None:
        rows = self.cut(self.read(loaded, size * ranks))
        expected = [size * ranks, *self.data.shape[1:]]
        if list(rows.shape) != expected:
            raise CheckpointError(
                f"{self.name_} is {list(loaded.shape)} in the checkpoint, {list(rows.shape)} for this rank; the model "
                f"and its scheme need {expected}; {ANOTHER}"
            )
        self.data.narrow(0, offset, size).copy_(rows.narrow(0, rank * size, size))


class Rows(_Rows, ModelWeightParameter):  # type: ignore[misc]
    """Words, scales or indices [N, ...], stored with a row per output."""

    def __init__(self, data: Tensor, weight_loader: Callable[..., None], name: str, cut: Cut) -> None:
        self.name_, self.cut = name, cut
        super().__init__(data=data, weight_loader=weight_loader, input_dim=1, output_dim=0)


class Zeros(_Rows, PackedColumnParameter):  # type: ignore[misc]
    """Zero points uint8 [N, G]; the checkpoint packs them along N: int32 [ceil(N * bits / 32), G]."""

    def __init__(self, data: Tensor, weight_loader: Callable[..., None], name: str, cut: Cut, bits: int) -> None:
        self.name_, self.cut, self.bits = name, cut, bits
        super().__init__(
            data=data, weight_loader=weight_loader, output_dim=0, packed_dim=0, packed_factor=Fraction(32, bits)
        )

    def read(self, loaded: Tensor, rows: int) -> Tensor:
        """Unpack the zero points of ``rows`` outputs."""
        return unpacked_zeros(self.name_, loaded, self.bits, rows)

    def adjust_shard_indexes_for_packing(self, shard_size: int, shard_offset: int) -> tuple[int, int]:
        """Outputs -> words, for layers stored fused. Raises CheckpointError if a part's border is inside a word."""
        size, offset = shard_size * self.bits, shard_offset * self.bits
        if size % 32 or offset % 32:
            raise CheckpointError(
                f"{self.name_} of a fused layer cannot be split at output {shard_offset}: a word there holds zero "
                "points of both parts. Use a symmetric scheme, or 4 or 8 bits"
            )
        return size // 32, offset // 32


class Pieces(ModelWeightParameter):  # type: ignore[misc]
    """A tensor of fused layers whose formats differ. data: empty.  pieces: each layer's tensor, by its first output."""

    def __init__(self, data: Tensor, weight_loader: Callable[..., None], pieces: "dict[int, Rows | Zeros]") -> None:
        self.pieces = pieces
        super().__init__(data=data, weight_loader=weight_loader, input_dim=1, output_dim=0)

    def part(self, start: int, count: int) -> Tensor | None:
        """Like ``_Rows.part``."""
        return self.pieces[start].data if start in self.pieces else None

    def release(self) -> None:
        """Free what was loaded: vLLM keeps a copy of this parameter, which refers to the same pieces."""
        self.pieces.clear()

    def _at(self, offset: int) -> "Rows | Zeros":
        if not self.pieces:
            raise LayerError("fused layers whose formats differ cannot be reloaded: restart the engine")
        piece = self.pieces[offset]
        piece.tp_rank, piece.tp_size = self.tp_rank, self.tp_size  # set after construction for replicated layers
        return piece

    def load_merged_column_weight(self, loaded_weight: Tensor, **where: Any) -> None:  # noqa: D102
        self._at(where["shard_offset"]).load_merged_column_weight(loaded_weight, **{**where, "shard_offset": 0})

    def load_qkv_weight(self, loaded_weight: Tensor, **where: Any) -> None:  # noqa: D102
        self._at(where["shard_offset"]).load_qkv_weight(loaded_weight, **{**where, "shard_offset": 0})


class PerPart(PerTensorScaleParameter):  # type: ignore[misc]
    """Per-layer data of fused layers, shared by all outputs of a layer: [parts, ...]."""

    def __init__(self, data: Tensor, weight_loader: Callable[..., None], name: str, cut: Cut) -> None:
        self.name_, self.cut = name, cut
        super().__init__(data=data, weight_loader=weight_loader)

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:  # noqa: D102
        self._load_into_shard_id(loaded_weight, 0)

    load_row_parallel_weight = load_column_parallel_weight

    def _load_into_shard_id(self, loaded_weight: Tensor, shard_id: str | int, **_: Any) -> None:
        part = self.cut(loaded_weight)
        if part.shape != self.data.shape[1:]:
            raise CheckpointError(
                f"{self.name_} is {list(loaded_weight.shape)} in the checkpoint, and the model needs "
                f"{list(self.data.shape[1:])} for this rank; {ANOTHER}"
            )
        self.data[self._shard_id_as_int(shard_id)].copy_(part)


def unpacked_zeros(name: str, packed: Tensor, bits: int, rows: int) -> Tensor:
    """Zero points uint8 [rows, G] from words int32 [ceil(rows * bits / 32), G]; CheckpointError for another number."""
    if packed.shape[0] != words_per_row(rows, bits):
        raise CheckpointError(
            f"{name} has {packed.shape[0]} rows of words in the checkpoint, and {rows} outputs need "
            f"{words_per_row(rows, bits)}; {ANOTHER}"
        )
    return unpack_words(packed.t().contiguous(), bits, rows).t()


def whole(tensor: Tensor) -> Tensor:
    """The ``Cut`` of a layer that keeps all inputs."""
    return tensor


def load_replicated(param: Any, loaded: Tensor, shard_id: Any = None) -> None:
    """Loader for replicated layers (vLLM's own compares shapes, but zero points are stored packed).

    This and other loaders must name their argument ``param``: vLLM passes it by keyword when it reloads weights.
    """
    param.load_column_parallel_weight(loaded)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Zeros for a parameter, on the device that vLLM builds the model on."""
    return torch.zeros(shape, dtype=dtype)


def nothing_of(layer: str) -> Callable[..., None]:
    """A loader for a quantized layer's empty ``weight``; it raises LayerError for one that holds values."""

    def load(param: Tensor, loaded: Tensor, *shard: Any) -> None:
        if loaded.numel():
            raise LayerError(
                f"the folder has a 16-bit weight {tuple(loaded.shape)} of layer {layer}, which its config.json says is "
                "quantized: save the model again, or name the layer in modules_to_not_convert"
            )

    return load
