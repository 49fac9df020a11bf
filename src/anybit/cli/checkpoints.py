"""anybit convert, anybit info."""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.cli import options
from anybit.cli.common import in_short, megabytes, output, print_json, status
from anybit.errors import ConversionError, LayerError, SchemeError
from anybit.scheme import CODES, KVFormat, Scheme

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from anybit.checkpoints.configuration import Quantization

_FORMATS = ["anybit", "compressed-tensors", "gptq", "gguf"]
_REQUEST = 8192
"""Request length (tokens) assumed when saying how many tokens fit."""


def convert(
    model: Annotated[str, typer.Argument(help="A quantized model: a folder, a hub name, or a GGUF file.")],
    to: Annotated[str, typer.Option(help="anybit, compressed-tensors, gptq or gguf.", autocompletion=lambda: _FORMATS)],
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The folder, or GGUF file, to write; without it config.json is rewritten."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --output names.")] = False,
    width: options.Width = None,
    trust_remote_code: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Write a quantized model in another format, with the same codes.

    What that format cannot hold is refused. Without --output, only config.json is rewritten: anybit and
    compressed-tensors share their tensors.

    \b
    Examples:
    anybit convert smollm2-w4 --to compressed-tensors
    anybit convert llama-awq --to anybit -o llama-w4
    anybit convert model.Q4_K_M.gguf --to anybit -o model-w4
    anybit convert llama-w4 --to gptq -o llama-gptq
    anybit convert smollm2-w4g32 --to gguf -o smollm2.gguf
    anybit convert llama-nested --width 3 --to compressed-tensors -o llama-w3
    """
    from anybit.checkpoints.formats import write
    from anybit.checkpoints.scratch import sweep
    from anybit.checkpoints.source import is_gguf

    if to not in _FORMATS:
        raise ConversionError(f"--to {to!r} is unknown: write {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}")
    if out is None and (to in ("gptq", "gguf") or width is not None or is_gguf(model)):
        what = "a file" if to == "gguf" else "a folder"
        raise ConversionError(f"converting {model} to {to} writes new tensors: name {what} for them with --output")
    if out is None:
        sweep(Path(model))
        quantization = write.convert(model, to, trust_remote_code)
        told = f"{Path(model) / 'config.json'} now describes the model for {to}; no tensor was changed"
    else:
        with status(f"Writing {out}"):
            quantization = write.convert_into(model, to, out, overwrite, trust_remote_code, width)
        told = f"saved {out} for {to}; no code was changed" if width is None else f"saved {out}, {width} bits, for {to}"
    if as_json:
        print_json(quantization)
    else:
        output.print(told)


def info(
    what: Annotated[str, typer.Argument(metavar="MODEL|SCHEME", help="A model (as for quantize), or a scheme.")],
    scheme: Annotated[
        list[str] | None,
        typer.Option("--scheme", "-s", help="Show what the model would take in this scheme; may be repeated."),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="With --scheme: tokens of the KV cache.")] = 8192,
    trust_remote_code: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Explain a scheme, or show what a model is made of.

    With --scheme: the memory that it would take, for which only its config.json is downloaded.

    \b
    Examples:
    anybit info w2a16g64asym
    anybit info smollm2-w4 --json
    anybit info Qwen/Qwen3-32B -s w4a16g128 -s w3a16g64asym-kv4
    """
    if scheme:
        schemes = [Scheme.parse(word) for word in scheme]
        from anybit.cli import memory

        found = memory.needs(what, schemes, context, trust_remote_code)
        if as_json:
            print_json({"model": what, "context": context, "schemes": found})
        else:
            memory.show(found, context)
        return
    parsed = None
    if what.strip() and not Path(what).expanduser().exists():
        try:
            parsed = Scheme.parse(what)
        except SchemeError as error:
            if "/" not in what:
                if re.match(r"\s*w\d", what):
                    raise SchemeError(f"{error}; and there is no file or folder {what!r}") from None
                raise SchemeError(
                    f"{what!r} is no scheme, such as w4a16g128, no file or folder, and no hub name, such as owner/model"
                ) from None
    if parsed is not None:
        figures = _scheme(parsed)
    elif Path(what).expanduser().is_file():
        figures = _gguf(Path(what).expanduser())
    else:
        figures = _model(what, trust_remote_code)
    if as_json:
        print_json(figures)
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        if isinstance(value, list) and any(" " in str(item) for item in value):
            lines = [line for item in value for line in _wrapped(str(item), width)]
        else:
            text = ", ".join(_by_layers(map(str, value))) if isinstance(value, list) else value
            lines = _wrapped("-" if text in (None, "") else str(text), width)
        for i, line in enumerate(lines):
            output.print(f"{'' if i else name.replace('_', ' '):<{width}}  {line}")


