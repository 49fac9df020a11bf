"""Schemes: what is quantized, and how, in one short string.

    w4a16g128            4-bit weights in groups of 128, 16-bit activations
    w2a2                 2-bit weights (one scale per output row) and 2-bit activations (one scale per token)
    w2a16g64asym         2-bit weights with a zero point per group of 64
    w4a8                 4-bit weights, 8-bit integer activations;  w4a8fp: 8-bit float (e4m3) activations
    w3a4bipolar-xasym    bipolar weights, asymmetric activations (x as in Y = XW)
    w4a16g128s24         2:4 sparse weights
    w4a16g32min          4-bit weights, a scale and a float minimum per group of 32
    w4a16g16e2m1         4-bit floats in groups of 16;  nf4, iq4: other tables of 16 values;  w8a16e4m3: 8-bit floats
    w4a16g128-kv4        and a 4-bit KV cache;  -k4v2g32: keys 4 bits, values 2, groups of 32;
                         -kv4t: keys grouped along the channels of a token ("tensor-wise");  -kv4rot: rotated heads

All integer codes decode as ``value = scale * (u - zero)`` with an unsigned code ``u`` in [0, 2^bits).
They differ only in the zero (bipolar-INT is APT-LLM's format, section III-A: x' = 2x + 1, up to the scale):

    sym       zero = 2^(bits-1)         signed integers
    asym      zero = one integer per group, in [0, 2^bits - 1]
    bipolar   zero = (2^bits - 1) / 2   odd multiples of half a step, symmetric about zero

Weights quantized by other tools need two more kinds (``anybit.codes.packing`` has the tables):

    min                    value = scale * u + minimum, a float minimum per group (GGUF's K-quants, HQQ)
    e2m1, nf4, iq4, e4m3   value = scale * table[u] (MXFP4 and NVFP4, bitsandbytes, GGUF's IQ4, FP8)
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, TypeGuard

from anybit.errors import SchemeError

Code = Literal["sym", "asym", "bipolar", "min", "e2m1", "nf4", "iq4", "e4m3"]
ActivationCode = Literal["sym", "asym", "bipolar", "float"]
KeyAxis = Literal["channel", "token"]

GROUPS = (16, 32, 64, 128, 256)
KV_GROUPS = (32, 64, 128)
KV_BITS = (2, 4, 8, 16)
CODES: tuple[Code, ...] = ("sym", "asym", "bipolar")
"""The integer codes, which activations can use too."""
TABLES: dict[Code, int] = {"e2m1": 4, "nf4": 4, "iq4": 4, "e4m3": 8}
"""The codes that index a table of values, and the width of each in bits."""
WEIGHT_CODES: tuple[Code, ...] = (*CODES, "min", *TABLES)


def fixed_zero(code: str, bits: int) -> float | None:
    """The implied zero of an integer code, in code units; None where each group stores its own (asym)."""
    if code == "asym":
        return None
    return float(2 ** (bits - 1)) if code == "sym" else (2**bits - 1) / 2


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of Python, numpy or torch; True and 4.0 are not."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_one_of(value: object, allowed: Collection[int]) -> bool:
    return is_whole(value) and value in allowed


def _default_code(bits: int) -> Code:
    # One signed bit would be {-1, 0}; 1-bit methods mean {-1, 1} times a scale.
    return "bipolar" if bits == 1 else "sym"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the weights of a linear layer are quantized.

    bits: 1 to 8.  code: one of WEIGHT_CODES.  group: input channels that share a scale (16, 32, 64, 128 or 256), or
    None for one scale per output row.  sparse: 2:4, two non-zeros in every four inputs.
    Raises SchemeError for any other value or an unsupported combination.
    """

    bits: int
    code: Code = "sym"
    group: int | None = None
    sparse: bool = False

    def __post_init__(self) -> None:
        if not _is_one_of(self.bits, range(1, 9)):
            raise SchemeError(f"weight bits must be 1 to 8, not {self.bits!r}")
        if self.code not in WEIGHT_CODES:
            raise SchemeError(f"weight code must be one of {', '.join(WEIGHT_CODES)}, not {self.code!r}")
        if self.code in TABLES and self.bits != TABLES[self.code]:
            most = TABLES[self.code]
            raise SchemeError(
                f"{self.code} codes have {most} bits, which index a table of {2**most} values, not {self.bits}"
            )
        if self.group is not None and not _is_one_of(self.group, GROUPS):
            raise SchemeError(
                f"group must be 16, 32, 64, 128 or 256 input channels, or absent for whole rows, not {self.group!r}"
            )
        if self.sparse and self.code not in ("sym", "asym"):
            raise SchemeError(
                f"2:4 sparsity (s24) needs an integer code for zero, and {self.code} codes have none: use sym or asym, "
                "2 bits or more"
            )

    @property
    def zero(self) -> float | None:
        """The implied zero in code units, or None where each group stores its own (asym)."""
        return fixed_zero(self.code, self.bits) if self.code in CODES else 0.0

    @property
    def tabled(self) -> bool:
        """Whether codes index a table of values."""
        return self.code in TABLES

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight takes, with its share of scales, zeros and minima; without the scales of whole rows."""
        kept = (self.bits + 2) / 2 if self.sparse else self.bits
        parameters = 16 + {"asym": self.bits, "min": 16}.get(self.code, 0)
        return kept if self.group is None else kept + parameters / self.group

    def groups(self, in_features: int) -> int:
        """Number of groups in a row of ``in_features`` weights; the last one may be partial."""
        return 1 if self.group is None else -(-in_features // self.group)


def nested_widths(format: WeightFormat, widths: Iterable[int]) -> list[int]:
    """The widths, ascending, that weights are to be sliced to (``codes.nested``).

    Raises SchemeError for one that the format does not allow.
    """
    found = set(widths)
    for width in found:
        if not _is_one_of(width, range(2, format.bits)):
            raise SchemeError(
                f"weights of {format.bits} bits have no slice of {width!r}: a nested width is at least 2, and less "
                "than the scheme's"
            )
    if found and (format.code not in CODES or format.sparse):
        kind = "2:4 sparse weights" if format.sparse else f"{format.code} codes"
        raise SchemeError(f"{kind} have no slices: nested widths need a scheme like w8a16g64asym")
    return sorted(found)


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """How activations are quantized: dynamically, with a scale per token.

    bits: 1 to 8, or 16 (not quantized).  code: "sym", "asym", "bipolar", or "float" (the model's own type at 16
    bits, e4m3 at 8).  Raises SchemeError for any other value or combination.
    """

    bits: int = 16
    code: ActivationCode = "float"

    def __post_init__(self) -> None:
        if not _is_one_of(self.bits, (1, 2, 3, 4, 5, 6, 7, 8, 16)):
            raise SchemeError(f"activation bits must be 1 to 8, or 16, not {self.bits!r}")
        if self.code not in (*CODES, "float"):
            raise SchemeError(f"activation code must be sym, asym, bipolar or float, not {self.code!r}")
        if (self.bits == 16) != (self.code == "float") and not (self.bits == 8 and self.code == "float"):
            raise SchemeError(
                f"{self.bits}-bit activations cannot have code {self.code!r}: 16 bits are float, "
                "8 bits are float (8fp) or an integer code, fewer bits are an integer code"
            )

    @property
    def quantized(self) -> bool:
        """Whether activations are quantized at all."""
        return self.bits != 16

    @property
    def integer(self) -> bool:
        """Whether activations become integer codes."""
        return self.code != "float"

    @property
    def zero(self) -> float | None:
        """The implied zero in code units, or None where each token has its own (asym) or there is none (float)."""
        return None if self.code == "float" else fixed_zero(self.code, self.bits)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How the KV cache is quantized: asymmetric codes, a scale and a zero per group (BitDecoding, section IV).

    key_bits, value_bits: 2, 4, 8, or 16 (not quantized).  key_axis: "channel" (a group is ``group`` tokens of one
    channel, KC in the paper) or "token" (``group`` channels of one token, KT).  Values are always grouped by token.
    rotate: heads of K and V are rotated by a Hadamard matrix before quantization.
    float4: 4-bit e2m1 floats with an e4m3 scale per 16 instead (NVFP4), which sm_120's tensor cores multiply natively;
    written ``kvfp4``, it takes no other option than ``rot``.
    Raises SchemeError for any other value.
    """

    key_bits: int = 4
    value_bits: int = 4
    key_axis: KeyAxis = "channel"
    group: int = 64
    rotate: bool = False
    float4: bool = False

    def __post_init__(self) -> None:
        if self.float4 and (self.key_bits, self.value_bits, self.key_axis, self.group) != (4, 4, "token", 64):
            raise SchemeError("a KV cache of 4-bit floats has fixed groups of 16: write kvfp4, with no bits or groups")
        for name, bits in (("key", self.key_bits), ("value", self.value_bits)):
            if not _is_one_of(bits, KV_BITS):
                raise SchemeError(f"{name} bits of the KV cache must be 2, 4, 8 or 16, not {bits!r}")
        if self.key_axis not in ("channel", "token"):
            raise SchemeError(f"key_axis must be 'channel' or 'token', not {self.key_axis!r}")
        if not _is_one_of(self.group, KV_GROUPS):
            raise SchemeError(f"KV groups must be 32, 64 or 128, not {self.group!r}")

    @property
    def quantized(self) -> bool:
        """Whether keys or values are quantized at all."""
        return self.key_bits != 16 or self.value_bits != 16

    def __str__(self) -> str:
        if self.float4:
            return "kvfp4" + ("rot" if self.rotate else "")
        bits = f"kv{self.key_bits}" if self.key_bits == self.value_bits else f"k{self.key_bits}v{self.value_bits}"
        group = "" if self.group == 64 else f"g{self.group}"
        return bits + group + ("t" if self.key_axis == "token" else "") + ("rot" if self.rotate else "")

    @classmethod
    def parse(cls, text: str) -> "KVFormat":
        """Read a KV format such as ``kv4``, ``k4v2g32``, ``kv2t`` or ``kv4rot``; the inverse of ``str``.

        Raises SchemeError, which lists the formats, for anything else.
        """
        if not isinstance(text, str):
            raise SchemeError(f"a KV format is a string such as 'kv4', not {type(text).__name__}")
        if text in ("kvfp4", "kvfp4rot"):
            return cls(4, 4, "token", 64, text.endswith("rot"), float4=True)
        match = _KV.fullmatch(text)
        if match is None:
            raise SchemeError(
                f"KV format {text!r} is not understood: write kvB or kBvB with B in 2, 4, 8, 16, then optionally "
                "g32, g64 or g128, t (keys grouped along a token's channels), rot (rotated heads); example: k4v2g32"
            )
        key, value = match["key"] or match["both"], match["value"] or match["both"]
        group = int(match["group"]) if match["group"] else 64
        return cls(int(key), int(value), "token" if match["token"] else "channel", group, bool(match["rotate"]))


