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

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of codes 0 to 7; the fourth bit is the sign."""


def _depth_places(keys: bool) -> Tensor:
    """The element (of 64) at every depth."""
    place = torch.arange(64)
    half, t, n = place // 32, place % 32 // 8, place % 8
    within = 4 * t + n % 4 if keys else 2 * t + n % 2 + 8 * (n % 4 // 2)
    return 32 * half + 16 * (n // 4) + within


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
    lead = x.shape[:-2]
    x = x.float().nan_to_num(0.0) if keys else x.float().nan_to_num(0.0).transpose(-1, -2)
    rows, depth = x.shape[-2:]
    e = x.reshape(-1, rows // 16, 16, depth // 64, 64)[..., _depth_places(keys).to(x.device)]
    e = e.permute(0, 3, 1, 2, 4).reshape(-1, depth // 64, rows // 16, 16, 4, 16)  # [n, step, tile, row, scale, place]
    scale = (e.abs().amax(-1, keepdim=True) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    inverse = torch.where(scale.float() > 0, 1 / scale.float(), 0.0)
    codes = round_e2m1(e * inverse).reshape(-1, depth // 64, rows // 16, 2, 8, 2, 4, 8)  # [.., h, g, half, t, n]
    nibbles = codes.permute(0, 1, 2, 4, 6, 5, 3, 7).reshape(len(codes), -1, 4, 2)  # four bytes a word, two codes a byte
    bytes_ = (nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8).reshape(len(codes), -1)
    return torch.cat((bytes_, scale.view(torch.uint8).reshape(len(codes), -1)), -1).reshape(*lead, -1)


def decode(half: Tensor, keys: bool, tokens: int, channels: int) -> Tensor:
    """The inverse of ``encode``: uint8 [..., bytes] -> float32 [..., tokens, channels]."""
    lead = half.shape[:-1]
    rows, depth = (tokens, channels) if keys else (channels, tokens)
    flat = half.reshape(-1, half.shape[-1])
    codes, scales = flat[:, : rows * depth // 2], flat[:, rows * depth // 2 : rows * depth // 2 + rows * depth // 16]
    both = torch.stack((codes & 15, codes >> 4), -1).long()
    both = both.reshape(-1, depth // 64, rows // 16, 8, 4, 2, 2, 8).permute(0, 1, 2, 6, 3, 5, 4, 7)
    signed = torch.tensor([*VALUES, *(-v for v in VALUES)], device=half.device)
    e = signed[both.reshape(-1, depth // 64, rows // 16, 16, 4, 16)]
    e = e * scales.contiguous().view(torch.float8_e4m3fn).float().reshape(-1, depth // 64, rows // 16, 16, 4, 1)
    x = torch.empty(len(e), depth // 64, rows // 16, 16, 64, device=half.device)
    x[..., _depth_places(keys).to(half.device)] = e.reshape(x.shape)
    x = x.permute(0, 2, 3, 1, 4).reshape(*lead, rows, depth)
    return x if keys else x.transpose(-1, -2)
