"""AWQ, as AutoAWQ and auto-round write it: versions ``gemm`` and ``gemv``.  W = scale * (q - zero).

gemm: qweight int32 [K, N*b/32], qzeros int32 [G, N*b/32], scales float [G, N]; packed along N, interleaved: position p
of every eight holds output [0, 2, 4, 6, 1, 3, 5, 7][p].
gemv: qweight int32 [N, K/8] and qzeros int32 [N, ...], packed in order along K and along groups, scales float [N, ...];
the last two are padded.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from anybit.checkpoints.formats.stored import Format, Groups, Opened, StoredLayer, finite
from anybit.codes.packing import QuantizedWeight, unpack_words
from anybit.scheme import Scheme, WeightFormat

_PLACE_OF = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 to 7


def _version(config: Mapping[str, object]) -> str:
    return str(config.get("version") or "gemm").lower()


def _open(layer: StoredLayer) -> Opened:
    if _version(layer.config) == "gemv":
        return _open_gemv(layer)
    stored, n = layer.shape("scales")
    k, width = layer.shape("qweight")
    if n % 8 or width * 32 % n or width * 32 // n not in range(1, 9):
        raise layer.refuse(f"qweight of shape {(k, width)} fits no width of 1 to 8 bits with {n} outputs")
    groups = Groups.fitting(layer, stored, k, layer.config.get("group_size"))
    format = WeightFormat(width * 32 // n, "asym", groups.group)

    def in_order(name: str) -> Tensor:
        """Codes or zeros [N, ...], without the interleaving."""
        places: Tensor = unpack_words(layer[name], format.bits, n).unflatten(-1, (-1, 8))
        return places[..., torch.tensor(_PLACE_OF)].flatten(-2).t()

    def read() -> QuantizedWeight:
        scale, zero = groups.spread(finite(layer, "scales", layer["scales"]).t()), groups.spread(in_order("qzeros"))
        return QuantizedWeight.from_codes(in_order("qweight").contiguous(), scale, zero, format)

    return Scheme(format), read


def _open_gemv(layer: StoredLayer) -> Opened:
    bits, (n, width) = layer.config.get("bits", 4), layer.shape("qweight")
    if not isinstance(bits, int) or bits not in range(1, 9):
        raise layer.refuse(f"its codes have {bits!r:.80} bits, and 1 to 8 are possible")
    k = width * 32 // bits
    groups = Groups.of(layer, layer.config.get("group_size"), k)
    format = WeightFormat(bits, "asym", groups.group)

    def read() -> QuantizedWeight:
        zero = unpack_words(layer["qzeros"], bits, layer.shape("qzeros")[1] * 32 // bits)
        scale, zero = (
            groups.spread(values[:, : groups.stored]) for values in (finite(layer, "scales", layer["scales"]), zero)
        )
        return QuantizedWeight(layer["qweight"].contiguous(), scale, zero, (n, k), format)

    return Scheme(format), read


FORMAT = Format(
    "awq",
    ("qweight",),
    ("qweight", "qzeros", "scales"),
    lambda config: config.get("quant_method") == "awq" and _version(config) in ("gemm", "gemv"),
    _open,
)
