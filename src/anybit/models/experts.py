"""Experts of transformers' models, which keeps them as 3-D parameters, as linear layers of their own."""

from collections.abc import Iterator
from typing import Protocol, cast


from torch import Tensor, nn

from anybit.layers.experts import Experts, Gate
from anybit.models.families import EXPERT_NAMES

_GATES = {"SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu", "GELU": "gelu", "GELUTanh": "gelu_tanh"}
"""By the class of an activation function; all others are left in 16 bits."""


class Fused(Protocol):
    """transformers' experts: gate_up_proj [E, 2I, H] and down_proj [E, H, I], or transposed; biases with ``_bias``."""

    gate_up_proj: Tensor
    down_proj: Tensor


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds experts as 3-D parameters."""
    return any(parameter.ndim == 3 for name, parameter in module.named_parameters(recurse=False) if "proj" in name)


def why_not(module: nn.Module) -> str | None:
    """Why a module's 3-D experts cannot become linear layers, in a sentence; None if they can."""
    kind, names = type(module).__name__, {name for name, _ in module.named_parameters(recurse=False)}
    if not {"gate_up_proj", "down_proj"} <= names:
        return f"{kind} has no gate_up_proj and down_proj"
    if getattr(module, "has_post_expert_norm", False):
        return f"{kind} norms each expert's output"
    if _gate(module) is None:
        return f"{kind} joins gate and up by {type(getattr(module, 'act_fn', None)).__name__}, which anybit does not know"
    if not hasattr(module, "is_transposed"):
        return f"{kind} is not called with the experts of each token"
    return None


def _gate(module: nn.Module) -> Gate | None:
    if hasattr(module, "limit") and hasattr(module, "alpha"):  # gpt-oss
        return Gate("swiglu_clamped", float(module.alpha), float(module.limit))
    kind = _GATES.get(type(getattr(module, "act_fn", None)).__name__)
    own = type(module).__dict__.get("_apply_gate")
    default = own is None or own.__module__ == "transformers.integrations.moe"
    return Gate(kind) if kind is not None and default else None


def layout(module: nn.Module) -> tuple[bool, bool, bool]:
    """(transposed, interleaved, biased) of fused experts."""
    biased = "down_proj_bias" in dict(module.named_parameters(recurse=False))
    return bool(getattr(module, "is_transposed", False)), not getattr(module, "is_concatenated", True), biased


def unfused(module: nn.Module, names: tuple[str, str, str] = EXPERT_NAMES) -> Experts:
    """Linear layers with the weights of fused experts (views of them), on their device; empty ones on meta."""
    fused = cast(Fused, module)
    transposed, interleaved, biased = layout(module)
    count, *sides = fused.down_proj.shape
    inner, hidden = sides if transposed else reversed(sides)
    gate = _gate(module)
    assert gate is not None
    made = Experts(count, hidden, inner, names, gate, biased, dtype=fused.down_proj.dtype, device="meta")
    if not fused.down_proj.is_meta:
        for number, name, kind, tensor in parts(module, names):
            layer = made[number][name]
            setattr(layer, kind, nn.Parameter(tensor, requires_grad=False))
    return made


def parts(module: nn.Module, names: tuple[str, str, str] = EXPERT_NAMES) -> Iterator[tuple[int, str, str, Tensor]]:
    """(expert, layer's name, "weight" or "bias", tensor) of fused experts."""
    transposed, interleaved, biased = layout(module)
    for kind, end in (("weight", ""), ("bias", "_bias"))[: 1 + biased]:
        both, down = getattr(module, f"gate_up_proj{end}").detach(), getattr(module, f"down_proj{end}").detach()
        if transposed and kind == "weight":
            both, down = both.mT, down.mT
        for number in range(len(down)):
            gate, up = (both[number, 0::2], both[number, 1::2]) if interleaved else both[number].chunk(2)
            yield from zip((number,) * 3, names, (kind,) * 3, (gate, up, down[number]), strict=True)


def unfuse(model: nn.Module, names: tuple[str, str, str] = EXPERT_NAMES) -> dict[str, str]:
    """Replace a model's fused experts by linear layers. Returns the names of those left as they are, with the reason."""
    left = {}
    for name, module in list(model.named_modules()):
        if not is_fused(module):
            continue
        if (reason := why_not(module)) is not None:
            left[name] = reason
            continue
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, unfused(module, names))
    return left