def _by_layers(names: Iterable[str]) -> list[str]:
    """Names, those that differ in numbers as one, with their count: a mixture keeps hundreds of layers."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\.[0-9]+(?=\.)", ".*", name), []).append(name)
    return [found[0] if len(found) == 1 else f"{pattern} ({len(found)})" for pattern, found in alike.items()]


def _wrapped(text: str, indent: int) -> list[str]:
    """A cell's text in lines that fit the terminal; as it is where there is none."""
    if not output.is_terminal:
        return [text]
    return textwrap.wrap(text, max(output.width - indent - 2, 20), break_on_hyphens=False, break_long_words=False)


_LOADED_BY = {
    "anybit": "programs that import anybit, and vLLM where anybit is installed",
    "compressed-tensors": "every program that reads compressed-tensors",
}


def _scheme(scheme: Scheme) -> dict[str, Any]:
    from anybit.checkpoints.configuration import why_not

    w, x = scheme.weights, scheme.activations
    zero = "stored per group" if w.zero is None else f"{w.zero:g}"
    group = "one scale per row" if w.group is None else f"one scale per {w.group} inputs"
    value = {"min": "scale * u + minimum"}.get(w.code, f"scale * {w.code}[u]" if w.tabled else "scale * (u - zero)")
    zero = f", zero {zero}" if w.code in CODES else ", one minimum per group" if w.code == "min" else ""
    return {
        "scheme": str(scheme),
        "weights": f"{w.bits} bits, {w.code}: {value}, u in 0..{2**w.bits - 1}{zero}",
        "scales": group,
        "sparsity": "2:4" if w.sparse else None,
        "activations": f"{x.bits} bits, {x.code}, per token" if x.quantized else "16-bit floats, not quantized",
        **_cache(scheme.kv),
        "bits_per_weight": w.bits_per_weight,
        "compressed_tensors": f"cannot express {reason}" if (reason := why_not(scheme)) else "can hold it",
    }


def _cache(kv: KVFormat | None, head_dim: int = 128) -> dict[str, str | None]:
    """A KV format's bits per element, and its capacity in vLLM relative to 16 bits."""
    if kv is None:
        return {"kv_cache": None, "kv_cache_in_vllm": None}
    from anybit.kernels.attention.kv_page import PageLayout
    from anybit.ops.kv_rows import layout

    bits = PageLayout(kv, head_dim).bits_per_element
    try:
        rows = layout(kv, head_dim)
    except LayerError as error:
        served = f"not supported: {error}"
    else:
        ratio = 4 * head_dim * _REQUEST / rows.bytes_of(_REQUEST)
        least = f"less than 16 bits from {rows.pays_from} tokens a request"
        served = f"{ratio:.2f} times the tokens of 16 bits in requests of {_REQUEST:,}; {least}"
    told = f"{kv}: {bits:.2f} bits per element (heads of {head_dim} channels, scales included)"
    return {"kv_cache": told, "kv_cache_in_vllm": served}


