"""Models quantized by other tools, in vLLM: convert them to anybit's format on the fly, while they are loaded.

vLLM's loader iterates over a checkpoint's tensors. Here it gets the tensors that ``convert --to anybit`` would write,
each converted when it is needed, so fused layers, ranks and heads load as from anybit's own folders, whatever the
format.
"""

import copy
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from anybit.checkpoints.configuration import METHOD, method_of
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats.gguf_file import GgufTranslation
from anybit.checkpoints.formats.translate import FolderTranslation, Translation
from anybit.errors import CheckpointError, OptionError
from anybit.models.experts import HubNames
from anybit.models.modules import skeleton

OF_FILES = ("auto", "hf", "safetensors", "fastsafetensors")
"""Values of --load-format that read a folder's safetensors."""
DUMMY = "dummy"
_AT_ONCE = 8
"""Layers read in parallel: vLLM limits torch to one thread per process."""


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder with no other weights (``anybit serve FILE`` makes such folders); otherwise None."""
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return None
    files = list(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


class Source:
    """A model quantized by another tool. Each process opens its files once, for layer names and for tensors."""

    def __init__(self, folder: Path, trusted: bool) -> None:
        self.folder, self._trusted = folder, trusted
        self._checked = False

    @functools.cached_property
    def opened(self) -> Translation:
        """Its layers and tensors, checked against transformers' model, by the names in its files (as vLLM expects).

        Raises CheckpointError, naming the layer or tensor.
        """
        if (file := gguf_in(self.folder)) is not None:
            empty = skeleton(self.folder, self._trusted)
            source = GgufTranslation(file, empty)
            source.check(empty)
            source.rename(HubNames.of(empty).hub)
            return source
        model = Folder(self.folder, self._trusted)
        found = FolderTranslation.of(model)
        if found is None:
            raise CheckpointError(
                f"{self.folder} is quantized by {method_of(model.config)}, which anybit does not read: leave out "
                "--quantization anybit, and vLLM's own kernels run it"
            )
        if not self._checked:
            copy.copy(found).check(skeleton(self.folder, self._trusted))  # on a copy: ``check`` renames the layers
            self._checked = True
        return found

    def taken(self) -> Translation:
        """``opened``, without keeping a reference: tensors are read once and should not be held longer."""
        found = self.opened
        del self.opened
        return found

    def __getstate__(self) -> dict[str, object]:
        """Without the open files: the engine's process opens them itself, but need not check them again."""
        return {name: value for name, value in self.__dict__.items() if name != "opened"}


_streamed: dict[str, Source] = {}
"""By vLLM's model name. An entry alone does not decide: another engine may run that model on vLLM's kernels."""

_checks: list[Callable[[nn.Module], None]] = []
"""Of the model that was built last, before its tensors are read."""


def check_with(check: Callable[[nn.Module], None]) -> None:
    """Call ``check`` with the model being built, once it is whole."""
    _checks[:] = [check]


def note(source: Source) -> None:
    """Load the model being built from ``source``. Raises OptionError for a --load-format that cannot."""
    config = get_current_vllm_config()
    form = str(config.load_config.load_format)
    if form not in (*OF_FILES, DUMMY):
        raise OptionError(
            f"--load-format {form} cannot load {source.folder}, which anybit converts while loading: leave it out, "
            "or convert the model first, `anybit convert FOLDER --to anybit -o OUT`"
        )
    if config.model_config is not None:
        _streamed[config.model_config.model] = source


def tensors_of(source: Translation, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that anybit would save of a model, scales and minima in ``dtype``, read on demand."""
    for name in source.plain:
        yield name, source.read_plain(name)
    names = list(source.layers)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            for name, tensors in zip(some, pool.map(lambda name: source.tensors(name, dtype), some), strict=True):
                yield from ((f"{name}.{part}", tensor) for part, tensor in tensors.items())


def install() -> None:
    """Patch vLLM's loader to take tensors from a ``Source`` if there is one; idempotent."""
    stored = DefaultModelLoader.get_all_weights
    if hasattr(stored, "__wrapped__"):
        return

    @functools.wraps(stored)
    def get_all_weights(
        self: DefaultModelLoader, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[tuple[str, Tensor]]:
        if model_config.quantization == METHOD:
            while _checks:
                _checks.pop()(model)
        if model_config.quantization != METHOD or model_config.model not in _streamed:
            return stored(self, model_config, model)  # type: ignore[no-any-return]
        self.counter_before_loading_weights = time.perf_counter()
        return tensors_of(_streamed[model_config.model].taken(), model_config.dtype)

    DefaultModelLoader.get_all_weights = get_all_weights
