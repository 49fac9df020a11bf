"""Which layers of a transformers model are quantized: found on the meta device, without reading weights."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from anybit.errors import CheckpointError, LayerError, one_line
from anybit.models.experts import unfuse
from anybit.models.patterns import check_pattern, is_wild

if TYPE_CHECKING:  # at run time it would make anybit.registration import hf, and with it this module, half-way here
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer of a model: n outputs, k inputs. transposed: its weight is stored [K, N] (Conv1D)."""

    name: str
    n: int
    k: int
    transposed: bool


def skeleton(folder: Path, trust_remote_code: bool = False, buffers: bool = False) -> "PreTrainedModel":
    """Build the model of a folder's config.json on the meta device, its experts as linear layers.

    buffers: compute them, on the CPU; parameters are float32 then.  Raises CheckpointError if that fails.
    """
    file = folder / "config.json"
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        kind: dict[str, Any] = {"dtype": torch.float32} if buffers else {}
        with _parameters_on_meta() if buffers else torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code, **kind)
        unfuse(model)
        return model
    except MemoryError:
        raise
    except Exception as error:  # a bad config.json can make any class fail in any way
        # The first line of a StrictDataclassError only names a validator.
        cause = error.__cause__ if isinstance(error, StrictDataclassError) else None
        why = f"{_architecture(file)} as a causal language model: {one_line(cause or error, first=True)}"
        raise CheckpointError(f"{file}: transformers cannot build {why}") from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """A context in which modules take their parameters to the meta device."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        return None if parameter.is_meta else nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # torch uses what it returns
    try:
        yield
    finally:
        handle.remove()


def described_model(folder: Path, trust_remote_code: bool = False) -> "PreTrainedModel":
    """Build the model that a config.json names as its architecture on the meta device, or ``skeleton`` without one."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return skeleton(folder, trust_remote_code)
    with torch.device("meta"):
        model = kind(config)
    unfuse(model)
    return model


def auto_class(config: "PreTrainedConfig") -> Any:
    """The auto class for a config: AutoModelForCausalLM, or AutoModelForImageTextToText for vision-language models.

    AutoModelForCausalLM builds only the text part of some of those, and does not know others.
    """
    whole = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    named = getattr(config, "architectures", None) or ()
    plain = whole is None or (
        type(config) in AutoModelForCausalLM._model_mapping and named and whole.__name__ not in named
    )
    return AutoModelForCausalLM if plain else AutoModelForImageTextToText


