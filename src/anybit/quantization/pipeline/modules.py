"""Which layers of a transformers model are quantized: found on the meta device, without reading a weight."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from anybit.checkpoints.configuration import check_pattern
from anybit.errors import CheckpointError, LayerError, one_line


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer of a model: N outputs by K inputs; ``transposed``: its weight is stored [K, N] (Conv1D)."""

    name: str
    n: int
    k: int
    transposed: bool


def skeleton(folder: Path, trust_remote_code: bool = False) -> Any:
    """The model of a folder's config.json on the meta device. Raises CheckpointError for an unknown architecture."""
    file = folder / "config.json"
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except MemoryError:
        raise
    except Exception as error:  # numbers of any size and type go into classes that expect others
        raise CheckpointError(
            f"{file}: transformers cannot build {_architecture(file)} as a causal language model: {_first_line(error)}"
        ) from error


def linear_layers(model: nn.Module, keep: list[str]) -> list[LinearLayer]:
    """The Linear and Conv1D layers of a model, but for those whose name matches one to keep.

    Raises LayerError if nothing is left.
    """
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and should_convert_module(name, keep):
            transposed = isinstance(module, Conv1D)
            rows, columns = module.weight.shape
            layers.append(LinearLayer(name, *((columns, rows) if transposed else (rows, columns)), transposed))
    if not layers:
        kept = f" (left as they are: {', '.join(keep)})" if keep else ""
        raise LayerError(f"{type(model).__name__} has no linear layer to quantize{kept}")
    return layers


def kept_modules(model: Any, modules_to_not_convert: list[str] | None) -> list[str]:
    """What stays as it is: the modules named, or by default the output head; and always a head that is tied."""
    keep = HfQuantizer.get_modules_to_not_convert(model, modules_to_not_convert, model._keep_in_fp32_modules)
    # A head that shares its weight with the embedding has none of its own that could be stored as codes.
    tied = {name.removesuffix(".weight") for name in tied_names(model)} & set(_linear_names(model))
    return sorted({*keep, *tied})


def check_kept(model: nn.Module, modules_to_not_convert: list[str] | str | None) -> None:
    """Raise LayerError for a name or pattern that matches no module: what was to be kept would be quantized."""
    if isinstance(modules_to_not_convert, str):
        raise LayerError(f"modules_to_not_convert must be a list of names, not {modules_to_not_convert!r}")
    names = [name for name, _ in model.named_modules() if name]
    for pattern in modules_to_not_convert or ():
        try:
            matched = any(not should_convert_module(name, [pattern]) for name in names)
        except re.error as error:
            raise LayerError(
                f"{pattern!r} is neither a layer to keep in 16 bits nor a pattern: {error}; patterns are regular "
                "expressions, in which .* matches any text" + _mended(pattern)
            ) from None
        try:
            check_pattern(pattern, "modules_to_not_convert")  # the saved folder is to load again
        except CheckpointError as error:
            raise LayerError(str(error)) from None
        if not matched:
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in _linear_names(model)))
            raise LayerError(
                f"{pattern!r} matches no layer of {type(model).__name__}; the names of its linear layers end in {known}"
            )


def _mended(pattern: str) -> str:
    """What a pattern of a shell would be as a regular expression, to end a sentence with."""
    mended = re.sub(r"(?<!\.)\*", ".*", pattern)
    try:
        re.compile(mended)
    except re.error:
        return ""
    return f": {mended!r}?" if mended != pattern else ""


def tied_names(model: Any) -> set[str]:
    """The parameters that a checkpoint may leave out because they are tied to another."""
    return set(model.all_tied_weights_keys)


def _linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]


def _architecture(file: Path) -> str:
    import json

    try:
        config = json.loads(file.read_text())
        return str((config.get("architectures") or [config.get("model_type")])[0])
    except (OSError, ValueError, AttributeError, IndexError):
        return "what it names"


def _first_line(error: BaseException) -> str:
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__  # its own first line names a validator, not what is wrong
    return one_line(error, first=True)
