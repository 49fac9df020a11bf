"""Codes, dense words, and QuantizedWeight, the in-memory form of a quantized linear layer. Pure torch, any device.

Codes are unsigned (see ``anybit.scheme``). Rows of codes are packed densely into 32-bit words, least significant bit
first, padded only in a row's last word: compressed-tensors' ``pack-quantized`` layout, for every width.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from anybit.errors import LayerError, dtype_name
from anybit.scheme import WeightFormat

WORD = 32
# Fields of a QuantizedWeight with a row per output.
_BY_ROW = ("words", "scale", "zero", "indices", "minimum")
_Fields = dict[str, Any]


def _period(bits: int) -> tuple[int, int]:
    """(codes, words) of the shortest run of codes that fills whole words: the period of a row's layout."""
    common = math.gcd(bits, WORD)
    return WORD // common, bits // common


def words_per_row(length: int, bits: int) -> int:
    """Number of 32-bit words for ``length`` codes of ``bits`` bits."""
    return -(-length * bits // WORD)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack unsigned codes [..., K] (any integer dtype, values in [0, 2^bits)) into int32 words [..., ceil(K*bits/32)].

    Codes follow each other without gaps, least significant bit first; a code may straddle two words.
    """
    _check_bits(bits)
    period, width = _period(bits)
    periods = -(-codes.shape[-1] // period)
    parts = torch.nn.functional.pad(codes.to(torch.uint8), (0, periods * period - codes.shape[-1])).flatten()
    if 8 % bits == 0:  # neighbours become one, until they fill bytes
        for wide in (1, 2, 4)[bits.bit_length() - 1 :]:
            pairs = parts.view(torch.int16)
            parts = (pairs >> (8 - wide)).bitwise_or_(pairs).to(torch.uint8)
        words = parts.view(torch.int32).view(*codes.shape[:-1], periods * width)
    else:  # four neighbours become one
        for wide, pair in ((8, torch.int16), (16, torch.int32)):
            pairs = parts.view(pair)
            parts = torch.sub(pairs, pairs >> wide, alpha=(1 << wide) - (1 << bits * wide // 8))
        fours = parts.view(*codes.shape[:-1], periods, period // 4)
        words = fours.new_zeros(*codes.shape[:-1], periods, width)
        for position in range(period // 4):
            word, offset = divmod(4 * position * bits, WORD)
            words[..., word] |= fours[..., position] << offset
            if offset + 4 * bits > WORD:
                words[..., word + 1] |= fours[..., position] >> (WORD - offset)
        words = words.flatten(-2)
    return words[..., : words_per_row(codes.shape[-1], bits)].contiguous()


def unpack_words(words: Tensor, bits: int, length: int) -> Tensor:
    """Unpack int32 words [..., ceil(length*bits/32)] into uint8 codes [..., length]; the inverse of ``pack_words``.

    Raises LayerError for words of the wrong dtype or count.
    """
    _check_bits(bits)
    expected = words_per_row(length, bits)
    if words.dtype != torch.int32 or words.shape[-1] != expected:
        raise LayerError(
            f"{length} codes of {bits} bits are {expected} int32 words a row, "
            f"not {words.shape[-1]} of {dtype_name(words.dtype)}"
        )
    period, width = _period(bits)
    periods = -(-length // period)
    rows = torch.nn.functional.pad(words, (0, periods * width - expected)).reshape(*words.shape[:-1], periods, width)
    codes, mask = [], 2**bits - 1
    for position in range(period):
        word, offset = divmod(position * bits, WORD)
        code = rows[..., word] >> offset
        if offset + bits > WORD:
            low = WORD - offset  # bits in the first word; >> has sign-filled the rest
            code = (code & (2**low - 1)) | (rows[..., word + 1] << low)
        codes.append((code & mask).to(torch.uint8))
    return torch.stack(codes, dim=-1).flatten(-2)[..., :length].contiguous()


def check_fours(k: int, name: str = "this layer") -> None:
    """Raise LayerError unless k, the inputs of a 2:4 sparse layer, is a multiple of 4."""
    if k % 4:
        raise LayerError(f"2:4 sparsity needs a multiple of 4 inputs, and {name} has {k}")


_TABLES: dict[str, tuple[float, ...]] = {
    # OCP Microscaling Formats (MX) 1.0, section 5.3.3: one sign, two exponent and one mantissa bit.
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    # QLoRA, appendix E.
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    # GGML's IQ4_NL and IQ4_XS.
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}  # fmt: skip


def table_of(code: str) -> Tensor:
    """The values of a table code in code order, float32 [2^bits] on the CPU; e4m3's 0x7F and 0xFF are NaN."""
    if code == "e4m3":
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.tensor(_TABLES[code], dtype=torch.float32)


def layer_shapes(n: int, k: int, fmt: WeightFormat, group_index: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a layer of n outputs and k inputs stores for its weight."""
    kept, groups = k // 2 if fmt.sparse else k, fmt.groups(k)
    shapes: dict[str, tuple[int, ...] | None] = {
        "weight_packed": (n, words_per_row(kept, fmt.bits)),
        "weight_scale": (n, groups),
        "weight_zero_point": (words_per_row(n, fmt.bits), groups) if fmt.code == "asym" else None,
        "weight_shape": (2,),
        "weight_g_idx": (k,) if group_index else None,
        "weight_indices": (n, words_per_row(kept, 2)) if fmt.sparse else None,
        "weight_minimum": (n, groups) if fmt.code == "min" else None,
    }
    return {name: shape for name, shape in shapes.items() if shape is not None}


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """The weights of one linear layer, N outputs by K inputs, as codes: ``W = scale * (u - zero)``.

    With code "min", ``W = scale * u + minimum``; with a table code, ``W = scale * table[u]``.

    words: int32 [N, ceil(K*bits/32)], dense; for 2:4 sparse layers the codes of the non-zeros, [N, ceil(K/2*bits/32)].
    scale: float [N, G] with G = 1 for whole rows, else ceil(K / group).
    zero: uint8 [N, G] for asym, else None (the format implies it).
    group_index: int32 [K], the group of each input channel (activation order), else None: channel k is in k // group.
    indices: int32 [N, ceil(K/2*2/32)], 2-bit positions of the two non-zeros in every four, for 2:4 sparse layers.
    minimum: float [N, G] for min, else None.
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None
    shape: tuple[int, int]
    format: WeightFormat
    group_index: Tensor | None = None
    indices: Tensor | None = None
    minimum: Tensor | None = None

    def __post_init__(self) -> None:
        n, k = self.shape
        fmt = self.format
        kept = k // 2 if fmt.sparse else k
        expected: dict[str, tuple[Tensor | None, tuple[int, ...] | None]] = {
            "words": (self.words, (n, words_per_row(kept, fmt.bits))),
            "scale": (self.scale, (n, fmt.groups(k))),
            "zero": (self.zero, (n, fmt.groups(k)) if fmt.code == "asym" else None),
            "indices": (self.indices, (n, words_per_row(kept, 2)) if fmt.sparse else None),
            "minimum": (self.minimum, (n, fmt.groups(k)) if fmt.code == "min" else None),
        }
        if fmt.sparse:
            check_fours(k)
        if self.group_index is not None:
            expected["group_index"] = (self.group_index, (k,))
        for name, (tensor, shape) in expected.items():
            actual = None if tensor is None else tuple(tensor.shape)
            if actual != shape:
                raise LayerError(f"{name} of a {n} x {k} layer in {fmt} must have shape {shape}, not {actual}")
            if tensor is not None:
                _check_stored(name, tensor, self.words.device)

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        format: WeightFormat,
        group_index: Tensor | None = None,
        minimum: Tensor | None = None,
    ) -> "QuantizedWeight":
        """Pack dense codes, uint8 [N, K]; the other arguments are the fields of the same names.

        Raises LayerError for a shape or dtype that does not fit the format. For 2:4 see ``from_sparse_codes``.
        """
        n, k = codes.shape
        return cls(pack_words(codes, format.bits), scale, zero, (n, k), format, group_index, minimum=minimum)

    @classmethod
    def from_sparse_codes(
        cls, codes: Tensor, mask: Tensor, scale: Tensor, zero: Tensor | None, format: WeightFormat
    ) -> "QuantizedWeight":
        """Pack a 2:4 sparse layer: codes uint8 [N, K] and a boolean mask [N, K] with two True in every four inputs.

        scale, zero: the fields of the same names. Raises LayerError for a mask that keeps more or fewer.
        """
        n, k = codes.shape
        if k % 4 or not bool((mask.view(n, -1, 4).sum(-1) == 2).all()):
            raise LayerError(f"a 2:4 mask keeps two of every four inputs of a {n} x {k} layer; this one does not")
        places = mask.view(n, -1, 4).to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :2]
        kept = codes.view(n, -1, 4).gather(-1, places).flatten(1)
        indices = pack_words(places.flatten(1), 2)
        return cls(pack_words(kept, format.bits), scale, zero, (n, k), format, None, indices)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.words.device

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight in a checkpoint, including scales and zeros (``bits`` each)."""
        parts = (self.words, self.scale, self.group_index, self.indices, self.minimum)
        size = 8 * sum(t.numel() * t.element_size() for t in parts if t is not None)
        zeros = 0 if self.zero is None else self.zero.numel() * self.format.bits
        return (size + zeros) / (self.shape[0] * self.shape[1])

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The same layer on another device."""
        moved: _Fields = {f.name: t.to(device) for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)}
        return replace(self, **moved)

    def rows(self, rows: "Tensor | slice") -> "QuantizedWeight":
        """A layer with a subset of the outputs: a slice, or int64 indices in their new order, on any device."""
        rows = rows.to(self.device) if isinstance(rows, Tensor) else rows
        chosen = {name: t[rows].contiguous() for name in _BY_ROW if (t := getattr(self, name)) is not None}
        return replace(self, **chosen, shape=(chosen["words"].shape[0], self.shape[1]))

    def with_scales(self, dtype: torch.dtype) -> "QuantizedWeight":
        """The same codes with scales and minima in another float dtype.

        Raises LayerError if a scale or a minimum would overflow, or a scale underflow to 0.
        """
        minimum = None if self.minimum is None else self.minimum.to(dtype)
        cast = replace(self, scale=self.scale.to(dtype), minimum=minimum)
        lost = bool(((cast.scale == 0) & (self.scale != 0)).any())
        for new, old in ((cast.scale, self.scale), (minimum, self.minimum)):
            lost |= new is not None and old is not None and bool((new.isinf() & ~old.isinf()).any())
        if lost:
            sizes = self.scale[self.scale != 0].abs()
            raise LayerError(
                f"scales of {float(sizes.min()):.3g} to {float(sizes.max()):.3g} do not fit {dtype_name(dtype)}: load "
                "the model in bfloat16 or float32"
            )
        return cast

    def groups(self) -> Tensor:
        """The group of each input channel, int64 [K]."""
        k = self.shape[1]
        if self.group_index is not None:
            return self.group_index.long()
        return torch.arange(k, device=self.device) // (self.format.group or k)

    def with_group_index(self) -> "QuantizedWeight":
        """The same weight with an explicit ``group_index``, as activation order stores."""
        return replace(self, group_index=self.groups().to(torch.int32))

    def codes(self) -> Tensor:
        """Unsigned codes, uint8 [N, K]. Pruned weights of a 2:4 sparse layer get their group's zero."""
        n, k = self.shape
        if self.indices is None:
            return unpack_words(self.words, self.format.bits, k)
        places = unpack_words(self.indices, 2, k // 2).view(n, -1, 2).long()
        kept = unpack_words(self.words, self.format.bits, k // 2).view(n, -1, 2)
        pruned = self.zeros().to(torch.uint8)[:, self.groups()].view(n, -1, 4)
        return pruned.scatter(-1, places, kept).view(n, k)

    def mask(self) -> Tensor | None:
        """True for the weights that a 2:4 sparse layer keeps, bool [N, K]; None for a dense layer."""
        if self.indices is None:
            return None
        n, k = self.shape
        places = unpack_words(self.indices, 2, k // 2).view(n, -1, 2).long()
        kept = torch.zeros(n, k // 4, 4, dtype=torch.bool, device=self.device)
        return kept.scatter_(-1, places, True).view(n, k)

    def zeros(self) -> Tensor:
        """The zero of each group as a code, float32 [N, G]."""
        if self.zero is not None:
            return self.zero.float()
        zero = self.format.zero
        assert zero is not None
        return torch.full_like(self.scale, zero, dtype=torch.float32)

    def centered(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Codes minus their zeros, [N, K] in a float dtype: integers, or odd multiples of 1/2 for bipolar codes.

        Table codes give their table values; codes with a minimum have no zero, and are returned as they are.
        """
        if self.format.tabled:
            return table_of(self.format.code).to(self.device, dtype)[self.codes().int()]
        codes = self.codes().to(dtype)
        if self.zero is None:
            return codes.sub_(self.format.zero or 0.0)
        return self.by_group(codes, Tensor.sub_, self.zero.to(dtype))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantized weights, [N, K]: float32 arithmetic (float64 for a float64 dtype), rounded to dtype once."""
        work = torch.float64 if dtype == torch.float64 else torch.float32
        values = self.by_group(self.centered(work), Tensor.mul_, self.scale.to(work))
        if self.minimum is not None:
            values = self.by_group(values, Tensor.add_, self.minimum.to(work))
        return values.to(dtype)

    def by_group(self, values: Tensor, operation: Callable[[Tensor, Tensor], Tensor], groups: Tensor) -> Tensor:
        """Apply an in-place operation to values [N, K] with per-group operands [N, G]."""
        size = self.shape[1] // groups.shape[1]
        if self.group_index is None and size * groups.shape[1] == self.shape[1] and size == (self.format.group or size):
            # A broadcast is much cheaper than gathering a scale for every weight.
            operation(values.view(self.shape[0], -1, size), groups[:, :, None])
        else:
            operation(values, groups[:, self.groups()])
        return values


def stack(weights: list[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate the outputs of layers that read the same inputs into one layer.

    Raises LayerError unless all have the same format, inputs and activation order.
    """
    first = weights[0]
    for weight in weights[1:]:
        if weight.format != first.format or weight.shape[1] != first.shape[1]:
            raise LayerError(
                f"layers of {first.shape[1]} inputs in {first.format} and of {weight.shape[1]} in {weight.format} "
                "cannot be stacked"
            )
        if not _same(weight.group_index, first.group_index):
            raise LayerError("layers with different activation orders cannot be stacked")

    stored = [name for name in _BY_ROW if getattr(first, name) is not None]
    joined: _Fields = {name: torch.cat([getattr(w, name) for w in weights]) for name in stored}
    return replace(first, **joined, shape=(sum(w.shape[0] for w in weights), first.shape[1]))


def unstack(weight: QuantizedWeight, outputs: list[int]) -> list[QuantizedWeight]:
    """The inverse of ``stack``: layers with ``outputs[i]`` outputs each."""
    ends = list(itertools.accumulate(outputs))
    return [weight.rows(slice(end - n, end)) for n, end in zip(outputs, ends, strict=True)]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _check_stored(name: str, tensor: Tensor, device: torch.device) -> None:
    """Check dtype and device: kernels read these tensors through raw pointers."""
    wanted = {"zero": torch.uint8, "scale": None, "minimum": None}.get(name, torch.int32)
    if not (tensor.is_floating_point() if wanted is None else tensor.dtype == wanted):
        words = "floating-point" if wanted is None else dtype_name(wanted)
        raise LayerError(f"{name} of a layer must be {words}, not {dtype_name(tensor.dtype)}")
    if tensor.device != device:
        raise LayerError(f"{name} of a layer is on {tensor.device}, and its words are on {device}: move one of them")


def _check_bits(bits: int) -> None:
    if bits not in range(1, 9):
        raise LayerError(f"codes must have 1 to 8 bits, not {bits}")


READ_ONLY = (
    "a quantized layer's weight is a copy to read, and the layer's codes would not change: give the layer a new weight "
    "with load_weight(quantize_weight(tensor, layer.scheme.weights)), or change plain layers after model.dequantize(); "
    "clone() makes a copy to write to"
)


class DequantizedWeight(Tensor):
    """A copy of a layer's weight to read: results are plain tensors; writes, also through views, raise LayerError.

    ``nn.Parameter`` of one is an independent parameter.
    """

    _detached = False

    @staticmethod
    def of(tensor: Tensor) -> Tensor:
        """The tensor as one; traced by torch.compile, the tensor itself."""
        if torch.compiler.is_compiling():
            return tensor
        with torch.inference_mode(False):  # inference tensors do not count writes
            copy = (tensor.clone() if tensor.is_inference() else tensor).as_subclass(DequantizedWeight)
        # Some models' _init_weights reaches into children: without this flag it would initialize this copy.
        copy._is_hf_initialized = True
        return copy

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function of torch; raises LayerError if it wrote, or tried to."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling():
                return func(*args, **kwargs)
            copies = [t for t in tree_leaves((args, kwargs)) if isinstance(t, cls)]
            trained = func is Tensor.requires_grad_ and not getattr(args[0], "_detached", False) and (*args, True)[1]
            if trained or getattr(func, "__name__", "") == "__set__":
                raise LayerError(READ_ONLY)
            versions = [t._version for t in copies]
            result = func(*args, **kwargs)
            if versions != [t._version for t in copies]:
                raise LayerError(READ_ONLY)
            memory = set(map(_address, copies))

            def marked(found: object) -> object:
                """A view as a DequantizedWeight, and any other tensor as a plain one."""
                if not isinstance(found, Tensor) or any(found is t for t in copies):
                    return found
                if _address(found) not in memory:
                    return found.as_subclass(Tensor) if type(found) is cls else found
                view = found.as_subclass(cls)
                if func is Tensor.detach:
                    view._detached = True
                return view

            return tree_map(marked, result)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_is_param":  # the last thing that nn.Parameter does
            self.__class__ = nn.Parameter  # type: ignore[assignment]
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        copied: Tensor
        memo[id(self)] = copied = self.as_subclass(Tensor).__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _address(tensor: Tensor) -> int | None:
    """Where a tensor's memory begins; None for those without: sparse ones, and those of torch.func's transforms."""
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:
        return None
