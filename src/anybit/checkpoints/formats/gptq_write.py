"""Write layers in GPTQ's v2 format (``checkpoint_format: gptq_v2``), if it represents them exactly."""

import torch
from torch import Tensor

from anybit.checkpoints.configuration import why_not as why_not_integers
from anybit.codes.packing import QuantizedWeight, pack_words
from anybit.errors import ConversionError
from anybit.scheme import CODES, Scheme

_BITS = (2, 3, 4, 8)


def why_not(scheme: Scheme) -> str | None:
    """What part of a scheme GPTQ's format cannot represent, in a sentence, or None."""
    if scheme.weights.code in CODES and scheme.weights.bits not in _BITS:
        return f"{scheme.weights.bits} bits: it has {', '.join(map(str, _BITS))}"
    return why_not_integers(scheme)


def tensors_of(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of one layer. Raises ConversionError, naming it, if the format cannot represent it exactly."""
    (n, k), bits = weight.shape, weight.format.bits
    if n % 32 or k % 32:
        raise ConversionError(f"layer {name} is {n} x {k}, and GPTQ packs outputs and inputs in multiples of 32")
    if weight.format.group is not None and k % weight.format.group:
        raise ConversionError(f"layer {name} has {k} inputs, which groups of {weight.format.group} do not divide")
    scale = weight.scale.to(torch.float16)
    if not torch.equal(scale.to(weight.scale.dtype), weight.scale):
        raise ConversionError(
            f"layer {name} has scales that are not exact in float16, the dtype of GPTQ's: quantize the model again "
            "from 16-bit weights"
        )
    return {
        "qweight": weight.words.t().contiguous(),
        "qzeros": pack_words(weight.zeros().to(torch.uint8).t().contiguous(), bits),
        "scales": scale.t().contiguous(),
        "g_idx": weight.groups().to(torch.int32),
    }


def configuration(scheme: Scheme, kept: list[str], ordered: bool) -> dict[str, object]:
    """The quantization_config of a model whose layers are all in ``scheme``."""
    group = scheme.weights.group
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "bits": scheme.weights.bits,
        "group_size": -1 if group is None else group,
        "sym": scheme.weights.code == "sym",
        "desc_act": ordered,
        "modules_in_block_to_quantize": None,
        # How GPTQModel marks layers as unquantized.
        "dynamic": {f"-:^{name}$".replace(".", r"\."): {} for name in kept},
    }
