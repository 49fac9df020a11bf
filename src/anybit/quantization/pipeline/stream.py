"""From a model folder to a quantized model folder, one tensor at a time.

Only one source tensor and its codes are in memory at a time; a failed run leaves nothing behind.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.cache import kvcache
from anybit.checkpoints.configuration import (
    Overrides,
    Quantization,
    parse_overrides,
    refuse_quantized,
)
from anybit.checkpoints.expert_parts import split_experts, traps
from anybit.checkpoints.folder import Folder, path_of
from anybit.checkpoints.shared import shared_ignore
from anybit.checkpoints.verify import check_model, names_in
from anybit.checkpoints.writing import SHARD_BYTES, ShardWriter, check_place, new_folder, write_config
from anybit.codes.packing import QuantizedWeight
from anybit.codes.rtn import quantize_weight
from anybit.errors import CheckpointError, LayerError, OptionError, counted
from anybit.layers.embedding import embedding_refused
from anybit.layers.linear import QuantLinear
from anybit.models.experts import HubNames, warn_of_left, weights_left
from anybit.models.modules import (
    LinearLayer,
    beside_text,
    check_kept,
    check_overrides,
    embedding_layers,
    kept_modules,
    linear_layers,
    shared_heads,
    skeleton,
    tied_heads,
    untied,
)
from anybit.scheme import CODES, Scheme

Progress = Callable[[str, int, int], None]
"""Called with the layer just done, weights done, and weights in all."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody hears of."""


@dataclass(frozen=True, eq=False)
class Changes:
    """What a method changed about a model besides quantizing it.

    tensors: by the model's names, replacing the source's or new.  config: entries of config.json.
    hadamard: layers whose inputs are rotated at run time.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    hadamard: Sequence[str] = ()


QuantizeLayer = Callable[[LinearLayer, Tensor], QuantizedWeight]
"""Quantizes the weight [N, K] of a layer."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of quantizing a model.

    bytes_before, bytes_after: of all tensors.  weights: number of quantized weights, an embedding's included.
    experts: number of weights in experts that stay in 16 bits (``models.experts``).  bits_per_weight: over both.
    overrides: schemes by layer name or pattern.  beside: unquantized modules outside the language part (vision, audio).
    schemes: number of layers by scheme.
    seconds: of the whole job, calibration included.  learned: of learning, tokens and seconds; empty without it.
    """

    folder: str
    scheme: str
    method: str
    layers: int
    weights: int
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    seconds: float
    experts: int = 0
    overrides: dict[str, str] = field(default_factory=dict)
    beside: list[str] = field(default_factory=list)
    schemes: dict[str, int] = field(default_factory=dict)
    learned: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """A model to quantize: source, output, and how.

    Made by ``Job.of``, which checks everything it can before any work is done: the output path, the layers against the
    scheme, the checkpoint's tensors against the model.  overrides: per-layer schemes, by name or pattern.
    names: the model's tensor names -> the checkpoint's.  tied: quantized layers -> the parameter that they share.
    embeddings: quantized embeddings, which every method rounds to nearest.  nested: widths to slice to.
    began: start time, by ``time.perf_counter``.
    """

    source: Folder
    output: Path
    scheme: Scheme
    method: str
    model: Any
    kept: list[str]
    layers: list[LinearLayer]
    names: dict[str, str]
    overrides: Overrides = field(default_factory=Overrides)
    tied: dict[str, str] = field(default_factory=dict)
    embeddings: list[LinearLayer] = field(default_factory=list)
    nested: Sequence[int] = ()
    overwrite: bool = False
    progress: Progress = silent
    shard_bytes: int = SHARD_BYTES
    options: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(
        cls,
        source: Path | str,
        output: Path | str,
        scheme: Scheme | str,
        method: str,
        modules_to_not_convert: list[str] | None = None,
        overrides: Mapping[str, str | Scheme] | None = None,
        trust_remote_code: bool = False,
        **rest: Any,
    ) -> "Job":
        """Open and check the source. Raises CheckpointError, LayerError or SchemeError."""
        began = time.perf_counter()
        given = Quantization(Scheme.parse(scheme), modules_to_not_convert, overrides=parse_overrides(overrides))
        output = path_of(output, "the output")
        folder = Folder(source, trust_remote_code)
        check_place(output, rest.get("overwrite", False), folder.path)  # fail now, not after an hour
        refuse_quantized(folder.config, str(folder.path))
        model = skeleton(folder.path, trust_remote_code)
        warn_of_left(model)
        folder.entries = split_experts(model, folder.entries)
        given = given.renamed(HubNames.of(model).own)
        scheme, others = given.scheme, given.overrides
        check_kept(model, given.kept)
        kept = kept_modules(model, given.kept, others)
        layers = linear_layers(model, kept)
        check_overrides(model, others, [layer.name for layer in layers])
        embeddings = embedding_layers(model, others)
        for layer in embeddings:
            if refused := embedding_refused(others[layer.name]):
                raise LayerError(f"override {layer.name!r}: {refused}")
        for layer in (*layers, *embeddings):
            _check_fit(layer, others.of(layer.name) or scheme)
        if scheme.kv is not None and (reason := kvcache.why_not(model, scheme.kv)) is not None:
            raise LayerError(
                f"the KV format {scheme.kv} cannot serve this model: {reason}; leave out -{scheme.kv} to keep an "
                "unquantized KV cache"
            )
        names = _match(folder, model, [*layers, *embeddings])
        check_model(model, folder.entries, folder.path)
        tied = {name: weight for name, weight in tied_heads(model).items() if name in {layer.name for layer in layers}}
        for name in (*tied, *shared_heads(model, others)):
            names.pop(f"{name}.weight", None)  # a copy of the tied weight
        return cls(
            folder, output, scheme, method, model, kept, layers, names, others, tied, embeddings, began=began, **rest
        )

    def scheme_of(self, layer: str) -> Scheme:
        """The scheme of one layer."""
        return self.overrides.of(layer) or self.scheme

    def dtype_of(self, layer: str) -> torch.dtype:
        """The dtype in which the source stores the weight of a layer."""
        return self.source.entries[self.names[self.tied.get(layer, f"{layer}.weight")]].dtype

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of stored scales: the source weights' if that has 16 bits, else float32, as in RTN."""
        kind = self.dtype_of(self.layers[0].name)
        return kind if kind.itemsize == 2 else torch.float32


