"""A model whose blocks are read from its folder when they are needed, so that memory holds one of them at a time."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.pytorch_utils import Conv1D

from anybit.errors import CalibrationError, CheckpointError
from anybit.models.blocks import find_blocks
from anybit.models.experts import conversions
from anybit.models.modules import skeleton, without_rescaling
from anybit.quantization.pipeline.stream import Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LazyModel:
    """A model in float32, whose blocks are in its folder until ``whole`` is asked for.

    model: parameters of its blocks are on the meta device, and all others in memory.  prefix, blocks: as
    ``find_blocks`` says; a model without blocks is in memory.  read: the stored tensor of a parameter.
    """

    def __init__(self, model: "PreTrainedModel", read: Callable[[Tensor], Tensor] = Tensor.detach) -> None:
        self.model, self._read = model, read
        try:
            self.prefix, self.blocks = find_blocks(model)
        except CalibrationError:
            self.prefix, self.blocks = "", nn.ModuleList()

    @classmethod
    def of(cls, job: Job, device: torch.device | str = "cpu") -> "LazyModel":
        """The model of a job, with all but its blocks on a device. Raises CheckpointError for what cannot be read."""
        folder, names = job.source, job.names
        model = skeleton(folder.path, folder.trust_remote_code, buffers=True).eval().requires_grad_(False)
        without_rescaling(model)
        places: dict[Tensor, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in names:
                places.setdefault(parameter, names[name])
        for name, buffer in model.named_buffers():
            if name in names:
                buffer.copy_(folder.read(names[name]))
            buffer.data = buffer.to(device)
        known = model.state_dict()
        others = {stored: folder.read(stored) for name, stored in names.items() if name not in known}
        if others and not places.keys() >= set(model.parameters()):
            transforms = conversions(model, get_model_conversion_mapping(model))
            config = LoadStateDictConfig(weight_mapping=transforms, dtype=torch.float32, device_map={"": device})
            convert_and_load_state_dict_in_model(model, others, config)
        for name, parameter in model.named_parameters():
            if parameter.is_meta and parameter not in places:
                raise CheckpointError(
                    f"{folder.path} has no tensor for {name} of {type(model).__name__}: use method rtn"
                )
        lazy = cls(model, lambda parameter: folder.read(places[parameter]))
        inside = set(lazy.blocks.parameters())
        lazy._load((parameter for parameter in model.parameters() if parameter not in inside), device)
        return lazy

    def whole(self) -> "PreTrainedModel":
        """The model with all its weights in memory, from now on."""
        self._load(self.model.parameters(), "cpu")
        return self.model

    def block(self, index: int, device: torch.device | str) -> nn.Module:
        """A copy of a block on a device, with its weights."""
        block = self.blocks[index]
        memo: dict[int, Any] = {id(p): self._loaded(p, device) for p in block.parameters() if p.is_meta}
        copied = copy.deepcopy(block, memo).to(device).requires_grad_(False)
        copied.__dict__.pop("forward", None)  # that of ``running``
        return copied

    def weight(self, layer: str) -> Tensor:
        """The weight of a linear layer [N, K], or of an embedding."""
        module = self.model.get_submodule(layer)
        own = self._value(module.get_parameter("weight"))
        return own.T if isinstance(module, Conv1D) else own

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters by name, each read when its turn comes."""
        for name, parameter in self.model.named_parameters():
            yield name, self._value(parameter)

    @contextmanager
    def running(self, device: torch.device | str) -> Iterator["PreTrainedModel"]:
        """A context in which the model runs, forward and backward, as if it were in memory.

        Each block is read when it runs, and again for its gradients. Hooks of its modules are those of the model.
        """

        def run(index: int, *args: Any, **kwargs: Any) -> Any:
            return self.block(index, device)(*args, **kwargs)

        for index, block in enumerate(self.blocks):
            block.forward = partial(checkpoint, run, index, use_reentrant=False, preserve_rng_state=False)
        try:
            yield self.model
        finally:
            for block in self.blocks:
                del block.forward

    def _load(self, parameters: Iterable[nn.Parameter], device: torch.device | str) -> None:
        for parameter in [each for each in parameters if each.is_meta]:
            torch.utils.swap_tensors(parameter, self._loaded(parameter, device))

    def _loaded(self, parameter: Tensor, device: torch.device | str) -> nn.Parameter:
        # A copy, which keeps no file open; converted there, not here.
        return nn.Parameter(self._read(parameter).to(device, copy=True).float(), requires_grad=False)

    def _value(self, parameter: Tensor) -> Tensor:
        return self._loaded(parameter, "cpu").data if parameter.is_meta else parameter.detach()