def _cache_room(model: Any) -> list[str] | None:
    """Tokens per GiB in vLLM for requests of 8,192 tokens, by format; None if a format cannot serve the model.

    Counts full-attention layers only: anybit does not change layers with a sliding window or a state.
    """
    from anybit.cache.kvcache import why_not
    from anybit.ops.kv_rows import layout

    formats = [KVFormat.parse(name) for name in ("kv8", "kv4", "kv2")]
    if any(why_not(model, kv) is not None for kv in formats):
        return None
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    each = heads * kinds.count("full_attention")
    if not each:
        return None
    found = [f"{2**30 // (each * 4 * dim)} in 16 bits"]
    for kv in formats:
        try:
            rows = layout(kv, dim)
        except LayerError:  # head sizes whose pages are too small for 16-bit tokens
            return None
        fit = 2**30 * _REQUEST // (each * rows.bytes_of(_REQUEST))
        found.append(f"{fit} in {kv} (less than 16 bits from {rows.pays_from} tokens a request)")
    return found


def _model(what: str, trust_remote_code: bool) -> dict[str, Any]:
    from anybit.checkpoints.configuration import method_of
    from anybit.checkpoints.expert_parts import split_experts
    from anybit.checkpoints.folder import Folder
    from anybit.checkpoints.formats.translate import FolderTranslation
    from anybit.checkpoints.source import local_folder
    from anybit.checkpoints.verify import names_in
    from anybit.layers.experts import Experts
    from anybit.models.experts import HubNames, weights_left
    from anybit.models.modules import embedding_layers, kept_modules, linear_layers, shared_heads, skeleton

    with status(f"Reading {what}"), local_folder(what, trust_remote_code) as path:
        folder = Folder(path)
        saved = folder.quantization
        foreign = FolderTranslation.of(folder)
        model = skeleton(path, trust_remote_code)
        saved = saved and saved.renamed(HubNames.of(model).own)
        if foreign is None:
            keep = kept_modules(model, None if saved is None else saved.kept)
            layers = linear_layers(model, keep)
        else:
            foreign.take_names(model)
            every = linear_layers(model, [])
            layers = [layer for layer in every if layer.name in foreign.layers]
            keep = [layer.name for layer in every if layer.name not in foreign.layers]
        embeddings = embedding_layers(model, saved.overrides) if saved else []
        schemes = foreign.layers.values() if foreign else []
        if saved:
            schemes = [saved.scheme_of(layer.name) for layer in (*layers, *embeddings)]
        weights = sum(layer.n * layer.k for layer in (*layers, *embeddings))
        names = {layer.name for layer in (*layers, *embeddings)}
        entries = split_experts(model, folder.entries)
        stored = sum(
            entries[own].bytes
            for own, name in names_in(model, entries, model.state_dict())[1].items()
            if name.rpartition(".")[0] in names and ".weight" in name
        )
        left = weights_left(model)
        stored = (stored if foreign is None else foreign.bytes) + left * folder.dtype.itemsize
        inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Experts))
        routed = [layer for layer in layers if layer.name.startswith(inside)]
        overrides = [f"{layer}={scheme}" for layer, scheme in saved.overrides.items()] if saved else []
        files = {entry.file.name for entry in folder.entries.values()}
        return {
            "model": what,
            "architecture": type(model).__name__,
            "quantization": method_of(folder.config),
            "loaded_by": saved and _LOADED_BY.get(folder.config["quantization_config"]["quant_method"]),
            "scheme": in_short(schemes),
            "overrides": overrides,
            "nested": saved.nested if saved else [],
            "bytes": folder.bytes,
            "size": megabytes(folder.bytes),
            "files": len(files),
            "tensors": len(folder.entries),
            "linear_layers": len(layers),
            "linear_weights": weights - sum(layer.n * layer.k for layer in (*embeddings, *routed)),
            "embedding_weights": sum(layer.n * layer.k for layer in embeddings) or None,
            "experts": _experts(model, saved, {layer.name for layer in layers} if saved else set()),
            "expert_weights": (sum(layer.n * layer.k for layer in routed) + left) or None,
            "bits_per_weight": round(8 * stored / (weights + left), 4) if stored else math.nan,
            "kv_tokens_per_gib": _cache_room(model),
            "kept": [name for name in keep if not saved or name not in shared_heads(model, saved.overrides)],
        }


