"""From a model folder to a quantized model folder, one tensor at a time.

What is in memory at any moment is one tensor of the source and its codes; nothing is left behind if it fails.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit import kvcache
from anybit.checkpoints.configuration import configuration, refuse_quantized
from anybit.checkpoints.convert import shared_ignore
from anybit.checkpoints.folder import Folder, path_of
from anybit.checkpoints.safetensors import header_room
from anybit.checkpoints.verify import TRAP, check_model
from anybit.checkpoints.writing import SHARD_BYTES, ShardWriter, check_place, new_folder
from anybit.errors import CheckpointError, LayerError, OptionError
from anybit.linear import QuantLinear
from anybit.packing import QuantizedWeight
from anybit.quantization.methods.rtn import quantize_weight
from anybit.quantization.pipeline.modules import (
    LinearLayer,
    check_kept,
    kept_modules,
    linear_layers,
    skeleton,
    tied_names,
)
from anybit.scheme import CODES, Scheme

Progress = Callable[[str, int, int], None]
"""Called with the layer just done, the weights done so far, and all there are to do."""


@dataclass(frozen=True, eq=False)
class Changes:
    """What a method changed about a model besides quantizing it.

    tensors: by the model's names, in place of the source's, or new.  config: entries of config.json.
    hadamard: layers whose inputs are rotated at run time.  input_scale: ``tensors`` has one for each layer.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    hadamard: Sequence[str] = ()
    input_scale: bool = False


QuantizeLayer = Callable[[LinearLayer, Tensor], QuantizedWeight]
"""From a layer and its weight [N, K] to codes."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The result of quantizing a model.

    bytes: of all tensors.  bits_per_weight: of the quantized layers.  seconds: of the whole job, calibration included.
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


@dataclass(frozen=True, slots=True)
class Job:
    """A model to quantize: where it is, where it goes, and how.

    Made by ``Job.of``, which checks all it can before any work is done: the place to write to, the layers against the
    scheme, the tensors of the checkpoint against the model.  began: when, by ``time.perf_counter``.
    """

    source: Folder
    output: Path
    scheme: Scheme
    method: str
    model: Any
    kept: list[str]
    layers: list[LinearLayer]
    names: dict[str, str]
    overwrite: bool = False
    progress: Progress | None = None
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
        **rest: Any,
    ) -> "Job":
        """Open the source and check it. Raises CheckpointError, LayerError or SchemeError."""
        began = time.perf_counter()
        scheme = Scheme.parse(scheme)
        output = path_of(output, "the output")
        folder = Folder(source)
        check_place(output, rest.get("overwrite", False), folder.path)  # now, not after an hour
        refuse_quantized(folder.config, str(folder.path))
        model = skeleton(folder.path)
        check_kept(model, modules_to_not_convert)
        kept = kept_modules(model, modules_to_not_convert)
        layers = linear_layers(model, kept)
        for layer in layers:
            _check_fit(layer, scheme)
        if scheme.kv is not None and (reason := kvcache.why_not(model, scheme.kv)) is not None:
            raise LayerError(
                f"the KV format {scheme.kv} cannot serve this model: {reason}; leave out -{scheme.kv} to keep its keys "
                "and values as they are"
            )
        names = _match(folder, model, layers)
        check_model(model, folder.entries, folder.path)
        folder.companions()  # what may not be copied is said now, too
        return cls(folder, output, scheme, method, model, kept, layers, names, began=began, **rest)


def write_quantized(job: Job, quantize: QuantizeLayer, changes: Changes | None = None) -> Saved:
    """Write a job's model, each linear layer through ``quantize`` and everything else as it is, but for ``changes``."""
    changes = changes or Changes()
    layers = {f"{layer.name}.weight": layer for layer in job.layers}
    total = sum(layer.n * layer.k for layer in job.layers)
    done = quantized_bytes = 0
    group_index = False
    names = [f"{name}{suffix}" for name in job.names for suffix in ("", "_packed", "_scale", "_zero_point", "_shape")]
    new = [name for name in changes.tensors if name not in job.names]
    names += [*new, *(f"{name}{suffix}" for name in layers for suffix in ("_g_idx", "_indices"))]
    with new_folder(job.output, job.overwrite, job.source.path) as folder:
        with ShardWriter(folder, header_room(names), job.shard_bytes) as writer:
            # In the order of the files, so that the source is read from front to back.
            for name, stored in sorted(job.names.items(), key=lambda item: _place(job.source, item[1])):
                tensor = job.source.read(stored, finite=True)
                layer = layers.get(name)
                if layer is None:
                    changed = changes.tensors.get(name)
                    writer.add(name, tensor if changed is None else changed.to(tensor.dtype).contiguous())
                    continue
                weight = _quantized(layer, tensor, quantize)
                group_index = group_index or weight.group_index is not None
                del tensor
                for suffix, part in QuantLinear.tensors_of(weight).items():
                    writer.add(f"{layer.name}.{suffix}", part)
                    quantized_bytes += part.nbytes
                done += layer.n * layer.k
                if job.progress is not None:
                    job.progress(layer.name, done, total)
            for name in new:
                writer.add(name, changes.tensors[name].contiguous())
            ignore = None if group_index else _shared_ignore(job, changes)
            if ignore is None:
                for layer in job.layers:
                    writer.add(f"{layer.name}.{TRAP}", torch.empty(0, dtype=torch.uint8))
        _write_companions(job, folder, group_index, changes, ignore)
        after = writer.bytes
    return Saved(
        str(job.output),
        str(job.scheme),
        job.method,
        len(job.layers),
        total,
        job.source.bytes,
        after,
        8 * quantized_bytes / total,
        time.perf_counter() - job.began,
    )


