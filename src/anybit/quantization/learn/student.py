"""The student: a model whose layers read learnable weights, and round activations, keys and values as at inference."""

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from anybit.codes import hadamard
from anybit.models.modules import tied_heads
from anybit.quantization.learn.rounding import Hook, Rotation, Shared, keys_and_values_through, rounded_through
from anybit.quantization.methods.rotate import rotate_input
from anybit.scheme import ActivationFormat, KVFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Attend = Callable[..., tuple[Tensor, Tensor | None]]
"""transformers' interface of attention."""
Model = TypeVar("Model", bound=nn.Module)


class GivenLinear(nn.Module):
    """A linear layer over a given weight tensor, [N, K], that is not a parameter."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.given, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Y = x W^T + bias, in the weight's dtype."""
        kind = self.given.dtype
        return nn.functional.linear(x.to(kind), self.given, None if self.bias is None else self.bias.to(kind))


class GivenEmbedding(nn.Module):
    """An embedding over a given weight tensor, [tokens, K]; rows are returned in float32."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.given = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The rows of token ids."""
        return nn.functional.embedding(tokens, self.given).float()


def placed(model: Model, device: torch.device, linear: torch.dtype | None = None) -> Model:
    """A copy of a model, or of a block, on a device that shares the tensors that are there already.

    linear: the dtype of linear layers' weights, if not their own.
    """
    embedding = None if linear is None else model.get_input_embeddings().weight  # type: ignore[operator]
    layers = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))}
    memo: dict[int, object] = {id(buffer): buffer.to(device) for buffer in model.buffers()}
    for parameter in model.parameters():
        kind = linear if id(parameter) in layers and parameter is not embedding else None
        memo[id(parameter)] = nn.Parameter(parameter.detach().to(device, kind or parameter.dtype), requires_grad=False)
    return copy.deepcopy(model, memo)


def student_of(
    teacher: Model, leaves: Mapping[str, Tensor], activations: Callable[[str], ActivationFormat], kv: KVFormat | None
) -> Model:
    """A copy of a model, or of a block, that reads ``leaves``, weights by layer name, and shares everything else.

    activations: the format of a layer's input.  kv: of keys and values; those of kvfp4 are not rounded.
    """
    student = placed(teacher, next(teacher.parameters()).device)
    rounding: dict[ActivationFormat, Hook] = {}
    rotations: dict[int, Hook] = {}
    shared: dict[object, Shared] = {}
    for name, leaf in leaves.items():
        module = teacher.get_submodule(name)
        if isinstance(module, nn.Embedding):
            student.set_submodule(name, GivenEmbedding(leaf), strict=False)
            for head, source in tied_heads(teacher).items():
                if source == f"{name}.weight" and head not in leaves:
                    student.set_submodule(head, GivenLinear(leaf, None), strict=False)
            continue
        bias = getattr(module, "bias", None)
        layer = GivenLinear(leaf, None if bias is None else bias.detach())
        # Hooks transform the input, such as an online rotation; neighbours with the same input share the result.
        hooks: list[Hook] = list(module._forward_pre_hooks.values())
        size = leaf.shape[1]
        if rotate_input in hooks and size <= hadamard.MOST_DENSE:
            if size not in rotations:
                rotations[size] = Rotation(size, leaf.device, leaf.dtype)
            hooks[hooks.index(rotate_input)] = rotations[size]
        format = activations(name)
        if format.quantized:
            hooks.append(rounding.setdefault(format, rounded_through(format)))
        if hooks:
            key = (name.rpartition(".")[0], *map(id, hooks))
            layer.register_forward_pre_hook(shared.setdefault(key, Shared(hooks)))
        student.set_submodule(name, layer, strict=False)
    if kv is not None and not kv.float4:
        _attend_through(student, kv)
    return student


def without_rotations(copied: "PreTrainedModel", model: "PreTrainedModel") -> None:
    """Give a copy of a model the weights before its inputs were rotated: the same function in less time."""
    for name, module in copied.named_modules():
        place = next((key for key, hook in module._forward_pre_hooks.items() if hook is rotate_input), None)
        if place is not None:
            del module._forward_pre_hooks[place]
            weight = model.get_submodule(name).weight.detach().to(module.weight.device)
            module.weight.data = hadamard.inverse(weight).to(module.weight.dtype)


def gains_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The gains of a model's norms, by name."""
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        gain = getattr(module, "weight", None)
        if isinstance(gain, nn.Parameter) and gain.ndim == 1 and "Norm" in type(module).__name__:
            found[f"{name}.weight"] = gain
    return found


def attend_by(model: nn.Module, kind: str, change: Callable[[Attend], Attend]) -> None:
    """Change the attention function of a model or a block. kind: tells changes apart; two of a kind are the same."""
    config: Any = next(module.config for module in model.modules() if hasattr(module, "config"))
    usual = config._attn_implementation
    name = f"anybit-{kind}-{usual}"
    AttentionInterface.register(name, change(ALL_ATTENTION_FUNCTIONS[usual]))
    AttentionMaskInterface.register(name, _same_when_captured(ALL_MASK_ATTENTION_FUNCTIONS[usual]))
    config._attn_implementation = name


def _same_when_captured(masks: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Leave a mask out of a CUDA graph where the steps before its capture had none.

    transformers looks for packed sequences, except in a capture, which cannot read them: there it makes a mask. With
    that, attention would be slower, and compiled code would be compiled again, which a capture does not allow.
    """
    without: set[tuple[object, ...]] = set()

    def mask(**asked: object) -> Tensor | None:
        sizes = tuple(asked.get(name) for name in ("q_length", "kv_length", "local_size"))
        if sizes in without and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        made = masks(**asked)
        if made is None:
            without.add(sizes)
        return made

    return mask


def _attend_through(model: nn.Module, format: KVFormat) -> None:
    """Make a model, or a block, round its keys and values before attention."""

    def through(attend: Attend) -> Attend:
        def rounding(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object
        ) -> tuple[Tensor, Tensor | None]:
            return attend(module, query, *keys_and_values_through(key, value, format), *args, **kwargs)

        return rounding

    attend_by(model, str(format), through)