def write_quantized(job: Job, quantize: QuantizeLayer, changes: Changes | None = None) -> Saved:
    """Write a job's model: linear layers through ``quantize``, everything else unchanged but for ``changes``."""
    changes = changes or Changes()
    layers = {f"{layer.name}.weight": layer for layer in job.layers}
    embeddings = {f"{layer.name}.weight": layer for layer in job.embeddings}
    total = sum(layer.n * layer.k for layer in (*job.layers, *job.embeddings))
    done = quantized_bytes = 0
    group_index = False
    names = [f"{name}{suffix}" for name in job.names for suffix in ("", "_packed", "_scale", "_zero_point", "_shape")]
    new = [name for name in changes.tensors if name not in job.names]
    names += [*new, *(f"{name}{suffix}" for name in (*layers, *embeddings) for suffix in ("_g_idx", "_indices"))]
    names += [
        f"{name}.weight{suffix}" for name in job.tied for suffix in ("", "_packed", "_scale", "_zero_point", "_shape")
    ]
    tied = {job.tied[layer.name]: layer for layer in job.layers if layer.name in job.tied}
    stored = HubNames.of(job.model)

    def write(writer: ShardWriter, layer: LinearLayer, weight: QuantizedWeight) -> None:
        nonlocal done, quantized_bytes
        for suffix, part in QuantLinear.tensors_of(weight).items():
            writer.add(stored.hub(f"{layer.name}.{suffix}"), part)
            quantized_bytes += part.nbytes
        done += layer.n * layer.k
        job.progress(layer.name, done, total)

    with new_folder(job.output, job.overwrite, job.source.path) as folder:
        with ShardWriter(folder, map(stored.hub, names), job.shard_bytes) as writer:
            # In file order, so that the source is read sequentially.
            for name, at in sorted(job.names.items(), key=lambda item: _place(job.source, item[1])):
                tensor = job.source.read(at, finite=True)
                if name not in layers and name not in embeddings:
                    changed = changes.tensors.get(name)
                    writer.add(stored.hub(name), tensor if changed is None else changed.to(tensor.dtype).contiguous())
                layer = layers.get(name) or tied.get(name)
                if layer is None:
                    continue
                weight = _quantized(layer, tensor, quantize)
                group_index = group_index or weight.group_index is not None
                del tensor
                write(writer, layer, weight)
            for name, layer in embeddings.items():
                tensor = changes.tensors.get(name, job.source.read(job.names[name], finite=True))
                weight = quantize(layer, tensor)
                write(
                    writer, layer, weight.with_group_index() if group_index and weight.group_index is None else weight
                )
            for name in new:
                writer.add(stored.hub(name), changes.tensors[name].contiguous())
            ignore = None if group_index else _shared_ignore(job, changes)
            if ignore is None:
                for name in traps(job.model, [layer.name for layer in (*job.layers, *job.embeddings)]):
                    writer.add(stored.hub(name), torch.empty(0, dtype=torch.uint8))
        _write_companions(job, folder, group_index, changes, ignore, stored)
        after = writer.bytes
    experts = weights_left(job.model)
    return Saved(
        str(job.output),
        str(job.scheme),
        job.method,
        len(job.layers),
        total,
        job.source.bytes,
        after,
        8 * (quantized_bytes + experts * job.source.dtype.itemsize) / (total + experts),
        time.perf_counter() - job.began,
        experts,
        {layer: str(scheme) for layer, scheme in job.overrides.items()},
        beside_text(job.model),
        dict(Counter(str(job.scheme_of(layer.name)) for layer in (*job.layers, *job.embeddings)).most_common()),
    )


