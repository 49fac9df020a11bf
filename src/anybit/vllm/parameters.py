"""What loaders of a checkpoint's tensors share: each takes a whole one and keeps its rank's part, or refuses it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.utils import set_weight_attrs

from anybit.checkpoints.verify import check_values
from anybit.codes.packing import QuantizedWeight, layer_shapes, unpack_words, words_per_row
from anybit.codes.sharding import shard_groups, shard_words
from anybit.errors import AnyBitError, CheckpointError, LayerError, OptionError
from anybit.scheme import WeightFormat
from anybit.vllm.streams import DUMMY

Loader = Callable[..., bool | None]
"""(parameter, a checkpoint's tensor, which part of a fused layer it is); experts' say whether they took it.

The first is named ``param``: vLLM passes it by keyword when it reloads weights.
"""
ANOTHER = "the folder is damaged, or its config.json is another model's: download it, or quantize the model, again"
"""Advice for errors about tensors that do not fit the model."""


def unpacked_zeros(name: str, packed: Tensor, bits: int, rows: int) -> Tensor:
    """Zero points uint8 [rows, G] from words int32 [ceil(rows * bits / 32), G]; CheckpointError for another number."""
    if packed.shape[0] != words_per_row(rows, bits):
        raise CheckpointError(
            f"{name} has {packed.shape[0]} rows of words in the checkpoint, and {rows} outputs need "
            f"{words_per_row(rows, bits)}; {ANOTHER}"
        )
    return unpack_words(packed.t().contiguous(), bits, rows).t()


def rows_of(
    name: str, loaded: Tensor, fmt: WeightFormat, outputs: int, inputs: tuple[int, int] | None, like: Tensor
) -> Tensor:
    """A checkpoint's tensor of a layer in ``fmt``, [outputs, ...], zero points unpacked, of this rank's inputs.

    name: the layer's and the tensor's.  inputs: (first, number) of this rank's; None for all.  like: whose rows they
    become. Raises CheckpointError for another shape.
    """
    suffix = name.rpartition(".")[2]
    rows = unpacked_zeros(name, loaded, fmt.bits, outputs) if suffix == "weight_zero_point" else loaded
    bits = {"weight_packed": fmt.bits, "weight_indices": 2}.get(suffix)
    if inputs is not None:
        first, count = (x // 2 if fmt.sparse else x for x in inputs)  # of stored codes
        rows = shard_words(rows, bits, first, count) if bits else shard_groups(rows, fmt, *inputs)
    check_shape(name, loaded, rows, (outputs, *like.shape[1:]))
    return rows


def check_shape(name: str, loaded: Tensor, own: Tensor, expected: Sequence[int]) -> None:
    """Raise CheckpointError unless this rank's part of a checkpoint's tensor has the expected shape."""
    if list(own.shape) != list(expected):
        raise CheckpointError(
            f"{name} is {list(loaded.shape)} in the checkpoint, {list(own.shape)} for this rank; the model and its "
            f"scheme need {list(expected)}; {ANOTHER}"
        )


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
