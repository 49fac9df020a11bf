"""Blocks of 4-bit floats (NVFP4) for a KV cache: e2m1 values with an e4m3 scale per 16 along the MMA's K.

Fragment order of the A operand of ``mma.m16n8k64.kind::mxf4nvf4``: a tile is 16 rows by 64 along K ("depth"); lane
4 * g + t holds four words of eight values, (half, h) = 00, 01, 10, 11, for row 8 * h + g and depth
32 * half + 8 * t + n. Keys have tokens as rows and channels as depth, values channels as rows and tokens as depth. The
element at each depth is chosen so that queries and probabilities need not move between lanes:

    keys    channel 64 * step + 32 * half + 16 * (n / 4) + 4 * t + n % 4
    values  token   64 * step + 32 * half + 16 * (n / 4) + 2 * t + n % 2 + 8 * (n % 4 / 2)

Depths 16 * s .. 16 * s + 15 share a scale. A half of a block is its tiles (depth steps outer, row tiles inner), then a
word of four scales for every tile and row.
Not run on hardware: only emulated, and compiled for sm_120a.
"""

from functools import cache

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of codes 0 to 7; the fourth bit is the sign."""


@cache
def _places(keys: bool, tokens: int, channels: int) -> tuple[Tensor, Tensor]:
    """Where the codes of a half lie, counted in codes, and their scales: both int64 [tokens, channels]."""
    token, channel = torch.arange(tokens, device="cpu")[:, None], torch.arange(channels, device="cpu")
    row, depth, rows = (token, channel, tokens) if keys else (channel, token, channels)
    tile, half = depth // 64 * (rows // 16) + row // 16, depth % 64 // 32
    t, n = (depth % 16 // 4, depth % 4) if keys else (depth % 8 // 2, depth % 16 // 8 * 2 + depth % 2)
    n = n + depth % 32 // 16 * 4
    code = (((tile * 8 + row % 8) * 4 + t) * 4 + 2 * half + row % 16 // 8) * 8 + n
    return code, (tile * 16 + row % 16) * 4 + 2 * half + t // 2


def round_e2m1(x: Tensor) -> Tensor:
    """Round x to the nearest e2m1 codes 0 .. 15, ties to even, saturating."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device, dtype=x.dtype)
    size = x.abs().unsqueeze(-1)
    # Ties go to the even code: a midpoint above an even code rounds down, above an odd one up.
    odd = torch.arange(7, device=x.device) % 2 == 1
    codes = torch.where(odd, size >= middles, size > middles).sum(-1)
    return codes + 8 * (x < 0) * (codes > 0)


def encode(x: Tensor, keys: bool) -> Tensor:
    """Encode K or V [..., tokens, channels] of a block as its half: uint8 [..., bytes]."""
    place, of_scale = (places.flatten().to(x.device) for places in _places(keys, *x.shape[-2:]))
    e = x.float().nan_to_num(0.0).flatten(-2)
    most = e.new_zeros(*e.shape[:-1], e.shape[-1] // 16).scatter_reduce(-1, of_scale.expand_as(e), e.abs(), "amax")
    scale = (most / 6).clamp(max=448).to(torch.float8_e4m3fn)
    inverse = torch.where(scale.float() > 0, 1 / scale.float(), 0.0)
    codes = round_e2m1(e * inverse[..., of_scale])[..., place.argsort()].unflatten(-1, (-1, 2))  # two a byte
    return torch.cat(((codes[..., 0] | codes[..., 1] << 4).to(torch.uint8), scale.view(torch.uint8)), -1)


def decode(half: Tensor, keys: bool, tokens: int, channels: int) -> Tensor:
    """The inverse of ``encode``: uint8 [..., bytes] -> float32 [..., tokens, channels]."""
    place, of_scale = (places.to(half.device) for places in _places(keys, tokens, channels))
    size = tokens * channels // 2
    codes = torch.stack((half[..., :size] & 15, half[..., :size] >> 4), -1).flatten(-2)[..., place]
    scale = half[..., size : size + size // 8].contiguous().view(torch.float8_e4m3fn).float()
    signed = torch.tensor([*VALUES, *(-v for v in VALUES)], device=half.device)
    return signed[codes.long()] * scale[..., of_scale]
