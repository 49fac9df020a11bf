"""Which kernel multiplies packed weights with few tokens: packed_digits, packed_small or packed_mid."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from anybit.device import Device
from anybit.kernels import packed_digits, packed_mid, packed_small
from anybit.kernels.packed_small import Problem

MOST_TOKENS = 16
"""Above this many tokens packed_large is the built-in choice."""
_UNIT_ROWS = 16


def kernel(problem: Problem) -> ModuleType | None:
    """What was fastest on an H200 (docs/packed.md); None where none of them runs, or packed_large is faster."""
    p = problem
    units = -(-p.n // (_UNIT_ROWS * p.device.sms))
    # From 9 tokens on packed_large takes 18.2 us for gate_up, 11.5 for down and 5.3 for o, where packed_mid takes 20 to
    # 21, 14 and 5.6; only qkv is left to it (6.5 to 7.3, and 7.2), whose blocks' share of the activations is small.
    mid = p.m <= 8 or (units in (3, 4) and p.columns <= 6144)
    if p.m > MOST_TOKENS or not mid or (p.m > 8 and p.activations == torch.int8):
        return None
    # Of int8 from 5 tokens on: 25 to 27 us in packed_small, 17.3 in packed_large.
    if p.m > 4 and p.activations == torch.int8 and units > 4:
        return None
    if p.m > (4 if p.weights.bits <= 3 and units > 3 else 2):
        order = [packed_mid, packed_small]
    else:
        order = [packed_digits, packed_small]
    return next((module for module in order if module.why_not(problem) is None), None)


def apart(config: Any, device: Device) -> Any:
    """A config of which two blocks never share a multiprocessor, for layers of a model; others' configs as they are.

    Blocks are placed while those of the kernel ahead leave: the multiprocessors that are free first would take two
    blocks of a small layer, others none, and the layer would take as long as two blocks on one multiprocessor do; what
    follows is placed no better (32 layers of an 8B model on an H200: 2.06 ms a step, and 1.70 ms apart). Products that
    are cut into several chunks stay as they are: their rings fit beside those of the layer ahead.
    """
    for module, chunks in ((packed_digits, "chunks"), (packed_small, "row_chunks"), (packed_mid, "chunks")):
        if isinstance(config, module.Config):
            least = device.shared_bytes // 2
            alone = getattr(config, chunks) == 1 and module.shared_bytes(config) < least
            return replace(config, least_shared=least) if alone else config
    return config
