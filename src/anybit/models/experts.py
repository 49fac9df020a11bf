"""Experts of transformers' models, which keeps them as 3-D parameters, as linear layers of their own."""

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform

from anybit.layers.experts import Experts, Gate, ScaledInputs
from anybit.models.families import EXPERT_NAMES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GATES = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "silu": "silu",
    "GELUActivation": "gelu",
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
}
"""By the class of an activation function, or a function's name; all others are left in 16 bits."""
_SCALED = "Llama4TextExperts"
"""The class of transposed experts in a block that ``ScaledInputs`` replaces."""
_FUSED = ("gate_up_proj", "down_proj")


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds experts in parameters of its own: 3-D ones, or DBRX's, whose experts are rows of one."""
    own = dict(module.named_parameters(recurse=False))
    if "Expert" in type(module).__name__ and not isinstance(module, nn.Linear):
        return any(parameter.ndim > 1 for parameter in own.values())
    return any(parameter.ndim == 3 for name, parameter in own.items() if "proj" in name)


def left_fused(model: "PreTrainedModel") -> dict[str, str]:
    """The experts of a model that ``unfuse`` leaves as they are, in 16 bits: name -> the reason, in a sentence."""
    moved = any(map(_rearranges, get_model_conversion_mapping(model)))
    other = "checkpoints store them in another layout than the model" if moved else "they are in no known layout"
    return {name: why_not(module) or other for name, module in model.named_modules() if is_fused(module)}


def stored_as_one(model: "PreTrainedModel") -> bool:
    """Whether checkpoints hold the experts of a layer as one tensor, and not as layers that transformers merges."""
    return not any(map(_merges, get_model_conversion_mapping(model)))


def weights_left(model: "PreTrainedModel") -> int:
    """The number of weights in experts that stay fused, in 16 bits."""
    modules = [model.get_submodule(name) for name in left_fused(model)]
    return sum(p.numel() for module in modules for p in module.parameters(recurse=False) if p.ndim > 1)


def experts_of(model: "PreTrainedModel") -> str | None:
    """How many experts a layer has, and how many of them a token uses, in words; None if there are none."""
    config = model.config.get_text_config(decoder=True)
    counts = [len(module) for module in model.modules() if isinstance(module, Experts)]
    fused = [next(module.parameters(recurse=False)) for module in model.modules() if is_fused(module)]
    counts += [len(parameter) for parameter in fused if parameter.ndim == 3]
    keys = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
    chosen = next((found for key in keys if (found := getattr(config, key, None)) is not None), "some")
    return f"{max(counts)}, of which a token uses {chosen}" if counts else None


def warn_of_left(model: "PreTrainedModel") -> None:
    """Warn, with the reason, of experts that stay in 16 bits."""
    left = left_fused(model)
    for reason in dict.fromkeys(left.values()):
        names = [name for name in left if left[name] == reason]
        more = f" and of {len(names) - 1} more layers" if len(names) > 1 else ""
        warnings.warn(f"the experts of {names[0]}{more} stay in 16 bits: {reason}", stacklevel=3)


def why_not(module: nn.Module) -> str | None:
    """Why a module's 3-D experts cannot become linear layers, in a sentence; None if they can."""
    kind, names = type(module).__name__, {name for name, _ in module.named_parameters(recurse=False)}
    if not set(_FUSED) <= names:
        return f"{kind} has no gate_up_proj and down_proj"
    if getattr(module, "has_post_expert_norm", False):
        return f"{kind} norms each expert's output"
    if _gate(module) is None:
        how = "a way of its own" if _has_own_gate(module) else type(getattr(module, "act_fn", None)).__name__
        return f"{kind} joins gate and up by {how}, which anybit does not know"
    if not hasattr(module, "is_transposed") and kind != _SCALED:
        return f"{kind} is not called with the experts of each token"
    return None