_KV = re.compile(r"(?:kv(?P<both>\d+)|k(?P<key>\d+)v(?P<value>\d+))(?:g(?P<group>\d+))?(?P<token>t)?(?P<rotate>rot)?")
_LINEAR = re.compile(
    r"w(?P<w>\d+)a(?P<a>\d+)(?P<float>fp)?(?:g(?P<group>\d+))?(?P<code>sym|asym|bipolar|min|e2m1|nf4|iq4|e4m3)?"
    r"(?P<sparse>s24)?"
)
_GRAMMAR = (
    "a scheme is wBaB with weights of 1-8 bits and activations of 1-8, 8fp or 16 bits, then optionally "
    "g16, g32, g64, g128 or g256; sym, asym, bipolar, min, e2m1, nf4, iq4 or e4m3; s24; -xasym or -xbipolar for "
    "the activations; -kvB or -kBvB for the KV cache; examples: w4a16g128, w2a2, w4a8fp, w2a16g64asym, w4a16g128-kv4"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """What is quantized and how: weights, activations and, optionally, the KV cache. Immutable.

    >>> scheme = Scheme.parse("w4a16g128-kv4")
    >>> scheme.weights.bits, scheme.weights.group, scheme.activations.bits, scheme.kv.key_bits
    (4, 128, 16, 4)
    >>> str(scheme)
    'w4a16g128-kv4'
    """

    weights: WeightFormat
    activations: ActivationFormat = ActivationFormat()
    kv: KVFormat | None = None

    def __post_init__(self) -> None:
        parts = (("weights", WeightFormat, True), ("activations", ActivationFormat, True), ("kv", KVFormat, False))
        for name, kind, needed in parts:
            part = getattr(self, name)
            if not isinstance(part, kind) and (needed or part is not None):
                raise SchemeError(
                    f"{name} of a scheme must be of type {kind.__name__}{'' if needed else ' or None'}, not {part!r}; "
                    "Scheme.parse('w4a16g128') parses a scheme"
                )

    @classmethod
    def parse(cls, text: "str | Scheme") -> "Scheme":
        """Read a scheme; the inverse of ``str``. Raises SchemeError (a ValueError), which lists what is allowed."""
        if isinstance(text, Scheme):
            return text
        if not isinstance(text, str):
            raise SchemeError(f"a scheme is a string such as 'w4a16g128', not {type(text).__name__}")
        head, *tail = text.strip().lower().split("-")
        match = _LINEAR.fullmatch(head)
        if match is None:
            raise SchemeError(f"scheme {text!r} is not understood at {head!r}: {_GRAMMAR}")
        activation_code: ActivationCode | None = None
        kv = None
        for word in tail:
            if word in ("xsym", "xasym", "xbipolar") and activation_code is None and kv is None:
                activation_code = word[1:]  # type: ignore[assignment]
            elif word.startswith("k") and kv is None:
                kv = KVFormat.parse(word)
            else:
                raise SchemeError(f"scheme {text!r} is not understood at {'-' + word!r}: {_GRAMMAR}")
        try:
            return cls(*_formats(match, activation_code), kv)
        except SchemeError as error:
            raise SchemeError(f"scheme {text!r} is impossible: {error}") from None

    def __str__(self) -> str:
        w, x = self.weights, self.activations
        text = f"w{w.bits}a{x.bits}" + ("fp" if x.code == "float" and x.bits == 8 else "")
        text += "" if w.group is None else f"g{w.group}"
        text += "" if w.code == _default_code(w.bits) else w.code
        text += "s24" if w.sparse else ""
        if x.integer and x.code != _default_code(x.bits):
            text += f"-x{x.code}"
        return text + ("" if self.kv is None else f"-{self.kv}")


def _formats(match: re.Match[str], code: ActivationCode | None) -> tuple[WeightFormat, ActivationFormat]:
    """The weight and activation formats of a regex match; ``code`` is the activations' suffix (-xasym), if any."""
    bits, activation_bits = int(match["w"]), int(match["a"])
    group = int(match["group"]) if match["group"] else None
    weights = WeightFormat(bits, match["code"] or _default_code(bits), group, bool(match["sparse"]))  # type: ignore[arg-type]
    if match["float"] and activation_bits != 8:
        raise SchemeError(f"float activations have 8 bits (a8fp) or 16 (a16), not {activation_bits}")
    if not match["float"] and activation_bits != 16:
        return weights, ActivationFormat(activation_bits, code or _default_code(activation_bits))  # type: ignore[arg-type]
    if code is not None:
        kind = "float" if match["float"] else "16-bit"
        raise SchemeError(f"{kind} activations have no integer code, so -x{code} does not apply")
    return weights, ActivationFormat(activation_bits)
