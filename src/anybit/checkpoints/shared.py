"""Whether a compressed-tensors folder can hold a model: same tensors as anybit's, different config.json."""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from torch import nn
from transformers.pytorch_utils import Conv1D

from anybit.checkpoints.configuration import why_not
from anybit.checkpoints.formats.compressed_tensors import PADDED
from anybit.codes.packing import WORD, words_per_row
from anybit.layers.experts import Experts
from anybit.models.experts import left_fused, stored_as_one
from anybit.scheme import GROUPS, Scheme, WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shared_ignore(
    model: "PreTrainedModel", scheme: Scheme, quantized: Iterable[str], hadamard: bool = False
) -> list[str] | None:
    """The unquantized Linear layers of a model, if compressed-tensors can represent the others; None if it cannot.

    model: on the meta device, before its layers are replaced.  quantized: names of the quantized layers, which have no
    activation order.
    """
    layers = set(quantized)
    refused = hadamard or why_not(scheme) is not None or why_not_model(model, layers, scheme.weights) is not None
    return None if refused else unquantized_linears(model, layers)


def why_not_model(model: "PreTrainedModel", quantized: Collection[str], fmt: WeightFormat) -> str | None:
    """Why compressed-tensors cannot represent the quantized layers of a model, in a sentence about the first, or None.

    transformers takes all experts for quantized, even if ignored, and leaves out their zero points.
    """
    modules = dict(model.named_modules())
    experts = [
        f"{name}.{own}.{part}"
        for name, module in modules.items()
        if isinstance(module, Experts)
        for own in range(len(module))
        for part in module.names
    ]
    why = None
    if plain := [*left_fused(model), *(name for name in experts if name not in quantized)]:
        why = f"in 16 bits ({plain[0]}): readers of compressed-tensors expect codes of them"
    elif experts and stored_as_one(model):
        why = f"as layers ({experts[0]}), where readers of compressed-tensors expect one tensor"
    elif experts and fmt.code == "asym":
        why = f"with zero points ({experts[0]}), which readers of compressed-tensors leave out of experts"
    if why is not None:
        return f"the model has experts {why}; anybit's own format holds it"
    layers = ((name, module) for name, module in modules.items() if name in quantized)
    return next((why for name, module in layers if (why := _why_not_layer(name, module, fmt))), None)


def _why_not_layer(name: str, module: nn.Module, fmt: WeightFormat) -> str | None:
    if isinstance(module, Conv1D):
        return f"layer {name} was a Conv1D, whose weight compressed-tensors expects transposed"
    k = module.get_parameter("weight").shape[1]
    codes = WORD // fmt.bits
    both = fmt.bits in PADDED and -(-k // codes) == words_per_row(k, fmt.bits)
    if both and (k > codes or fmt.code == "asym"):
        return (
            f"layer {name} has {k} inputs, whose {fmt.bits}-bit codes compressed-tensors before 0.18 would misread: "
            f"it expects {codes} codes a word, and finds as many words; use 4 or 8 bits"
        )
    if fmt.group is not None and k % fmt.group:
        smaller = [f"g{group}" for group in GROUPS if group > 16 and k % group == 0]  # no kernel runs g16
        advice = f"quantize with {' or '.join(smaller)}, or with whole rows" if smaller else "use whole rows"
        return (
            f"layer {name} has {k} inputs, which groups of {fmt.group} do not divide, as compressed-tensors demands; "
            f"{advice}"
        )
    return None


def unquantized_linears(model: nn.Module, quantized: Collection[str]) -> list[str]:
    """The unquantized Linears by name: compressed-tensors takes every Linear that is not ignored as quantized.

    Routers of experts are among them, which other libraries build as such.
    """
    mixtures = {name.rpartition(".")[0] for name, module in model.named_modules() if isinstance(module, Experts)}
    linears = (
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        or (name.rpartition(".")[0] in mixtures and getattr(getattr(module, "weight", None), "ndim", 0) == 2)
    )
    return [name for name in linears if name not in quantized]
