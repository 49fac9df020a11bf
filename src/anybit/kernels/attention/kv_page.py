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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
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
        return min(self.format.group, self.block) if self.format.key_bits != 16 and self.by_channel else self.block

    def bits(self, keys: bool) -> int:
        """Bits of a key or value."""
        return self.format.key_bits if keys else self.format.value_bits

    def codes(self, keys: bool) -> int:
        """Bytes of a block's key or value codes."""
        return self.block * self.head_dim * self.bits(keys) // 8

    def parameters(self, keys: bool) -> int:
        """Bytes of a block's key or value scales and zeros, without the limit."""
        if self.bits(keys) == 16:
            return 0
        if self.format.float4:
            return self.block * self.head_dim // 16
        return 4 * self.block * self.head_dim // self.runs(keys)[1]

    def runs(self, keys: bool) -> tuple[int, int]:
        """The dimension of [tokens, channels] along which keys or values share a scale, and how many do."""
        return (-2, self.chunk) if keys and self.by_channel else (-1, self.channel_group)

    @property
    def key_bytes(self) -> int:
        """Bytes of a block's key half."""
        return self.codes(True) + self.parameters(True)

    @property
    def value_bytes(self) -> int:
        """Bytes of a block's value half."""
        tail = 0 if self.format.value_bits == 16 or self.format.float4 else _TAIL
        return self.codes(False) + self.parameters(False) + tail

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
    """Page format constants that every kernel over pages is compiled with (``kv_page::Format``).

    front, slots: residual pages of a row of an external pool, and tokens of each (``kv_rows``); 0 without a pool.
    """

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
    front: int
    slots: int


def constants(layout: PageLayout, bf16: bool, front: int, slots: int) -> dict[str, Any]:
    """The fields of ``BlockConfig`` for these pages; bf16 is the type of the residual and of 16-bit pages."""
    names = ("by_channel", "chunk", "channel_group", "block", "page", "head_dim")
    known = {"key_bits": layout.bits(True), "value_bits": layout.bits(False), "bf16": bf16, "fp4": layout.format.float4}
    known |= {"front": front, "slots": slots}
    return known | {name: getattr(layout, name) for name in names}


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