def _gate(module: nn.Module) -> Gate | None:
    if hasattr(module, "limit") and hasattr(module, "alpha"):  # gpt-oss
        return Gate("swigluoai", *(float(getattr(module, name)) for name in ("alpha", "limit")))
    function = getattr(module, "act_fn", None)
    kind = _GATES.get(getattr(function, "__name__", type(function).__name__))
    return Gate(kind) if kind is not None and not _has_own_gate(module) else None


def _has_own_gate(module: nn.Module) -> bool:
    own = type(module).__dict__.get("_apply_gate")
    return own is not None and own.__module__ != "transformers.integrations.moe"


@dataclass(frozen=True, slots=True)
class Part:
    """Where a layer's weight or bias stands in the 3-D tensor of all experts."""

    expert: int
    rows: slice
    transposed: bool

    def of(self, tensor: Tensor) -> Tensor:
        """The part [N, K], or [N] of a bias, of a tensor [E, ...]: a view."""
        own = tensor[self.expert]
        return (own.mT if self.transposed else own)[self.rows]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of a tensor of shape ``whole``."""
        return tuple(self.of(torch.empty(whole, device="meta")).shape)


def parts(experts: Experts, fused: str) -> dict[str, Part]:
    """Name of a layer's tensor ("3.gate_proj.weight") -> its part of a fused one ("gate_up_proj", "down_proj_bias")."""
    gate, up, down = experts.names
    kind, inner = "bias" if fused.endswith("_bias") else "weight", experts.intermediate_dim
    halves = (slice(0, None, 2), slice(1, None, 2)) if experts.interleaved else (slice(inner), slice(inner, None))
    rows = {down: slice(None)} if fused.startswith("down_proj") else dict(zip((gate, up), halves, strict=True))
    transposed = experts.transposed and kind == "weight"
    return {
        f"{number}.{name}.{kind}": Part(number, own, transposed)
        for number in range(len(experts))
        for name, own in rows.items()
    }


def unfused(module: nn.Module, names: Sequence[str] = EXPERT_NAMES) -> Experts:
    """Linear layers with the weights of fused experts (views of them), on their device; empty ones on meta."""
    tensors = dict(module.named_parameters(recurse=False))
    transposed = bool(getattr(module, "is_transposed", type(module).__name__ == _SCALED))
    down, gate = tensors["down_proj"], _gate(module)
    count, *sides = down.shape
    inner, hidden = sides if transposed else reversed(sides)
    assert gate is not None
    biased = "down_proj_bias" in tensors
    made = Experts(count, hidden, inner, names, gate, biased, dtype=down.dtype, device="meta")
    made.transposed, made.interleaved = transposed, not getattr(module, "is_concatenated", True)
    for fused, tensor in tensors.items() if not down.is_meta else ():
        for name, part in parts(made, fused).items():
            layer, _, kind = name.rpartition(".")
            setattr(made.get_submodule(layer), kind, nn.Parameter(part.of(tensor.detach()), requires_grad=False))
    return made


def unfuse(model: "PreTrainedModel") -> None:
    """Replace a model's fused experts by linear layers, named as its checkpoints name them; ``left_fused`` stay."""
    transforms = get_model_conversion_mapping(model)
    if any(map(_rearranges, transforms)):
        return
    sources = [source for item in transforms if _merges(item) for source in item.source_patterns]
    found = [match[1] for source in sources if (match := re.search(r"\*\.(\w+)\.weight$", source))]
    names = (
        found if len(found) == 3 else EXPERT_NAMES
    )  # gate and up are the sources of one tensor, down that of another
    for name, module in list(model.named_modules()):
        if not is_fused(module) or why_not(module) is not None:
            continue
        made, block = unfused(module, names), name.rpartition(".")[0]
        if type(module).__name__ == _SCALED:
            model.set_submodule(block, ScaledInputs(model.get_submodule(block), made))
        else:
            model.set_submodule(name, made)