def run_rtn(job: Job) -> Saved:
    """Method ``rtn``. Options: device ("cpu"); search=false takes scales that cover each group's range exactly."""
    search, device = job.options.get("search", True), job.options.get("device", "cpu")
    if not isinstance(search, bool):
        raise OptionError(f"method rtn: search must be true or false, not {search!r}")
    return write_quantized(
        job, lambda layer, weight: quantize_weight(weight.to(device), job.scheme_of(layer.name).weights, search)
    )


def _quantized(layer: LinearLayer, tensor: Tensor, quantize: QuantizeLayer) -> QuantizedWeight:
    try:
        return quantize(layer, tensor.T if layer.transposed else tensor)
    except LayerError as error:
        raise LayerError(f"layer {layer.name}: {error}") from None


def _shared_ignore(job: Job, changes: Changes) -> list[str] | None:
    if job.overrides:
        return None
    quantized = [layer.name for layer in job.layers]
    return shared_ignore(job.model, job.scheme, quantized, bool(changes.hadamard))


def _write_companions(
    job: Job, folder: Path, group_index: bool, changes: Changes, ignore: list[str] | None, stored: HubNames
) -> None:
    every = [layer.name for layer in (*job.layers, *job.embeddings)]
    kept, overrides = job.kept, job.overrides.in_any_order(every)
    if stored.blocks:  # by names alone: patterns may be of the model's names
        kept = [layer.name for layer in linear_layers(job.model, []) if layer.name not in every]
        overrides = Overrides((name, found) for name in every if (found := job.overrides.of(name)) is not None)
    saved = Quantization(job.scheme, kept, group_index, [*changes.hadamard], overrides, [*job.nested])
    quantization = saved.renamed(stored.hub).entry(None if ignore is None else stored.both(ignore))
    config = {**job.source.config, **changes.config, "quantization_config": quantization}
    if job.tied:
        config |= untied(config)
    write_config(folder, config)
    job.source.copy_companions(folder)


def _check_fit(layer: LinearLayer, scheme: Scheme) -> None:
    if scheme.weights.code not in CODES:
        raise LayerError(
            f"{scheme} can only be loaded from models that other tools quantized: quantize to {', '.join(CODES)}, for "
            "example w4a16g128"
        )
    if scheme.weights.sparse and layer.k % 4:
        raise LayerError(
            f"{scheme} does not fit layer {layer.name}: 2:4 sparsity needs a multiple of 4 inputs, not {layer.k}; "
            "name it in modules_to_not_convert to keep it in 16 bits"
        )


def _place(folder: Folder, name: str) -> tuple[str, int]:
    entry = folder.entries[name]
    return entry.file.name, entry.begin


def _match(folder: Folder, model: Any, layers: list[LinearLayer]) -> dict[str, str]:
    """The model's tensor names -> the checkpoint's, which may lack the base model's prefix or have it in addition.

    Vision-language checkpoints may use module names of older transformers versions.
    """
    parameters = dict(model.state_dict())
    prefix = f"{model.base_model_prefix}."
    renamed = names_in(model, folder.entries, parameters)[1]
    names: dict[str, str] = {}
    for stored in folder.entries:
        candidates = (stored, prefix + stored, stored.removeprefix(prefix), renamed.get(stored, stored))
        name = next((candidate for candidate in candidates if candidate in parameters), stored)
        if name in names:
            raise CheckpointError(f"{folder.path}: tensor {name} appears twice, also as {stored}")
        names[name] = stored
    # ``check_model`` reports other missing tensors: transformers may convert some at load time.
    wanted = {f"{layer.name}.weight" for layer in layers}
    missing = sorted(wanted - set(names) - set(model.all_tied_weights_keys))
    if missing:
        raise CheckpointError(f"{folder.path} has no tensor {counted(missing)}, which {type(model).__name__} needs")
    for name in sorted(wanted & set(names)):
        entry = folder.entries[names[name]]
        if not (entry.dtype.is_floating_point and entry.dtype.itemsize >= 2):
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name} has dtype {entry.dtype}, which is quantized already"
            )
    return names