@cache
def _code_places(bits: int, keys: bool, chunk: int, tokens: int, channels: int) -> Tensor:
    """Where the codes of a half lie, int64 [tokens, channels], counted in codes, a word's from its low bits up.

    chunk: tokens per chunk of keys.
    """
    token, channel = torch.arange(tokens, device="cpu")[:, None], torch.arange(channels, device="cpu")
    if keys:
        row, p, t, odd = token % 16, channel // 2 % 2, channel // 4 % 4, channel % 2
        tile = (token // chunk * (channels // 16) + channel // 16) * (chunk // 16) + token % chunk // 16
    else:
        row, p, t, odd = channel % 16, token // 8 % 2, token // 2 % 4, token % 2
        tile = token // 16 * (channels // 16) + channel // 16
    pair = tile // 2 * 8 + 4 * p + 2 * (tile % 2) + row // 8 if bits == 2 else tile * 4 + 2 * p + row // 8
    fields, lane = 16 // bits, 4 * (row % 8) + t
    word = pair // fields
    return ((word // 4 * 32 + lane) * 4 + word % 4) * 2 * fields + odd * fields + pair % fields


@cache
def _parameter_places(by_channel: bool, runs: int, channels: int) -> Tensor:
    """Where scales and zeros lie in a half's parameters, int64 [2, runs, channels or groups of channels].

    runs: groups of tokens if by channel, else tokens.
    """
    kind, run, channel = (torch.arange(count, device="cpu") for count in (2, runs, channels))
    kind, run = kind[:, None, None], run[:, None]
    if by_channel:
        return ((run * (channels // 4) + channel // 4) * 2 + channel // 2 % 2) * 4 + 2 - 2 * kind + channel % 2
    return ((channel * (runs // 32) + run // 32) * 32 + run % 8 * 4 + run // 8 % 4) * 2 + kind


def put(values: Tensor, places: Tensor) -> Tensor:
    """Values [..., *shape] in the order of their places, int64 [*shape]: [..., elements]."""
    return values.flatten(-places.dim())[..., places.flatten().argsort().to(values.device)]


def pack_tiles(codes: Tensor, bits: int, keys: bool, chunk: int) -> Tensor:
    """Codes [..., tokens, channels] -> int32 words in kernel order [..., words]; keys in chunks of ``chunk`` tokens.

    16-bit "codes" are int16 bit patterns of the values themselves.
    """
    placed = put(codes, _code_places(bits, keys, chunk, *codes.shape[-2:]))
    fields = placed.unflatten(-1, (-1, 32 // bits)).to(torch.int64) & ((1 << bits) - 1)
    words = (fields << bits * torch.arange(32 // bits, device=codes.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_tiles(words: Tensor, bits: int, keys: bool, chunk: int, tokens: int, channels: int) -> Tensor:
    """The inverse of ``pack_tiles``: words [..., words] -> uint8 codes (16 bits: int16) [..., tokens, channels]."""
    fields = words[..., None] >> bits * torch.arange(32 // bits, dtype=torch.int32, device=words.device)
    codes = (fields & ((1 << bits) - 1)).to(torch.int16 if bits == 16 else torch.uint8).flatten(-2)
    return codes[..., _code_places(bits, keys, chunk, tokens, channels).to(words.device)]


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
    blocks = [x.reshape(*lead, tokens // layout.block, layout.block, channels) for x in (keys, values)]
    if layout.format.float4:
        parts = [kv_fp4.encode(x, of_keys) for x, of_keys in zip(blocks, (True, False), strict=True)]
    else:
        parts = [*_encode_half(layout, blocks[0], True), *_encode_half(layout, blocks[1], False)]
    used = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    return torch.nn.functional.pad(used, (0, layout.block_bytes - used.shape[-1]))


def _encode_half(layout: PageLayout, x: Tensor, keys: bool) -> Iterator[Tensor]:
    """Codes, parameters and limit of blocks of keys or values [..., tokens, channels]."""
    bits = layout.bits(keys)
    if bits == 16:
        yield pack_tiles(x.contiguous().view(torch.int16), 16, keys, layout.chunk)
        return
    dim, run = layout.runs(keys)
    codes, scale, zero = quantize(x.unflatten(dim, (-1, run)), bits, dim)
    scale, zero = scale.squeeze(dim), zero.squeeze(dim)
    yield pack_tiles(codes.reshape(x.shape), bits, keys, layout.chunk)
    yield put(torch.stack((scale, zero), -3), _parameter_places(dim == -2, *scale.shape[-2:]))
    if not keys:
        largest = scale.float().nan_to_num(0.0).flatten(-2).amax(-1, keepdim=True)  # ignoring NaN
        # Of 60000, not 65504: the product is rounded to float16 again.
        limit = (torch.full_like(largest, 60000.0) / largest).clamp(max=LIMIT)
        yield torch.nn.functional.pad(limit, (0, _TAIL // 4 - 1))


def decode(layout: PageLayout, blocks: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Dequantize blocks: uint8 [..., blocks, block_bytes] -> K and V [..., tokens, head_dim] in ``dtype``.

    16-bit keys or values are read as ``dtype`` if that has 16 bits, else as float16.
    """
    stored = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16
    half_of = partial(_decode_half, layout, stored)
    if layout.format.float4:
        half_of = partial(kv_fp4.decode, tokens=layout.block, channels=layout.head_dim)
    end = layout.key_bytes + layout.value_bytes
    halves = (blocks[..., : layout.key_bytes], True), (blocks[..., layout.key_bytes : end], False)
    k, v = (half_of(half, keys).flatten(-3, -2).to(dtype) for half, keys in halves)
    return k, v


def _decode_half(layout: PageLayout, stored: torch.dtype, half: Tensor, keys: bool) -> Tensor:
    """Keys or values [..., tokens, channels] of blocks, in float32, or ``stored`` if they have 16 bits."""
    bits, size = layout.bits(keys), layout.codes(keys)
    words = half[..., :size].contiguous().view(torch.int32)
    codes = unpack_tiles(words, bits, keys, layout.chunk, layout.block, layout.head_dim)
    if bits == 16:
        return codes.view(stored)
    dim, run = layout.runs(keys)
    shape = [layout.block, layout.head_dim]
    shape[dim] //= run
    packed = half[..., size : size + layout.parameters(keys)].contiguous().view(torch.float16).float()
    both = packed[..., _parameter_places(dim == -2, *shape).to(half.device)].repeat_interleave(run, dim)
    scale, zero = both.unbind(-3)
    return codes.float() * scale + zero


def ring_places(ring: int, head_dim: int) -> Tensor:
    """Element offset of slot s, channel c in the residual ring, int64 [2, ring, head_dim] for K and V.

    Sixteen tokens are one contiguous run of 16-bit tiles, as in a page of 16-bit keys or values.
    """
    return torch.stack([_code_places(16, keys, 16, ring, head_dim) for keys in (True, False)])
