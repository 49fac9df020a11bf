"""The page format of a quantized KV cache: the position of every code, scale and zero. The twin of ``kv_page.cuh``.

A page is self-contained: it holds codes, scales and zeros of ``page`` tokens of one KV head, so it can be shared,
copied, freed or moved alone. It is cut into blocks, the pieces that a warp copies and computes on. A block is a key
half and a value half, each one contiguous copy:

    [ key codes | key parameters ] [ value codes | value parameters | limit ] padding to a 128-byte line

Codes are in the fragment order of ``mma.m16n8k16``'s A operand, so that a lane finds its codes in its own 16-byte
vectors. Keys are tiles of 16 tokens (M) by 16 channels (K), values tiles of 16 channels (M) by 16 tokens (K). With
lane = 4 * g + t, an element of a tile has row 8 * h + g and, along K, the pair 2 * p + odd of t, with h, p in 0, 1:

    key    channel = 16 * tile + 4 * t + 2 * p + odd        (any order would do, since queries use the same)
    value  token   = 16 * tile + 8 * p + 2 * t + odd        (the order in which the QK product leaves scores)

``odd`` selects the half of a 32-bit word. Within a half, from the low bits up:
    16 bits: four words a tile, (p, h) = 00, 01, 10, 11        8 bits: two words a tile (p), h in the two bytes
     4 bits: one word a tile, fields (p, h)                    2 bits: one word for two row tiles, fields (p, tile, h)

Parameters are float16 pairs: value = scale * code + zero (here zero is the group's minimum).
    by channel (keys): for each group of tokens, tile of 16 channels, t:  z0 z1 s0 s1 z2 z3 s2 s3 of channels 4t .. 4t+3
    by token: for each group of channels, pair of 16-token tiles, g: (s, z) of tokens g, g+8, g+16, g+24
``limit`` (float32, padded to a 32-byte sector) is the largest probability, at most 1024, whose product with the block's
largest value scale fits float16.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anybit.errors import KernelError, LayerError
from anybit.kernels.attention.fp4 import kv_fp4
from anybit.scheme import KVFormat

PAGES = (64, 128, 256)
HEAD_DIMS = (64, 96, 128, 256)
HALF_MAX = 65504.0
LARGEST = 65408.0
"""The largest encoded magnitude: even with a rounded scale, the largest code then decodes to a finite float16."""
_PLAIN_SCALE = 6.2e-5  # above the smallest normal float16: the scale and its inverse are accurate to 2^-11
LIMIT = 1024.0
_TAIL = 32
_LINE = 128
_HALF_TARGET = 8192  # bytes of codes per copy of a warp: large enough to stream, small enough to pipeline


@dataclass(frozen=True)
class PageLayout:
    """Sizes and offsets in a page of ``page`` tokens of one KV head of ``head_dim`` channels.

    Raises LayerError, naming the dimension and what is allowed, for sizes that the format does not support.
    """

    format: KVFormat
    head_dim: int
    page: int = 128

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise LayerError(f"head_dim must be one of {HEAD_DIMS} for a paged KV cache, not {self.head_dim}")
        if self.page not in PAGES:
            raise LayerError(f"a page holds 64, 128 or 256 tokens, not {self.page}")
        f = self.format
        if f.key_bits != 16 and f.key_axis == "channel" and f.group > self.page:
            raise LayerError(f"a group of {f.group} tokens does not fit a page of {self.page}: groups never span pages")
        if f.float4 and self.head_dim % 64:
            raise LayerError(f"4-bit floats are multiplied 64 at a time, and do not divide {self.head_dim} channels")
        if self.head_dim % self.channel_group and (f.value_bits != 16 or f.key_axis == "token"):
            raise LayerError(f"groups of {f.group} channels do not divide a head of {self.head_dim} channels")

    @property
    def by_channel(self) -> bool:
        """Whether keys are grouped per channel over tokens (KC), not per token over channels (KT)."""
        return self.format.key_axis == "channel"

    @property
    def channel_group(self) -> int:
        """Channels of a token that share a scale: the format's group, at most the whole head."""
        return min(self.format.group, self.head_dim)

    @cached_property
    def block(self) -> int:
        """Tokens per block: as many as fill one copy, at least 32 and a whole group, at most 128 and the page."""
        widest = max(self.format.key_bits, self.format.value_bits)
        tokens = 128
        while tokens > 32 and tokens * self.head_dim * widest // 8 > _HALF_TARGET:
            tokens //= 2
        if self.format.key_bits != 16 and self.by_channel:
            tokens = max(tokens, self.format.group)
        if self.head_dim == 96:  # 32 tokens would end in half a vector
            tokens = max(tokens, 64)
        return min(tokens, self.page)

    @property
    def chunk(self) -> int:
        """Tokens whose keys share parameters: a group of tokens, or the block."""
        grouped = self.format.key_bits != 16 and self.by_channel
        return min(self.format.group, self.block) if grouped else self.block

    @property
    def key_codes(self) -> int:
        """Bytes of a block's key codes."""
        return self.block * self.head_dim * self.format.key_bits // 8

    @property
    def value_codes(self) -> int:
        """Bytes of a block's value codes."""
        return self.block * self.head_dim * self.format.value_bits // 8

    @property
    def key_parameters(self) -> int:
        """Bytes of a block's key scales and zeros."""
        if self.format.key_bits == 16:
            return 0
        if self.format.float4:
            return self.block * self.head_dim // 16
        count = self.head_dim * (self.block // self.chunk) if self.by_channel else self._token_pairs
        return 4 * count

    @property
    def value_parameters(self) -> int:
        """Bytes of a block's value scales and zeros, without the limit."""
        if self.format.float4:
            return self.block * self.head_dim // 16
        return 0 if self.format.value_bits == 16 else 4 * self._token_pairs

    @property
    def _token_pairs(self) -> int:
        return self.block * (self.head_dim // self.channel_group)

    @property
    def key_bytes(self) -> int:
        """Bytes of a block's key half."""
        return self.key_codes + self.key_parameters

    @property
    def value_bytes(self) -> int:
        """Bytes of a block's value half."""
        tail = 0 if self.format.value_bits == 16 or self.format.float4 else _TAIL
        return self.value_codes + self.value_parameters + tail

    @property
    def block_bytes(self) -> int:
        """Stride between blocks: whole 128-byte lines, so that every copy starts at one."""
        return -(-(self.key_bytes + self.value_bytes) // _LINE) * _LINE

    @property
    def blocks(self) -> int:
        """Blocks per page."""
        return self.page // self.block

    @property
    def page_bytes(self) -> int:
        """Bytes per page and head."""
        return self.blocks * self.block_bytes

    @property
    def bits_per_element(self) -> float:
        """Bits per element of K and V, including scales and zeros, averaged over both."""
        return self.page_bytes * 8 / (2 * self.page * self.head_dim)


@dataclass(frozen=True)
class BlockConfig:
    """Page format constants that every kernel over pages is compiled with (``kv_page::Format``)."""

    key_bits: int
    value_bits: int
    by_channel: bool
    chunk: int
    channel_group: int
    block: int
    page: int
    head_dim: int
    bf16: bool
    fp4: bool


def constants(layout: PageLayout, bf16: bool) -> dict[str, Any]:
    """The fields of ``BlockConfig`` for these pages; bf16 is the type of the residual and of 16-bit pages."""
    return {
        "key_bits": layout.format.key_bits,
        "value_bits": layout.format.value_bits,
        "by_channel": layout.by_channel,
        "chunk": layout.chunk,
        "channel_group": layout.channel_group,
        "block": layout.block,
        "page": layout.page,
        "head_dim": layout.head_dim,
        "bf16": bf16,
        "fp4": layout.format.float4,
    }


WRONG = {
    1: "a length is negative, smaller than its new tokens, or past the capacity of the page table",
    2: "the page table names a page that is not in the pool for tokens that a sequence has",
    3: "a row of the batch names a sequence that the cache does not have",
}
"""Error codes of the checked kernels."""


def report(error: int, layer: int) -> None:
    """Raise KernelError for the error code of a checked kernel; 0 is none."""
    if error:
        raise KernelError(f"layer {layer}: {WRONG.get(error, f'error {error}')} (lengths or tables were overwritten)")


def debugging() -> bool:
    """Whether kernels should check tables and lengths on the device: ANYBIT_DEBUG=1 in the environment."""
    return os.environ.get("ANYBIT_DEBUG") == "1"


def quantize(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x asymmetrically, with one scale and zero over ``dim``.

    x: any float type.  Returns uint8 codes (x's shape) and float16 scale and zero (``dim`` kept with size 1), with
    x ~ scale * code + zero; codes are computed with the stored scale and zero. A group with a non-finite value gets NaN
    scale and zero, and values beyond ``LARGEST`` are clamped to it. Codes of float16 values are computed in float16,
    like the kernel's half2 arithmetic: x - zero and the inverse of the scale are rounded; except in groups with a
    subnormal scale, a range beyond float16, or clamped values.
    """
    halves, x = x.dtype == torch.float16, x.float()
    whole = x.isfinite().all(dim, keepdim=True)
    inside = x.abs().amax(dim, keepdim=True) <= LARGEST
    x = x.clamp(-LARGEST, LARGEST)
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    top = 2**bits - 1
    step = (high - low) / torch.full_like(low, top)  # tensor by tensor: torch would multiply by a number's inverse
    scale, zero = (torch.where(whole, p, torch.nan).half() for p in (step, low))
    inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    distance = x - zero.float()
    if halves:
        plain = inside & ((scale == 0) | (scale.float() >= _PLAIN_SCALE)) & (high - low <= HALF_MAX)
        distance = torch.where(plain, distance.half().float(), distance)
        inverse = torch.where(plain, inverse.half().float(), inverse)
    codes = (distance * inverse).round().clamp(0, top)
    return codes.nan_to_num().to(torch.uint8), scale, zero


def pack_tiles(codes: Tensor, bits: int, keys: bool, chunk: int) -> Tensor:
    """Codes [..., tokens, channels] -> int32 words in kernel order [..., words]; keys in chunks of ``chunk`` tokens.

    16-bit "codes" are int16 bit patterns of the values themselves.
    """
    *lead, tokens, channels = codes.shape
    e = codes.to(torch.int64) & ((1 << bits) - 1)
    if keys:
        # [chunks, row tile, h, g, depth tile, t, p, odd]: row tiles vary fastest, then depth tiles, then chunks
        e = e.reshape(-1, tokens // chunk, chunk // 16, 2, 8, channels // 16, 4, 2, 2)
        e = e.permute(0, 1, 5, 2, 4, 6, 7, 3, 8)
    else:
        # [depth tile, p, t, odd, row tile, h, g]
        e = e.reshape(-1, tokens // 16, 2, 4, 2, channels // 16, 2, 8)
        e = e.permute(0, 1, 5, 7, 3, 2, 6, 4).unsqueeze(1)
    # Both: [n, chunk, depth tile, row tile, g, t, p, h, odd]
    n, chunks, depth, rows = e.shape[:4]
    e = e.reshape(n, chunks * depth, rows, 32, 2, 2, 2)
    if bits == 2:
        e = e.reshape(n, chunks * depth, rows // 2, 2, 32, 2, 2, 2).permute(0, 1, 2, 4, 5, 3, 6, 7)
        e = e.reshape(n, chunks * depth, rows // 2, 32, 1, 8, 2)
    else:
        e = e.reshape(n, chunks * depth, rows, 32, bits // 4, 16 // bits, 2)
    fields = torch.arange(16 // bits, device=e.device)[:, None] * bits + torch.tensor([0, 16], device=e.device)
    words = (e << fields).sum((-1, -2))  # [n, depth, row words, lane, words of a lane]
    words = words.transpose(-1, -2).reshape(n, -1, 4, 32).transpose(-1, -2)  # four words per lane are a vector
    return _as_int32(words.reshape(*lead, -1))


def unpack_tiles(words: Tensor, bits: int, keys: bool, chunk: int, tokens: int, channels: int) -> Tensor:
    """The inverse of ``pack_tiles``: words [..., words] -> uint8 codes (16 bits: int16) [..., tokens, channels]."""
    lead = words.shape[:-1]
    chunks = tokens // chunk if keys else 1
    depth = channels // 16 if keys else tokens // 16
    rows = chunk // 16 if keys else channels // 16
    w = words.to(torch.int64).reshape(-1, words.shape[-1] // 128, 32, 4).transpose(-1, -2)
    n = w.shape[0]
    of_tile = max(bits // 4, 1)
    w = w.reshape(n, chunks * depth, rows * bits // 4 // of_tile, of_tile, 32).transpose(-1, -2)
    fields = torch.arange(16 // bits, device=w.device)[:, None] * bits + torch.tensor([0, 16], device=w.device)
    e = (w[..., None, None] >> fields) & ((1 << bits) - 1)
    if bits == 2:
        e = e.reshape(n, chunks * depth, rows // 2, 32, 2, 2, 2, 2).permute(0, 1, 2, 5, 3, 4, 6, 7)
    e = e.reshape(n, chunks, depth, rows, 8, 4, 2, 2, 2)
    order = (0, 1, 3, 7, 4, 2, 5, 6, 8) if keys else (0, 1, 2, 6, 5, 8, 3, 7, 4)
    codes = e.permute(*order).reshape(*lead, tokens, channels)
    return codes.to(torch.int16) if bits == 16 else codes.to(torch.uint8)


def _as_int32(words: Tensor) -> Tensor:
    """Unsigned 32-bit words held in int64 -> the same bits as int32."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _pack_by_token(scale: Tensor, zero: Tensor) -> Tensor:
    """Scale and zero [..., tokens, groups] -> float16 [..., groups * tokens * 2] in the lanes' order."""
    *lead, tokens, groups = scale.shape
    pairs = torch.stack((scale, zero), -1).reshape(*lead, tokens // 32, 2, 2, 8, groups, 2)
    front = len(lead)
    order = (*range(front), front + 4, front, front + 3, front + 1, front + 2, front + 5)
    return pairs.permute(*order).reshape(*lead, -1)


def _unpack_by_token(packed: Tensor, tokens: int, groups: int) -> tuple[Tensor, Tensor]:
    lead = packed.shape[:-1]
    front = len(lead)
    pairs = packed.reshape(*lead, groups, tokens // 32, 8, 2, 2, 2)
    order = (*range(front), front + 1, front + 3, front + 4, front + 2, front, front + 5)
    pairs = pairs.permute(*order).reshape(*lead, tokens, groups, 2)
    return pairs[..., 0], pairs[..., 1]


def _pack_by_channel(scale: Tensor, zero: Tensor) -> Tensor:
    """Scale and zero [..., groups, channels] -> float16 [..., groups * channels * 2]."""
    *lead, groups, channels = scale.shape
    both = torch.stack((zero, scale), -2).reshape(*lead, groups, 2, channels // 4, 2, 2)  # [group, zs, 4t, p, odd]
    front = len(lead)
    order = (*range(front), front, front + 2, front + 3, front + 1, front + 4)
    return both.permute(*order).reshape(*lead, -1)


def _unpack_by_channel(packed: Tensor, groups: int, channels: int) -> tuple[Tensor, Tensor]:
    lead = packed.shape[:-1]
    front = len(lead)
    both = packed.reshape(*lead, groups, channels // 4, 2, 2, 2)
    order = (*range(front), front, front + 3, front + 1, front + 2, front + 4)
    both = both.permute(*order).reshape(*lead, groups, 2, channels)
    return both[..., 1, :], both[..., 0, :]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def encode(layout: PageLayout, keys: Tensor, values: Tensor) -> Tensor:
    """Quantize and pack whole blocks: K and V [..., tokens, head_dim], tokens a multiple of ``layout.block``.

    Returns uint8 [..., blocks, block_bytes]; a page is ``layout.blocks`` consecutive ones. Raises LayerError for other
    shapes.
    """
    *lead, tokens, channels = keys.shape
    if tokens % layout.block or channels != layout.head_dim or keys.shape != values.shape:
        raise LayerError(
            f"K {tuple(keys.shape)} and V {tuple(values.shape)} must be alike, [..., tokens, {layout.head_dim}], with "
            f"tokens a multiple of the block of {layout.block}"
        )
    k = keys.reshape(*lead, tokens // layout.block, layout.block, channels)
    v = values.reshape(k.shape)
    if layout.format.float4:
        used = torch.cat((kv_fp4.encode(k, True), kv_fp4.encode(v, False)), -1)
        return torch.nn.functional.pad(used, (0, layout.block_bytes - used.shape[-1]))
    parts = [*_encode_keys(layout, k), *_encode_values(layout, v)]
    used = torch.cat([_bytes(part) for part in parts], -1)
    return torch.nn.functional.pad(used, (0, layout.block_bytes - used.shape[-1]))


def _encode_keys(layout: PageLayout, k: Tensor) -> list[Tensor]:
    *lead, tokens, channels = k.shape
    bits = layout.format.key_bits
    if bits == 16:
        return [pack_tiles(k.contiguous().view(torch.int16), 16, True, layout.chunk)]
    if layout.by_channel:
        grouped = k.reshape(*lead, tokens // layout.chunk, layout.chunk, channels)
        codes, scale, zero = quantize(grouped, bits, -2)
        parameters = _pack_by_channel(scale.squeeze(-2), zero.squeeze(-2))
    else:
        codes, scale, zero = quantize(k.reshape(*lead, tokens, -1, layout.channel_group), bits, -1)
        parameters = _pack_by_token(scale.squeeze(-1), zero.squeeze(-1))
    return [pack_tiles(codes.reshape(k.shape), bits, True, layout.chunk), parameters]


def _encode_values(layout: PageLayout, v: Tensor) -> list[Tensor]:
    *lead, tokens, _ = v.shape
    bits = layout.format.value_bits
    if bits == 16:
        return [pack_tiles(v.contiguous().view(torch.int16), 16, False, 16)]
    codes, scale, zero = quantize(v.reshape(*lead, tokens, -1, layout.channel_group), bits, -1)
    largest = scale.float().nan_to_num(0.0).flatten(-3).amax(-1, keepdim=True)  # ignoring NaN
    limit = (torch.full_like(largest, 60000.0) / largest).clamp(
        max=LIMIT
    )  # 60000, not 65504: the product is rounded to float16 again
    tail = torch.cat((limit, limit.new_zeros(*lead, _TAIL // 4 - 1)), -1)
    return [
        pack_tiles(codes.reshape(v.shape), bits, False, 16),
        _pack_by_token(scale.squeeze(-1), zero.squeeze(-1)),
        tail,
    ]


def decode(layout: PageLayout, blocks: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Dequantize blocks: uint8 [..., blocks, block_bytes] -> K and V [..., tokens, head_dim] in ``dtype``.

    16-bit keys or values are read as ``dtype`` if that has 16 bits, else as float16.
    """
    *lead, count, _ = blocks.shape
    stored = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16
    if layout.format.float4:
        size, shape = layout.key_bytes, (*lead, count * layout.block, layout.head_dim)
        both = (blocks[..., :size], True), (blocks[..., size : 2 * size], False)
        k, v = (
            kv_fp4.decode(half, keys, layout.block, layout.head_dim).reshape(shape).to(dtype) for half, keys in both
        )
        return k, v
    k = _decode_keys(layout, blocks[..., : layout.key_bytes], stored)
    v = _decode_values(layout, blocks[..., layout.key_bytes : layout.key_bytes + layout.value_bytes], stored)
    shape = (*lead, count * layout.block, layout.head_dim)
    return k.reshape(shape).to(dtype), v.reshape(shape).to(dtype)


def _view(half: Tensor, begin: int, size: int, dtype: torch.dtype) -> Tensor:
    return half[..., begin : begin + size].contiguous().view(dtype)


def _decode_keys(layout: PageLayout, half: Tensor, stored: torch.dtype) -> Tensor:
    bits, tokens, channels = layout.format.key_bits, layout.block, layout.head_dim
    words = _view(half, 0, layout.key_codes, torch.int32)
    codes = unpack_tiles(words, bits, True, layout.chunk, tokens, channels)
    if bits == 16:
        return codes.view(stored)
    packed = _view(half, layout.key_codes, layout.key_parameters, torch.float16)
    if layout.by_channel:
        scale, zero = _unpack_by_channel(packed, tokens // layout.chunk, channels)
        repeat, dim = layout.chunk, -2
    else:
        scale, zero = _unpack_by_token(packed, tokens, channels // layout.channel_group)
        repeat, dim = layout.channel_group, -1
    scale, zero = (p.float().repeat_interleave(repeat, dim) for p in (scale, zero))
    return codes.float() * scale + zero


def _decode_values(layout: PageLayout, half: Tensor, stored: torch.dtype) -> Tensor:
    bits, tokens, channels = layout.format.value_bits, layout.block, layout.head_dim
    words = _view(half, 0, layout.value_codes, torch.int32)
    codes = unpack_tiles(words, bits, False, 16, tokens, channels)
    if bits == 16:
        return codes.view(stored)
    packed = _view(half, layout.value_codes, layout.value_parameters, torch.float16)
    scale, zero = _unpack_by_token(packed, tokens, channels // layout.channel_group)
    scale, zero = (p.float().repeat_interleave(layout.channel_group, -1) for p in (scale, zero))
    return codes.float() * scale + zero


def ring_places(ring: int, head_dim: int) -> Tensor:
    """Element offset of slot s, channel c in the residual ring, int64 [2, ring, head_dim] for K and V.

    Sixteen tokens are one contiguous run of 16-bit tiles, as in a page of 16-bit keys or values.
    """
    s, c = torch.arange(ring)[:, None], torch.arange(head_dim)[None]
    tile = (s // 16) * (head_dim // 16) + c // 16
    key = (tile * 32 + s % 8 * 4 + c % 16 // 4) * 8 + (c % 4 // 2 * 2 + s % 16 // 8) * 2 + c % 2
    value = (tile * 32 + c % 8 * 4 + s % 8 // 2) * 8 + (s % 16 // 8 * 2 + c % 16 // 8) * 2 + s % 2
    return torch.stack((key, value))
