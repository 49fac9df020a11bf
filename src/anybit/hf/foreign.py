"""Models quantized by other tools, in transformers: built from config.json, loaded through a ``Translation``."""

import copy
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from anybit.checkpoints.formats.gguf_file import NotNative, open_gguf
from anybit.checkpoints.formats.translate import Translation
from anybit.checkpoints.gguf import gguf_scheme
from anybit.errors import AnyBitError, CheckpointError, KernelError, one_line
from anybit.hf.transformers import quantized_layers
from anybit.models.modules import tied_heads, untie
from anybit.scheme import Scheme


def load_translated(
    source: Translation,
    empty: PreTrainedModel,
    dtype: torch.dtype,
    device_map: str | None = None,
    backend: str | None = None,
) -> tuple[PreTrainedModel, dict[str, Iterable[str | tuple[str, ...]]]]:
    """(model, loading info) of a translated folder, as ``from_pretrained`` returns them; read layer by layer.

    empty: the unquantized model on the meta device.
    Raises CheckpointError for a layer that the model lacks or has in another shape.
    """
    if source.kv_scales:
        warnings.warn(
            f"{source.path} has scales for an 8-bit KV cache, such as {source.kv_scales[0]}: they are ignored, and "
            "keys and values stay in 16 bits",
            stacklevel=3,
        )
    source.check(empty)
    own = source.quantization(empty)
    config = copy.deepcopy(empty.config)
    config.quantization_config = {**own.entry(), **({"backend": backend} if backend else {})}
    for name in set(tied_heads(empty)) & set(source.layers):  # a head with codes of its own is no longer tied
        untie(empty, name, config)
    layers = quantized_layers(empty, own.scheme, own.kept or [], group_index=own.group_index, overrides=own.overrides)
    for name, layer in layers.items():
        empty.set_submodule(name, layer)
    tensors = source.state_dict(empty, dtype)
    model, found = type(empty).from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype, device_map=device_map, output_loading_info=True
    )
    model.config.name_or_path = str(source.path)
    if (source.path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.path)
    return model, found


def load_gguf(
    file: Path, dtype: torch.dtype | str, device_map: str | None, backend: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Scheme] | None:
    """(model, tokenizer, scheme) of a GGUF file, keeping its quantization; None if it has to be dequantized.

    dtype: of all floats; "auto" is float16. Warns if the file, or some of its matrices, must be dequantized.
    Raises CheckpointError for a corrupt file, KernelError if no kernel supports its codes.
    """
    if gguf_scheme(file) is None:
        return None
    try:
        source, tokenizer, empty = open_gguf(file)
    except NotNative as reason:
        warnings.warn(f"{file} is dequantized to 16-bit floats: {reason}", stacklevel=3)
        return None
    if source.dequantized:
        kinds = ", ".join(sorted(source.dequantized))
        warnings.warn(
            f"{file} has matrices in {kinds}, which become 16-bit floats: anybit has no codes for them", stacklevel=3
        )
    try:
        kind = torch.float16 if isinstance(dtype, str) else dtype
        model, _ = load_translated(source, empty, kind, device_map, backend)
    except KernelError as error:
        raise without_kernel(error) from None
    except (AnyBitError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged file can make the libraries below raise anything
        raise CheckpointError(f"{file} cannot be loaded: {one_line(error)}") from error
    return model, tokenizer, source.scheme


def without_kernel(error: KernelError) -> KernelError:
    """The error for codes that no kernel supports, plus the way out for models that cannot be requantized."""
    return KernelError(f"{error}; --dequantize (dequantize=True) runs this model's layers as 16-bit floats")
