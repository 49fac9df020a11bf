"""Quantized models, of other tools and anybit's own, as schemes and tensors of their layers.

Layers are converted lazily, one at a time: loading, saving and ``info`` all read from here.
"""

import copy
import re
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from anybit.checkpoints.configuration import METHOD, Overrides, Quantization
from anybit.checkpoints.expert_parts import split_codes
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats import format_of
from anybit.checkpoints.formats.stored import Format, Opened, StoredLayer, ordered
from anybit.checkpoints.safetensors import Entry
from anybit.checkpoints.slicing import read_layer
from anybit.checkpoints.verify import check_model, names_in
from anybit.codes.packing import QuantizedWeight
from anybit.errors import AnyBitError, CheckpointError, ConversionError, LayerError, one_line
from anybit.layers.linear import PARTS, QuantLinear
from anybit.scheme import Scheme

Answer = TypeVar("Answer")

_RECENT = 2
"""Layers cached: threads that load a model work on two at most."""
_KV_SCALE = re.compile(r"\.(self_attn|attn|attention)\.(\w+_proj\.)?(attn\.)?((k|v|kv|q|prob)_scale|output_scale)$")
"""Scales for a KV cache (or queries) that the file's own server quantizes to 8 bits."""


class Translation(ABC):
    """A quantized model.

    name: of the format.  path: of the folder or file.  layers: the scheme of every quantized layer.
    plain: names of all other tensors.  bytes: stored for the quantized layers, scales included.
    group_index: whether any layer has an activation order; then all layers get a ``group_index``.
    kv_scales: tensors for a quantized KV cache, which are ignored.
    """

    name: str
    path: Path
    layers: dict[str, Scheme]
    plain: list[str]
    bytes: int
    group_index = False
    kv_scales: Sequence[str] = ()

    def __init__(self) -> None:
        self._recent: dict[str, dict[str, Tensor]] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def read(self, name: str) -> QuantizedWeight:
        """Read a quantized layer. Raises CheckpointError if it is corrupt, or not of the shape that ``check`` saw."""
        weight, format = self._read(name), self.layers[name].weights
        shape = self._shapes.get(name, weight.shape)
        if (weight.shape, weight.format) != (shape, format):
            raise CheckpointError(
                f"layer {name} has shape {weight.shape} in {weight.format}, and the model takes {shape} in {format}"
            )
        return weight

    @abstractmethod
    def _read(self, name: str) -> QuantizedWeight:
        """Read a quantized layer, without checking its shape."""

    @abstractmethod
    def read_plain(self, name: str) -> Tensor:
        """Read one unquantized tensor."""

    @property
    def scheme(self) -> Scheme:
        """The scheme of most layers."""
        return Counter(self.layers.values()).most_common(1)[0][0]

    def check(self, model: PreTrainedModel) -> None:
        """Check names, shapes and dtypes of the tensors against transformers' unquantized model on the meta device.

        Drops all-zero biases that it does not have. Raises CheckpointError, naming the tensor, also for a quantized
        layer that is not a linear layer of the model.
        """
        self.take_names(model)
        linears = linear_shapes(model)
        strangers = sorted(set(self.layers) - set(linears))
        if strangers:
            raise CheckpointError(
                f"{self.path}: layer {strangers[0]} is quantized, and {type(model).__name__} has no such linear layer"
            )
        self._shapes = linears
        wanted = model.state_dict()
        surplus = {f"{layer}.bias" for layer in self.layers} & set(self.plain) - wanted.keys()
        zero = {name for name in surplus if not bool(self.read_plain(name).any())}  # GPTQ tools add one to every layer
        self.plain = [name for name in self.plain if name not in zero]
        entries = {name: self.entry(name, wanted) for name in self.plain}
        weights = [f"{layer}.weight" for layer in self.layers]
        check_model(model, entries | {name: self._as_wanted(name, wanted) for name in weights}, self.path)

    def entry(self, name: str, wanted: dict[str, Tensor]) -> Entry:
        """The header of an unquantized tensor; by default what the model takes. wanted: the model's tensors."""
        return self._as_wanted(name, wanted)

    def _as_wanted(self, name: str, wanted: dict[str, Tensor]) -> Entry:
        return Entry(name, self.path, wanted[name].dtype, tuple(wanted[name].shape), 0, 0)

    def kept(self, model: PreTrainedModel) -> list[str]:
        """The linear layers of a model that are not quantized."""
        return sorted(set(linear_shapes(model)) - set(self.layers))

    def quantization(self, model: PreTrainedModel) -> Quantization:
        """How the model is quantized, as anybit would save it."""
        most = self.scheme
        others = Overrides((name, scheme) for name, scheme in self.layers.items() if scheme != most)
        return Quantization(most, self.kept(model), self.group_index, overrides=others)

    def state_dict(self, model: PreTrainedModel, dtype: torch.dtype) -> "dict[str, LazyTensor]":
        """All tensors, lazily, by the names of a model on the meta device with its quantized layers in place.

        dtype: of floats, including scales and minima.
        """
        found = {name: LazyTensor(partial(self.read_plain, name)) for name in self.plain}
        for name in self.layers:
            for part, parameter in model.get_submodule(name).named_parameters(recurse=False):
                if part.startswith("weight_"):
                    found[f"{name}.{part}"] = LazyTensor(partial(self.part, name, part, dtype), parameter)
        return found

    def take_names(self, model: PreTrainedModel) -> None:  # noqa: B027  most files use the model's names
        """Rename tensors from those of older transformers versions to the model's."""

    def tensors(self, layer: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """A layer's tensors as QuantLinear stores them, with scales and minima in ``dtype``."""
        try:
            return QuantLinear.tensors_of(self.read(layer).with_scales(dtype))
        except LayerError as error:
            raise CheckpointError(f"layer {layer}: {error}") from None

    def part(self, layer: str, part: str, dtype: torch.dtype) -> Tensor:
        """One of these tensors; the layer is cached, since its other parts are read next."""
        with self._lock:
            if layer not in self._recent:
                tensors = self.tensors(layer, dtype)
                while len(self._recent) >= _RECENT:
                    del self._recent[next(iter(self._recent))]
                self._recent[layer] = tensors
            return self._recent[layer][part]


class FolderTranslation(Translation):
    """A model folder. Raises CheckpointError, naming the layer, for what cannot be read.

    group_index: whether all layers have one; None: if any has an activation order.
    """

    def __init__(self, folder: Folder, format: Format, group_index: bool | None = None) -> None:
        super().__init__()
        self.name, self.path, self._format = format.name, folder.path, format
        self._folder = folder = copy.copy(folder)
        folder.entries = split_codes(folder.entries)
        marked = {
            name.removesuffix(f".{mark}")
            for mark in format.marks
            for name in folder.entries
            if name.endswith(f".{mark}")
        }
        if not marked:
            marks = " or ".join(format.marks)
            raise CheckpointError(f"{folder.path} is quantized by {self.name}, and has no tensor *.{marks}")
        config = folder.config["quantization_config"]
        self._stored = {name: StoredLayer(folder.entries, folder.read, name, config) for name in sorted(marked)}
        self.layers = {name: _guarded(format.open, layer)[0] for name, layer in self._stored.items()}
        anywhere = (_guarded(ordered, layer) for layer in self._stored.values())
        self.group_index = any(anywhere) if group_index is None else group_index
        own = {f"{name}.{suffix}" for name in self.layers for suffix in format.tensors}
        others = [name for name in folder.entries if name not in own]
        self.kv_scales = sorted(filter(_KV_SCALE.search, others))
        self._plain = {name: name for name in others if not _KV_SCALE.search(name)}
        self.plain = [*self._plain]
        self.bytes = sum(entry.bytes for name, entry in folder.entries.items() if name in own)

    @classmethod
    def of(cls, folder: Folder) -> "FolderTranslation | None":
        """The translation of a folder of another tool, in a supported format; None for any other."""
        format = None if folder.quantization is not None else format_of(folder.config)
        return None if format is None else cls(folder, format)

    @classmethod
    def of_own(cls, folder: Folder) -> "FolderTranslation":
        """That of a folder that anybit wrote. Raises ConversionError if layers' inputs are rotated."""
        found, folder = folder.quantization, copy.copy(folder)
        assert found is not None
        if found.hadamard:
            raise ConversionError(f"{folder.path} has layers with rotated inputs (hadamard), which no other format has")
        folder.entries = {name: entry for name, entry in folder.entries.items() if entry.bytes}  # without traps

        def opened(layer: StoredLayer) -> Opened:
            scheme = found.scheme_of(layer.name)
            return scheme, lambda: read_layer(folder, layer.name, scheme.weights)

        return cls(folder, Format(METHOD, ("weight_packed",), PARTS, lambda _: True, opened), found.group_index)

    def read_plain(self, name: str) -> Tensor:
        """Read one unquantized tensor."""
        return self._folder.read(self._plain[name], finite=True)

    def entry(self, name: str, wanted: dict[str, Tensor]) -> Entry:
        """The tensor's header in its file."""
        return self._folder.entries[self._plain[name]]

    def take_names(self, model: PreTrainedModel) -> None:
        """Rename tensors from those of older transformers versions, and of the hub, to the model's."""
        wanted = model.state_dict()
        weights = {f"{name}.weight": name for name in self._stored}
        found = names_in(model, [*weights, *self._plain], wanted)[1]
        renamed = {stored: name for stored, name in found.items() if name in wanted and stored not in wanted}
        layers = {name: renamed.get(weight, weight).removesuffix(".weight") for weight, name in weights.items()}
        self._stored = {layers[name]: layer for name, layer in self._stored.items()}
        self.layers = {layers[name]: scheme for name, scheme in self.layers.items()}
        self._plain = {renamed.get(name, name): stored for name, stored in self._plain.items()}
        self.plain = [*self._plain]

    def _read(self, name: str) -> QuantizedWeight:
        layer = self._stored[name]
        weight = _guarded(lambda layer: self._format.open(layer)[1](), layer)
        if self.group_index and weight.group_index is None:
            return weight.with_group_index()
        if not self.group_index and weight.group_index is not None:
            raise layer.refuse("its groups of inputs (g_idx) are of different sizes")
        return weight


def _guarded(question: Callable[[StoredLayer], Answer], layer: StoredLayer) -> Answer:
    """Ask a format about a layer; whatever damaged tensors make it raise becomes a CheckpointError."""
    try:
        return question(layer)
    except (AnyBitError, MemoryError):
        raise
    except Exception as error:
        raise layer.refuse(f"its tensors or settings contradict each other: {one_line(error)}") from error


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear layers of a transformers model, by name."""
    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            n, k = module.weight.T.shape if isinstance(module, Conv1D) else module.weight.shape
            shapes[name] = n, k
    return shapes


class LazyTensor:
    """A tensor that is read on indexing, with the interface of a safetensors slice. like: on the meta device."""

    def __init__(self, read: Callable[[], Tensor], like: Tensor | None = None) -> None:
        self._read, self._like = read, like

    def __getitem__(self, index: EllipsisType | slice) -> Tensor:
        return self._read()[index]

    def get_dtype(self) -> str:
        """Its safetensors dtype: F32 for floats, which are cast to the model's dtype, else I32."""
        return "F32" if self._like is None or self._like.is_floating_point() else "I32"

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list((self._read() if self._like is None else self._like).shape)