def _experts(model: "PreTrainedModel", saved: "Quantization | None", quantized: set[str]) -> str | None:
    """How many experts a layer has, their schemes, if several, and why a GPU runs them one by one, if it does.

    quantized: names of layers.
    """
    from anybit.device import Device
    from anybit.layers.experts import Experts
    from anybit.layers.joined import why_not_joined
    from anybit.layers.linear import QuantLinear
    from anybit.models.experts import experts_of

    def layer(name: str) -> "nn.Module":
        plain: Any = model.get_submodule(name)
        if saved is None or name not in quantized:
            return plain  # type: ignore[no-any-return]
        shape, bias, ordered = (plain.in_features, plain.out_features), plain.bias is not None, saved.group_index
        return QuantLinear(*shape, saved.scheme_of(name), bias, group_index=ordered, device="meta")

    told, alone, schemes = experts_of(model), dict[str, str](), Counter[str]()
    for name, experts in model.named_modules():
        if isinstance(experts, Experts) and any(one.startswith(f"{name}.") for one in quantized):
            own = [layer(f"{name}.{number}.{each}") for number in range(len(experts)) for each in experts.names]
            schemes.update(str(each.scheme) for each in own if isinstance(each, QuantLinear))
            if (reason := why_not_joined(own, str(experts.gate), Device.named("sm_90a"))) is not None:
                alone[name] = reason
    if len(schemes) > 1:
        told = f"{told}; projections: {', '.join(f'{count} in {scheme}' for scheme, count in schemes.most_common())}"
    for reason in dict.fromkeys(alone.values()):
        first, *others = (name for name in alone if alone[name] == reason)
        more = f" and of {len(others)} more layer{'s' * (len(others) > 1)}" if others else ""
        told = f"{told}; a GPU runs those of {first}{more} one by one: {reason}"
    return told


def _gguf(file: Path) -> dict[str, Any]:
    """Figures of a GGUF file from its header alone, without importing torch or transformers: under a second."""
    from anybit.checkpoints.gguf import FLOATS, SCHEMES, matrices_of, read_gguf_header

    header = read_gguf_header(file)
    matrices, architecture = matrices_of(header), header.metadata["general.architecture"]
    layers = [kind for tensor in matrices for kind in [tensor.type] * math.prod(tensor.shape[2:])]
    total, routed = (
        sum(math.prod(tensor.shape) for tensor in matrices if len(tensor.shape) > least) for least in (1, 2)
    )
    experts, used = (header.metadata.get(f"{architecture}.expert_{part}") for part in ("count", "used_count"))
    kinds = Counter(tensor.type for tensor in header.tensors.values()).most_common()
    return {
        "model": str(file),
        "architecture": architecture,
        "quantization": "gguf",
        "scheme": in_short(SCHEMES[kind] for kind in layers if kind in SCHEMES),
        "types": ", ".join(f"{count} {kind}" for kind, count in kinds),
        "bytes": file.stat().st_size,
        "size": megabytes(file.stat().st_size),
        "files": 1,
        "tensors": len(header.tensors),
        "linear_layers": len(layers),
        "linear_weights": total - routed,
        "experts": f"{experts}, of which a token uses {used}" if experts and used else None,
        "expert_weights": routed or None,
        "bits_per_weight": round(8 * sum(tensor.bytes for tensor in matrices) / total, 4) if total else 0.0,
        "dequantized": sorted({*layers} - SCHEMES.keys() - {*FLOATS}) or None,
    }