@dataclass(frozen=True)
class HubNames:
    """The names that checkpoints have for blocks of experts where transformers has others: Mixtral, PhiMoE, MiniMax.

    blocks: the model's names of such blocks.  router: the router's name in the model, "gate" in checkpoints.
    """

    blocks: frozenset[str] = frozenset()
    router: str = "gate"

    @classmethod
    def of(cls, model: "PreTrainedModel") -> "HubNames":
        """The names of a model whose experts are linear layers."""
        pairs = [
            (source.replace("\\", "").strip("."), target.strip("."))
            for item in get_model_conversion_mapping(model)
            if isinstance(item, WeightRenaming)
            for source, target in zip(item.source_patterns, item.target_patterns, strict=False)
        ]
        if (_STORED, "mlp") not in pairs:
            return cls()
        names = (name.rpartition(".")[0] for name, module in model.named_modules() if isinstance(module, Experts))
        routers = (target.removesuffix(".weight") for source, target in pairs if source == "gate.weight")
        return cls(frozenset(name for name in names if name.rpartition(".")[2] == "mlp"), next(routers, "gate"))

    def hub(self, name: str) -> str:
        """A tensor's or layer's name in the model -> in checkpoints."""
        before, found, inside = name.partition(".mlp.")
        if not found or f"{before}.mlp" not in self.blocks:
            return name
        first, dot, rest = inside.partition(".")
        return f"{before}.{_STORED}.{'gate' if first == self.router else first}{dot}{rest}"

    def own(self, name: str) -> str:
        """The inverse of ``hub``; the same for a pattern with block_sparse_moe in it."""
        if not self.blocks:
            return name
        return re.sub(rf"{_STORED}(\\?\.)gate\b", rf"mlp\1{self.router}", name).replace(_STORED, "mlp")

    def both(self, names: Iterable[str]) -> list[str]:
        """Names in checkpoints and in the model, for readers that know either."""
        return [*dict.fromkeys(each for name in names for each in (self.hub(name), name))]


_STORED = "block_sparse_moe"


def conversions(model: "PreTrainedModel", transforms: Iterable[WeightTransform]) -> list[WeightTransform]:
    """Transformers' conversions of a checkpoint, for a model whose experts are linear layers.

    They are not merged; 3-D tensors of experts are split.
    """
    found = next(((name, item) for name, item in model.named_modules() if isinstance(item, Experts)), None)
    if found is None:
        return list(transforms)
    own, experts = ".".join(found[0].split(".")[-2:]), found[1]  # the parent's name, too: not those of shared_experts
    kept = [item for item in transforms if not _merges(item)]
    ends = ("_bias", "") if experts.biased else ("",)  # 5.19 takes the first that begins a name
    return kept + [_splitting(own, experts, f"{fused}{end}") for end in ends for fused in _FUSED]


def _splitting(own: str, experts: Experts, fused: str) -> WeightConverter:
    found = parts(experts, fused)
    return WeightConverter(f"{own}.{fused}", [f"{own}.{name}" for name in found], [Split([*found.values()])])


class Split(ConversionOps):  # type: ignore[misc]
    """Takes the tensors of linear layers out of a 3-D tensor of all experts."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: object
    ) -> dict[str, Tensor]:
        """The 3-D tensor, by its name -> its parts, by the names of theirs."""
        (value,) = input_dict.values()
        tensor = value[0] if isinstance(value, list) else value
        pairs = zip(target_patterns, self.parts, strict=True)
        return {target: part.of(tensor).contiguous() for target, part in pairs}


def _merges(item: WeightTransform) -> bool:
    """Whether a conversion stacks the layers of experts into the 3-D tensors of transformers."""
    made = any(target.endswith(_FUSED) for target in item.target_patterns)
    return isinstance(item, WeightConverter) and made and all("experts.*." in source for source in item.source_patterns)


def _rearranges(item: WeightTransform) -> bool:
    """Whether a conversion changes the layout of 3-D tensors of experts."""
    ours = any(target.endswith(_FUSED) and "experts" in target for target in item.target_patterns)
    moved = isinstance(item, WeightConverter) and not any(isinstance(each, Split) for each in item.operations)
    return ours and moved and not _merges(item)