def beside_text(model: "PreTrainedModel") -> list[str]:
    """The outermost modules outside a model's language part: vision or audio towers, projectors.

    Empty for text-only models.
    """
    if model.config.get_text_config(decoder=True) is model.config:
        return []
    text, head = model.get_decoder(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []
    for name, module in model.named_modules():
        inside, parts = any(name.startswith(f"{outer}.") for outer in (*found, names[text])), set(module.modules())
        if not inside and not parts & {text, head} and any(map(is_linear, parts)):
            found.append(name)
    return found


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes exactly y = x W^T + b.

    Routers and DeepSeek-V4's grouped projection subclass Linear but override forward; FalconLinear's is equivalent.
    """
    plain = type(module).forward in (nn.Linear.forward, Conv1D.forward) or type(module).__name__ == "FalconLinear"
    return plain and isinstance(module, (nn.Linear, Conv1D))


def linear_layers(model: nn.Module, keep: list[str]) -> list[LinearLayer]:
    """The Linear and Conv1D layers of a model whose names match none of ``keep``.

    Raises LayerError if there are none.
    """
    layers = []
    for name, module in model.named_modules():
        if is_linear(module) and should_convert_module(name, keep):
            transposed = isinstance(module, Conv1D)
            n, k = module.weight.T.shape if transposed else module.weight.shape
            layers.append(LinearLayer(name, n, k, transposed))
    if not layers:
        kept = f" (left as they are: {', '.join(keep)})" if keep else ""
        raise LayerError(f"{type(model).__name__} has no linear layer to quantize{kept}")
    return layers


def embedding_layers(model: "PreTrainedModel", overrides: Collection[str]) -> list[LinearLayer]:
    """The input embedding as a layer with an output per token, if overrides name it (not by a pattern); else none.

    Raises LayerError for an embedding that is not a plain nn.Embedding.
    """
    found = model.get_input_embeddings()
    name = _embedding_name(model)
    if name not in overrides:
        return []
    if type(found) is not nn.Embedding:
        raise LayerError(
            f"override {name!r}: {name} is a {type(found).__name__}, which may do more than look up rows: only a plain "
            "nn.Embedding is quantized"
        )
    n, k = found.weight.shape
    return [LinearLayer(name, n, k, transposed=False)]


def shared_heads(model: "PreTrainedModel", overrides: Mapping[str, object]) -> list[str]:
    """The output heads tied to a quantized embedding that have no scheme of their own: they share its codes."""
    name = _embedding_name(model)
    if name not in overrides:
        return []
    tied = [head for head, source in tied_heads(model).items() if source == f"{name}.weight"]
    return [head for head in tied if str(overrides.get(head, overrides[name])) == str(overrides[name])]


def _embedding_name(model: "PreTrainedModel") -> str:
    found = model.get_input_embeddings()
    return next((name for name, module in model.named_modules() if module is found), "")


def kept_modules(
    model: "PreTrainedModel", modules_to_not_convert: list[str] | None, overrides: Mapping[str, object] | None = None
) -> list[str]:
    """Modules to leave unquantized: those named, tied heads, and everything but text.

    By default the output head is named, and so are gates of one output, which route to shared experts.
    overrides: a head that they name (not by a pattern) is quantized, and untied if it was tied.
    """
    keep = HfQuantizer.get_modules_to_not_convert(model, modules_to_not_convert, model._keep_in_fp32_modules)
    if modules_to_not_convert is None:
        keep += [layer.name for layer in linear_layers(model, []) if layer.n == 1]
    # A tied head has no weight of its own to quantize; it multiplies by the codes of a quantized embedding.
    overrides = overrides or {}
    chosen = set(overrides) - set(modules_to_not_convert or ()) - set(shared_heads(model, overrides))
    return sorted({*keep, *tied_heads(model), *beside_text(model)} - chosen)


def tied_heads(model: "PreTrainedModel") -> dict[str, str]:
    """Linear layers that share their weight with another module, mapped to the name of that weight."""
    heads = {f"{name}.weight": name for name in _linear_names(model)}
    ties = model.all_tied_weights_keys.items()
    return {heads[name]: str(source) for name, source in ties if name in heads}


def untie(model: "PreTrainedModel", head: str, config: "PreTrainedConfig") -> None:
    """Forget that a model on the meta device, and a configuration, tie an output head to the embedding."""
    del model.all_tied_weights_keys[f"{head}.weight"]
    for part in (config, config.get_text_config(decoder=True)):
        part.tie_word_embeddings = False


def untied(config: Mapping[str, object]) -> dict[str, object]:
    """The config.json entries that untie a model's output head from its embedding."""
    inner, changed = config.get("text_config"), {"tie_word_embeddings": False}
    return {**changed, "text_config": {**inner, **changed}} if isinstance(inner, Mapping) else {**changed}


def check_overrides(model: "PreTrainedModel", overrides: Mapping[str, object], quantized: Iterable[str]) -> None:
    """Raise LayerError for an override that matches no quantized layer, and would silently do nothing."""
    embedding = [layer.name for layer in embedding_layers(model, overrides)]
    quantized = {*quantized, *embedding, *shared_heads(model, overrides)}
    known = [*_linear_names(model), _embedding_name(model)]
    for pattern in overrides:
        if pattern in quantized or (is_wild(pattern) and any(fnmatchcase(name, pattern) for name in quantized)):
            continue
        kept = [name for name in known if name == pattern or fnmatchcase(name, pattern)]
        if kept:
            advice = "remove it from modules_to_not_convert" if kept[0] == pattern else "name it in full to quantize it"
            raise LayerError(f"override {pattern!r}: {kept[0]} stays in 16 bits: {advice}")
        ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in known))
        whole = [name for name in known if name.endswith(f".{pattern}")]
        if len(whole) == 1:
            raise LayerError(f"override {pattern!r} is not a full name: write {whole[0]}")
        raise LayerError(
            f"override {pattern!r} matches no layer of {type(model).__name__}: write a full name, or a pattern "
            f"such as '*.{known[0].rpartition('.')[2]}'; the names of its layers end in {ends}"
        )