def run_rtn(job: Job) -> Saved:
    """Method ``rtn``: every layer by itself, to nearest, on the setting ``device`` ("cpu").

    search=false covers the range of each group.
    """
    settings = dict(job.options)
    search, device = settings.pop("search", True), settings.pop("device", "cpu")
    if settings or not isinstance(search, bool):
        wrong = next(iter(settings), "search")
        raise OptionError(
            f"method rtn does not take {wrong}={job.options[wrong]!r}; it takes search=true or false, and a device"
        )
    return write_quantized(job, lambda layer, weight: quantize_weight(weight.to(device), job.scheme.weights, search))


def _quantized(layer: LinearLayer, tensor: Tensor, quantize: QuantizeLayer) -> QuantizedWeight:
    try:
        return quantize(layer, tensor.T if layer.transposed else tensor)
    except LayerError as error:
        raise LayerError(f"layer {layer.name}: {error}") from None


def _shared_ignore(job: Job, changes: Changes) -> list[str] | None:
    quantized = [layer.name for layer in job.layers]
    return shared_ignore(job.model, job.scheme, quantized, bool(changes.hadamard), changes.input_scale)


def _write_companions(job: Job, folder: Path, group_index: bool, changes: Changes, ignore: list[str] | None) -> None:
    hadamard = list(changes.hadamard)
    quantization = configuration(job.scheme, job.kept, group_index, hadamard, changes.input_scale, ignore)
    config = {**job.source.config, **changes.config, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in job.source.companions():
        shutil.copyfile(file, folder / file.name)


def _check_fit(layer: LinearLayer, scheme: Scheme) -> None:
    if scheme.weights.code not in CODES:
        raise LayerError(
            f"{scheme} has codes that are read from models of other tools: quantize to {', '.join(CODES)}, for example "
            "w4a16g128"
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
    """The model's names -> the checkpoint's, which may lack the prefix of the base model or carry it in addition."""
    parameters = dict(model.state_dict())
    prefix = f"{model.base_model_prefix}."
    names: dict[str, str] = {}
    for stored in folder.entries:
        candidates = (stored, prefix + stored, stored.removeprefix(prefix))
        name = next((candidate for candidate in candidates if candidate in parameters), stored)
        if name in names:
            raise CheckpointError(f"{folder.path}: tensor {name} appears twice, also as {stored}")
        names[name] = stored
    wanted = {f"{layer.name}.weight": layer for layer in layers}
    # Other tensors may be stored in another arrangement, which transformers converts while loading.
    converted = any(name not in parameters for name in names)
    missing = sorted(set(wanted if converted else parameters) - set(names) - tied_names(model))
    if missing:
        count = "" if len(missing) == 1 else f" and {len(missing) - 1} more"
        raise CheckpointError(f"{folder.path} has no tensor {missing[0]}{count}, which {type(model).__name__} needs")
    for name, stored in names.items():
        entry = folder.entries[stored]
        if name in parameters and tuple(parameters[name].shape) != entry.shape:
            raise CheckpointError(
                f"{entry.file}: tensor {stored} has shape {entry.shape}, "
                f"and {type(model).__name__} takes {tuple(parameters[name].shape)}"
            )
        if name in wanted and not (entry.dtype.is_floating_point and entry.dtype.itemsize >= 2):
            raise CheckpointError(f"{entry.file}: tensor {stored} has dtype {entry.dtype}, which is quantized already")
    return names
