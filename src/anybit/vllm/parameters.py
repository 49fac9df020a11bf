"""Parameters for vLLM's weight loaders: each takes a checkpoint's whole tensor and keeps its rank's shard.

vLLM's ``weight_loader_v2`` of column-parallel, fused and row-parallel layers calls the ``load_*`` methods. Rows
(outputs) are sharded by vLLM's offsets; inputs by ``cut``, since words and groups may straddle a shard's border.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.parameter import ModelWeightParameter, PackedColumnParameter, PerTensorScaleParameter
from vllm.model_executor.utils import set_weight_attrs

from anybit.checkpoints.verify import check_values
from anybit.codes.packing import QuantizedWeight, layer_shapes, unpack_words, words_per_row
from anybit.codes.sharding import shard_groups, shard_words
from anybit.errors import AnyBitError, CheckpointError, LayerError, OptionError
from anybit.scheme import WeightFormat
from anybit.vllm.streams import DUMMY

Loader = Callable[..., bool | None]
"""(parameter, a checkpoint's tensor, which part of a fused layer it is); experts' say whether they took it."""
Cut = Callable[[Tensor], Tensor]
"""Whole tensor -> the part for this rank's inputs."""
ANOTHER = "the folder is damaged, or its config.json is another model's: download it, or quantize the model, again"
"""Advice for errors about tensors that do not fit the model."""


class _PerOutput:
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

    def load_merged_column_weight(self, loaded_weight: Tensor, shard_offset: int, shard_size: int, **_: object) -> None:
        self._place(loaded_weight, shard_offset, shard_size, self.tp_rank, self.tp_size)

    def load_qkv_weight(
        self, loaded_weight: Tensor, shard_offset: int, shard_size: int, shard_id: str, num_heads: int, **_: object
    ) -> None:
        copies = 1 if shard_id == "q" else num_heads  # ranks that share a KV head
        self._place(loaded_weight, shard_offset, shard_size, self.tp_rank // copies, self.tp_size // copies)

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


class PerOutput(_PerOutput, ModelWeightParameter):  # type: ignore[misc]
    """Words, scales or indices [N, ...], stored with a row per output."""

    def __init__(self, data: Tensor, weight_loader: Loader, name: str, cut: Cut) -> None:
        self.name_, self.cut = name, cut
        super().__init__(data=data, weight_loader=weight_loader, input_dim=1, output_dim=0)


class Zeros(_PerOutput, PackedColumnParameter):  # type: ignore[misc]
    """Zero points uint8 [N, G]; the checkpoint packs them along N: int32 [ceil(N * bits / 32), G]."""

    def __init__(self, data: Tensor, weight_loader: Loader, name: str, cut: Cut, bits: int) -> None:
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


Sharded = PerOutput | Zeros


class Pieces(_PerOutput, ModelWeightParameter):  # type: ignore[misc]
    """A tensor of fused layers whose formats differ. data: empty.  pieces: each layer's tensor, by its first output."""

    def __init__(self, data: Tensor, weight_loader: Loader, pieces: "dict[int, Sharded]") -> None:
        self.pieces = pieces
        super().__init__(data=data, weight_loader=weight_loader, input_dim=1, output_dim=0)

    def part(self, start: int, count: int) -> Tensor | None:
        """Like ``PerOutput.part``."""
        return self.pieces[start].data if start in self.pieces else None

    def release(self) -> None:
        """Free what was loaded: vLLM keeps a copy of this parameter, which refers to the same pieces."""
        self.pieces.clear()

    def _place(self, loaded: Tensor, offset: int, size: int, rank: int, ranks: int) -> None:
        if not self.pieces:
            raise LayerError("fused layers whose formats differ cannot be reloaded: restart the engine")
        self.pieces[offset]._place(loaded, 0, size, rank, ranks)


class PerPart(PerTensorScaleParameter):  # type: ignore[misc]
    """Per-layer data of fused layers, shared by all outputs of a layer: [parts, ...]."""

    def __init__(self, data: Tensor, weight_loader: Loader, name: str, cut: Cut) -> None:
        self.name_, self.cut = name, cut
        super().__init__(data=data, weight_loader=weight_loader)

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:  # noqa: D102
        self._load_into_shard_id(loaded_weight, 0)

    load_row_parallel_weight = load_column_parallel_weight

    def _load_into_shard_id(self, loaded_weight: Tensor, shard_id: str | int, **_: object) -> None:
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


def cut_inputs(values: Tensor, name: str, fmt: WeightFormat, start: int, inputs: int) -> Tensor:
    """Inputs ``start`` to ``start + inputs`` of a whole layer's tensor [N, ...] in ``fmt``. name: of the tensor."""
    kept = 2 if fmt.sparse else 1
    bits = {"weight_packed": fmt.bits, "weight_indices": 2}.get(name)
    if bits is None:
        return shard_groups(values, fmt, start, inputs)
    return shard_words(values, bits, start // kept, inputs // kept)


def check_inputs(layer: str, stored: int, inputs: int) -> None:
    """Check the inputs that a layer's ``weight_shape`` tells; 0 stands for a layer that was not loaded.

    Raises CheckpointError, or OptionError for --load-format dummy.
    """
    if stored == inputs:
        return
    if stored:
        raise CheckpointError(f"{layer} has {stored} inputs in the checkpoint, and {inputs} in the model; {ANOTHER}")
    config = get_current_vllm_config_or_none()
    if config is not None and str(config.load_config.load_format) == DUMMY:
        raise OptionError(
            f"--load-format {DUMMY} fills weights at random, which cannot make valid codes: leave it out, "
            "or serve the unquantized model with a scheme (`anybit serve MODEL --scheme w4a16g128`)"
        )
    raise CheckpointError(f"{layer}: the checkpoint lacks the tensors of a part of it; {ANOTHER}")


def load_replicated(param: _PerOutput, loaded: Tensor, shard_id: str | int | None = None) -> None:
    """Loader for replicated layers (vLLM's own compares shapes, but zero points are stored packed).

    This and other loaders must name their argument ``param``: vLLM passes it by keyword when it reloads weights.
    """
    param.load_column_parallel_weight(loaded)


def tensors_of(fmt: WeightFormat, n: int, k: int, groups: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Zeros for the tensors of a weight of n outputs and k inputs, a row per output, by name; zero points unpacked."""
    grouped = {"weight_scale": dtype, "weight_minimum": dtype, "weight_zero_point": torch.uint8}
    return {
        name: torch.zeros((n, groups) if name in grouped else shape, dtype=grouped.get(name, torch.int32))
        for name, shape in layer_shapes(n, k, fmt).items()
        if name != "weight_shape"
    }


def weight_of(name: str, found: Mapping[str, Tensor], shape: tuple[int, int], fmt: WeightFormat) -> QuantizedWeight:
    """The weight [N, K] whose loaded tensors are ``found``. name: the layer's, for errors.

    Raises CheckpointError for values that no layer has.
    """
    check_values(name, {**found, "weight_shape": torch.tensor(shape)})
    zero, order, indices, minimum = (found.get(f"weight_{x}") for x in ("zero_point", "g_idx", "indices", "minimum"))
    return QuantizedWeight(found["weight_packed"], found["weight_scale"], zero, shape, fmt, order, indices, minimum)


def add(layer: nn.Module, name: str, data: Tensor, loader: Loader, **attributes: int) -> None:
    """Register a parameter that ``loader`` fills. attributes: as vLLM's own loaders read them."""
    parameter = nn.Parameter(data, requires_grad=False)
    set_weight_attrs(parameter, {"weight_loader": loader, **attributes})
    layer.register_parameter(name, parameter)


def nothing_of(layer: str) -> Loader:
    """A loader for a quantized layer's empty ``weight``; it raises LayerError for one that holds values.

    Folders that only anybit reads have such a tensor per layer, which makes other programs' loaders fail.
    """

    def load(param: Tensor, loaded: Tensor, *shard: object) -> None:
        if loaded.numel():
            raise LayerError(
                f"the folder has a 16-bit weight {tuple(loaded.shape)} of layer {layer}, which its config.json says is "
                "quantized: save the model again, or name the layer in modules_to_not_convert"
            )

    return load


@contextmanager
def named(layer: str) -> Iterator[None]:
    """Errors of anybit that are raised inside begin with the name of a layer."""
    try:
        yield
    except AnyBitError as error:
        raise type(error)(f"{layer}: {error}") from None