def check_kept(model: nn.Module, modules_to_not_convert: Iterable[str] | None) -> None:
    """Raise LayerError for a name or pattern that matches no module: the layer it meant would be quantized."""
    if isinstance(modules_to_not_convert, str):
        raise LayerError(f"modules_to_not_convert must be a list of names, not {modules_to_not_convert!r}")
    names = [name for name, _ in model.named_modules() if name]
    for pattern in modules_to_not_convert or ():
        try:
            matched = any(not should_convert_module(name, [pattern]) for name in names)
        except re.error as error:
            raise LayerError(
                f"{pattern!r} is neither a layer to keep in 16 bits nor a pattern: {error}; patterns are regular "
                "expressions, in which .* matches any text" + _suggestion(pattern)
            ) from None
        try:
            check_pattern(pattern, "modules_to_not_convert")  # so that the saved folder loads again
        except CheckpointError as error:
            raise LayerError(str(error)) from None
        if not matched:
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in _linear_names(model)))
            raise LayerError(
                f"nothing to keep: {pattern!r} matches no layer of {type(model).__name__}; the names of its linear "
                f"layers end in {known}"
            )


def _suggestion(pattern: str) -> str:
    """A suggestion for the end of an error message: a shell pattern as a regular expression."""
    mended = re.sub(r"(?<!\.)\*", ".*", pattern)
    try:
        re.compile(mended)
    except re.error:
        return ""
    return f": {mended!r}?" if mended != pattern else ""


def without_rescaling(model: "PreTrainedModel") -> None:
    """Keep RWKV from dividing weights in place at its first call (``rescale_every``): codes would not follow."""
    if hasattr(model.config, "rescale_every"):
        model.config.rescale_every = 0


def _linear_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_linear(module)]


def _architecture(file: Path) -> str:
    try:
        config = json.loads(file.read_text())
        return str((config.get("architectures") or [config.get("model_type")])[0])
    except (OSError, ValueError, AttributeError, IndexError):
        return "what it names"


def check_tokens(model: "PreTrainedModel", ids: Sequence[int] | torch.Tensor, where: object) -> None:
    """Raise CheckpointError for a token id beyond a model's embedding, which a GPU might not report."""
    largest = max(ids, default=0) if isinstance(ids, Sequence) else int(ids.max()) if ids.numel() else 0
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if known is not None and largest >= known:
        raise CheckpointError(
            f"the tokenizer of {where} gives token {largest}, but the model has only {known} embeddings: it is the "
            "tokenizer of another model"
        )


def positions_of(config: "PreTrainedConfig") -> int | None:
    """How many positions a model was trained for; None if its config does not say (``Loaded.positions``)."""
    text = config.get_text_config(decoder=True)
    count, rotary = getattr(text, "max_position_embeddings", None), _rotary(config)
    kinds = [kind for kind in rotary.values() if isinstance(kind, dict)]
    if len(kinds) < len(rotary):  # one for all layers, not one for each of their kinds
        kinds = [rotary]
    scaled = any(kind.get("rope_type", "default") != "default" for kind in kinds)
    if scaled or getattr(text, "alibi", False) or not isinstance(count, int) or count < 1:
        return None
    return count


def last_position(config: "PreTrainedConfig") -> int | None:
    """The size of a model's position table, a hard limit; None without one."""
    return None if _rotary(config) else positions_of(config)


def _rotary(config: "PreTrainedConfig") -> dict[str, object]:
    return getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
