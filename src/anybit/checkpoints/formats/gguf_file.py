"""Read a GGUF file with its quantization: matrices of supported block types keep their codes, others become floats.

Tensor names and row order in transformers come from transformers itself: from its name table, and from running its
tensor processors on a column of row numbers. Needs the ``gguf`` extra.
"""

import mmap
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from anybit.checkpoints.formats.gguf_blocks import BLOCKS, read_blocks, weights_in
from anybit.checkpoints.formats.translate import Translation
from anybit.checkpoints.gguf import FLOATS, GgufTensor, read_gguf_header
from anybit.checkpoints.gguf_config import FACTORS, config_of, linked_alone, tokenizer_of
from anybit.checkpoints.safetensors import Entry
from anybit.checkpoints.scratch import Scratch
from anybit.codes.packing import QuantizedWeight
from anybit.errors import CheckpointError
from anybit.layers.experts import Experts
from anybit.models.experts import unfuse
from anybit.models.families import EXPERT_NAMES
from anybit.scheme import Scheme

if TYPE_CHECKING:
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor


class NotNative(Exception):  # noqa: N818  for control flow; never reaches a user
    """Why a file's quantization cannot be kept, in a sentence."""


class GgufTranslation(Translation):
    """A GGUF file. model: transformers' model of its config, on the meta device.

    dequantized: matrix types that anybit has no codes for, which become floats.
    Raises NotNative if the file's tensors do not map to the model's, CheckpointError for a corrupt file or a missing
    tensor.
    """

    name = "gguf"

    def __init__(self, file: Path, model: PreTrainedModel) -> None:
        super().__init__()
        self.path = file
        header = read_gguf_header(file)
        self._start, architecture = header.start, str(header.metadata["general.architecture"])
        self._processor, names = names_of(architecture, model)
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in header.tensors.values():
            if tensor.name in FACTORS:
                continue
            found = names.get(tensor.name)
            if found is None or len(tensor.shape) > (2 if len(found) == 1 else 3):
                raise NotNative(f"its tensor {tensor.name} does not stand for tensors of {type(model).__name__}")
            if len(found) > 1 and tensor.shape[-1:] != (len(found),):
                shape = tensor.shape[::-1]
                raise CheckpointError(f"{file}: {tensor.name} of shape {shape} does not hold the {len(found)} experts")
            self._tensors |= zip(found, _parts(tensor, len(found)), strict=True)
        self._rows: dict[str, Tensor | None] = {}
        self.layers, self.dequantized = {}, set()
        modules = dict(model.named_modules())
        for name, tensor in self._tensors.items():
            layer, _, part = name.rpartition(".")
            if part != "weight" or not isinstance(modules.get(layer), (nn.Linear, Conv1D)) or len(tensor.shape) != 2:
                continue
            if tensor.type in BLOCKS:
                self.layers[layer] = Scheme(weights_in(tensor.type))
                transposed = isinstance(modules[layer], Conv1D)
                alone = len(names[tensor.name]) == 1  # rows of experts are in order
                rows = row_order(self._processor, tensor.name, tensor.shape[1], transposed) if alone else None
                self._rows[layer] = rows
            elif tensor.type not in FLOATS:
                self.dequantized.add(tensor.type)
        self.plain = [name for name in self._tensors if name.removesuffix(".weight") not in self.layers]
        self.bytes = sum(self._tensors[f"{layer}.weight"].bytes for layer in self.layers)

    def _read(self, name: str) -> QuantizedWeight:
        tensor, rows = self._tensors[f"{name}.weight"], self._rows[name]
        k, n = tensor.shape
        try:
            weight = read_blocks(torch.from_numpy(self._data(tensor)), tensor.type, (n, k))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: tensor {tensor.name}: {error}") from None
        return weight if rows is None else weight.rows(rows)

    def rename(self, to: Callable[[str], str]) -> None:
        """Take other names of tensors and layers than the model's."""
        self._tensors = {to(name): tensor for name, tensor in self._tensors.items()}
        self._rows = {to(name): rows for name, rows in self._rows.items()}
        self._shapes = {to(name): shape for name, shape in self._shapes.items()}
        self.layers = {to(name): scheme for name, scheme in self.layers.items()}
        self.plain = [*map(to, self.plain)]

    def entry(self, name: str, wanted: dict[str, Tensor]) -> Entry:
        """What the model takes, but with the file's shape, unless that is only transposed."""
        shape, theirs = self._tensors[name].shape[::-1], super().entry(name, wanted)
        sizes = (sorted(size for size in each if size > 1) for each in (shape, theirs.shape))
        return theirs if next(sizes) == next(sizes) else replace(theirs, shape=shape)

    def read_plain(self, name: str) -> Tensor:
        """Read one tensor that is not quantized, or of an unsupported type, as float32."""
        import gguf

        tensor = self._tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        rows = self._data(tensor).reshape(*tensor.shape[1:][::-1], -1)
        values = gguf.dequantize(rows, kind).astype(np.float32).reshape(tensor.shape[::-1])
        done = self._processor.process(weights=values, name=tensor.name, tensor_key_mapping={}, parsed_parameters={})
        found = torch.from_numpy(np.array(done.weights, dtype=np.float32))
        if not bool(torch.isfinite(found).all()):
            raise CheckpointError(f"{self.path}: tensor {tensor.name} has a value that is not finite")
        return found

    def _data(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """A copy of the bytes of a tensor."""
        size, begin = tensor.bytes, self._start + tensor.begin
        with self.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if begin + size > len(data):
                raise CheckpointError(f"{self.path} is cut off: tensor {tensor.name} ends at byte {begin + size}")
            return np.frombuffer(data[begin : begin + size], dtype=np.uint8).copy()


def row_order(processor: "TensorProcessor", name: str, count: int, transposed: bool) -> Tensor | None:
    """The file's row for each row of the model's matrix, int64 [N]; None for the same order. transposed: a Conv1D.

    Raises NotNative if transformers does anything but permute rows.
    """
    numbers = np.arange(count, dtype=np.float64)[:, None]
    try:
        done = processor.process(weights=numbers, name=name, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
    except ValueError as error:  # it needs the whole matrix
        raise NotNative(f"transformers rearranges its tensor {name}: {error}") from None
    found = done.weights
    if found.shape == numbers.T.shape and transposed:
        found = found.T
    if done.name != name or found.shape != numbers.shape:
        raise NotNative(f"transformers rearranges its tensor {name}")
    rows = torch.from_numpy(found[:, 0].astype(np.int64))
    if not torch.equal(rows.sort().values, torch.arange(rows.numel())):
        raise NotNative(f"transformers computes other values from its tensor {name}")
    return None if torch.equal(rows, torch.arange(rows.numel())) else rows


def open_gguf(file: Path) -> tuple[GgufTranslation, PreTrainedTokenizerBase, PreTrainedModel]:
    """(translation, tokenizer, model on the meta device) of a file. Raises CheckpointError for a corrupt file."""
    header = read_gguf_header(file)
    with Scratch(Path(tempfile.gettempdir())) as alone, linked_alone(file, alone):
        config = config_of(alone, file, header)
        tokenizer = tokenizer_of(alone, file.name, header)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        unfuse(empty)
    return GgufTranslation(file, empty), tokenizer, empty


def _parts(tensor: GgufTensor, count: int) -> list[GgufTensor]:
    """The tensors of ``count`` experts that a file stores as one, in order."""
    if count == 1:
        return [tensor]
    size = tensor.bytes // count
    return [replace(tensor, shape=tensor.shape[:-1], begin=tensor.begin + i * size) for i in range(count)]


def names_of(architecture: str, model: PreTrainedModel) -> tuple["TensorProcessor", dict[str, list[str]]]:
    """Transformers' tensor processor for an architecture, and file tensor names -> the model's: one, or an expert's."""
    import gguf
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    known = next((arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if known is None:
        raise NotNative(f"gguf does not know the architecture {architecture}")
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    table = gguf.get_tensor_name_map(known, model.config.get_text_config(decoder=True).num_hidden_layers)
    names: dict[str, list[str]] = {}
    joined = dict(_joined(model))
    for name in model.state_dict():
        stem, dot, part = joined.get(name, name).rpartition(".")
        if part.endswith("_bias"):  # the router's e_score_correction_bias
            stem, part = name.removesuffix("_bias"), "bias"
        elif part not in ("weight", "bias"):
            stem, dot, part = name, "", ""
        # Files written from a base model lack the prefix; the table knows mixtures by older names.
        bare, older = stem.removeprefix(f"{model.base_model_prefix}."), stem.replace(".mlp.", ".block_sparse_moe.")
        for known_as in (stem, bare, older):
            found = table.get_name(known_as)
            if found is not None:
                names.setdefault(f"{found}{dot}{part}", []).append(name)
                break
    return processor, names


def _joined(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """(name of an expert's tensor, name of that of all), as gguf's table knows it: "experts.up_proj.weight"."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            known_as = dict(zip(module.names, EXPERT_NAMES, strict=True))
            for own, _ in module.named_parameters():
                _, layer, part = own.split(".")
                yield f"{name}.{own}", f"{name}.{known_as[layer]}.{part}"
