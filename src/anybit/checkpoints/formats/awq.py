"""AWQ, as AutoAWQ and auto-round write it: versions ``gemm`` and ``gemv``.  W = scale * (q - zero).

gemm: qweight int32 [K, N*b/32], qzeros int32 [G, N*b/32], scales float [G, N]; packed along N, interleaved: position p
of every eight holds output [0, 2, 4, 6, 1, 3, 5, 7][p].
gemv: qweight int32 [N, K/8] and qzeros int32 [N, ...], packed in order along K and along groups, scales float [N, ...];
the last two are padded.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from anybit.checkpoints.formats.stored import Groups, StoredLayer, finite, group_size
from anybit.codes.packing import QuantizedWeight, pack_words, unpack_words
from anybit.scheme import Scheme, WeightFormat

NAME = "awq"
MARKS = ("qweight",)
TENSORS = ("qweight", "qzeros", "scales")
_PLACE_OF = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 to 7


def matches(config: Mapping[str, object]) -> bool:
    """Whether a quantization_config describes this format."""
    return config.get("quant_method") == "awq" and _version(config) in ("gemm", "gemv")


def scheme(layer: StoredLayer) -> Scheme:
    """The scheme of a layer."""
    bits, k, _ = _sizes(layer)
    return Scheme(WeightFormat(bits, "asym", _groups(layer, k).group))


def read(layer: StoredLayer) -> QuantizedWeight:
    """Read a layer, with its codes unchanged."""
    bits, k, n = _sizes(layer)
    groups = _groups(layer, k)
    scale = finite(layer, "scales", layer["scales"])
    if _version(layer.config) == "gemv":
        zero = unpack_words(layer["qzeros"], bits, layer.shape("qzeros")[1] * 32 // bits)[:, : groups.stored]
        words, scale = layer["qweight"].contiguous(), scale[:, : groups.stored]
    else:
        words = pack_words(_in_order(unpack_words(layer["qweight"], bits, n)).t().contiguous(), bits)
        zero, scale = _in_order(unpack_words(layer["qzeros"], bits, n)).t(), scale.t()
    format = WeightFormat(bits, "asym", groups.group)
    return QuantizedWeight(words, groups.spread(scale), groups.spread(zero), (n, k), format)


def _version(config: Mapping[str, object]) -> str:
    return str(config.get("version") or "gemm").lower()


def _sizes(layer: StoredLayer) -> tuple[int, int, int]:
    """(bits, inputs, outputs)."""
    if _version(layer.config) == "gemv":
        bits, (n, words) = layer.config.get("bits", 4), layer.shape("qweight")
        if not isinstance(bits, int) or bits not in range(1, 9):
            raise layer.refuse(f"its codes have {bits!r:.80} bits, and 1 to 8 are possible")
        return bits, words * 32 // bits, n
    n = layer.shape("scales")[1]
    k, words = layer.shape("qweight")
    if n % 8 or words * 32 % n or words * 32 // n not in range(1, 9):
        raise layer.refuse(f"qweight of shape {(k, words)} fits no width of 1 to 8 bits with {n} outputs")
    return words * 32 // n, k, n


def _groups(layer: StoredLayer, k: int) -> Groups:
    if _version(layer.config) == "gemv":
        return Groups.of(layer, layer.config.get("group_size"), k)
    stored = layer.shape("scales")[0]
    return Groups.of(layer, group_size(layer, layer.config.get("group_size"), stored, k), k)


def _in_order(places: Tensor) -> Tensor:
    """Undo the interleaving of values [..., N]."""
    order = torch.tensor(_PLACE_OF)
    return places.view(places.shape[0], -1, 8)[..., order].flatten(-2)
