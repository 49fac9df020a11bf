"""Models that other tools quantized, inside vLLM: its loader gets what ``convert --to anybit`` would write.

vLLM asks its loader for a checkpoint's tensors. Of such a model it is handed those that anybit saves, each made out of
the files when it is due and never written down, so that fused layers, ranks and heads go the way of anybit's own
folders, and no format is named here.
"""

import copy
import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from anybit.checkpoints.configuration import METHOD, method_of
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats.gguf_file import GgufTranslation
from anybit.checkpoints.formats.translate import FolderTranslation, Translation
from anybit.errors import CheckpointError, OptionError
from anybit.quantization.pipeline.modules import skeleton

OF_FILES = ("auto", "hf", "safetensors", "fastsafetensors")
"""vLLM's formats of loading that read a folder's safetensors."""
DUMMY = "dummy"
_AT_ONCE = 8
"""How many layers are read at once: vLLM leaves each of its processes one thread."""


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no other weights, as ``anybit serve FILE`` makes one; None for any other."""
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return None
    files = list(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


class Source:
    """A model that another tool has quantized. A process opens its files once, for its layers and its tensors."""

    def __init__(self, folder: Path, trusted: bool) -> None:
        self.folder, self._trusted = folder, trusted
        self._checked = False
        self._opened: Translation | None = None

    def opened(self) -> Translation:
        """Its layers and tensors, checked against transformers' model; names are those of its files, which vLLM knows.

        Raises CheckpointError, naming the layer or tensor, for one that cannot be read.
        """
        if self._opened is None:
            self._opened, self._checked = self._open(), True
        return self._opened

    def taken(self) -> Translation:
        """The same, and forgotten: a loader reads tensors once, and holds them no longer than it must."""
        found, self._opened = self.opened(), None
        return found

    def _open(self) -> Translation:
        file = gguf_in(self.folder)
        if file is not None:
            empty = skeleton(self.folder, self._trusted)
            source = GgufTranslation(file, empty)
            source.check(empty)
            return source
        model = Folder(self.folder, self._trusted)
        found = FolderTranslation.of(model)
        if found is None:
            raise CheckpointError(
                f"{self.folder} is quantized by {method_of(model.config)}, which anybit does not read: leave out "
                "--quantization anybit, and vLLM's own kernels run it"
            )
        if not self._checked:
            copy.copy(found).check(skeleton(self.folder, self._trusted))  # which takes the model's names
        return found

    def __getstate__(self) -> dict[str, Any]:
        """An engine's process opens the files itself, and need not check again what this one has."""
        return {**self.__dict__, "_opened": None}


_streamed: dict[str, Source] = {}
"""By the name that an engine has for a model. Another engine of the process may run it by vLLM's own kernels."""


def note(source: Source) -> None:
    """Have the tensors of the model that is being built come from a source. OptionError for a loader of other files."""
    config = get_current_vllm_config()
    form = str(config.load_config.load_format)
    if form not in (*OF_FILES, DUMMY):
        raise OptionError(
            f"--load-format {form} reads tensors as they are stored, and those of {source.folder} are read by anybit: "
            "leave it out, or convert the model first, `anybit convert FOLDER --to anybit -o OUT`"
        )
    if config.model_config is not None:
        _streamed[config.model_config.model] = source


def tensors_of(source: Translation, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that anybit would save of a model, scales and minima in ``dtype``, each read when it is due."""
    for name in source.plain:
        yield name, source.read_plain(name)
    names = list(source.layers)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            for name, tensors in zip(some, pool.map(lambda name: source.tensors(name, dtype), some), strict=True):
                yield from ((f"{name}.{part}", tensor) for part, tensor in tensors.items())


def install() -> None:
    """Have vLLM's loader ask here first."""
    stored = DefaultModelLoader.get_all_weights
    if hasattr(stored, "__wrapped__"):
        return

    @functools.wraps(stored)
    def get_all_weights(self: Any, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        if model_config.quantization != METHOD or model_config.model not in _streamed:
            return stored(self, model_config, model)  # type: ignore[no-any-return]
        self.counter_before_loading_weights = time.perf_counter()
        return tensors_of(_streamed[model_config.model].taken(), model_config.dtype)

    DefaultModelLoader.get_all_weights = get_all_weights
