"""Kernels of every token count that an engine can ask for, compiled while its model loads.

The last layer that becomes ready starts it: each kind of layer is asked, for each count, which kernels it would launch
(nothing runs), and those that are not in the cache on disk are compiled by as many processes as there are cores.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none

from anybit import jit
from anybit.device import Device
from anybit.jit.cache import on_disk
from anybit.ops.backend import LinearSpec
from anybit.tune.plans import compile_kernels
from anybit.tune.registry import STEPS

_logger = logging.getLogger("vllm.anybit")
_TOKENS = 8192
"""The most tokens of a step where no engine says it."""


@dataclass(frozen=True)
class _Kind:
    """Layers whose kernels are the same."""

    spec: str
    dtype: torch.dtype
    bias: bool
    hadamard: bool


class Ledger:
    """The layers of a model that are to become ready, and those that are."""

    def __init__(self) -> None:
        self._expected = self._ready = 0
        self._kinds: dict[_Kind, list[Tensor]] = {}
        self._tokens = _TOKENS

    def expect(self) -> None:
        """One more layer is being built."""
        self._expected += 1
        config = get_current_vllm_config_or_none()
        if config is not None:
            self._tokens = config.scheduler_config.max_num_batched_tokens or _TOKENS

    def add(self, layer: Any, products: list[Any]) -> None:
        """A layer is ready; with the last one, all kernels are compiled."""
        self._ready += 1
        for product in products:
            tensors = [getattr(layer, name) for name in product.tensors]
            kind = _Kind(product.spec, layer.params_dtype, layer.bias is not None, product.hadamard)
            if tensors[0].is_cuda:
                self._kinds.setdefault(kind, tensors)
        if self._ready == self._expected and self._kinds:
            compile_ahead(self._kinds, self._tokens)
            self._kinds = {}


def compile_ahead(kinds: dict[_Kind, list[Tensor]], most: int) -> None:
    """Compile what layers launch for 1 to ``most`` tokens, and load it onto their device; says how long that took."""
    start = time.perf_counter()
    device = next(iter(kinds.values()))[0].device
    counts = [m for m in STEPS if m < most] + [1 << i for i in range(13, most.bit_length()) if 1 << i < most] + [most]

    def call_all() -> None:
        for kind, tensors in kinds.items():
            for tokens in counts:
                _call(kind, tensors, tokens)

    kernels = jit.kernels_of(call_all)
    arch = Device.of(torch.empty(0, device=device)).arch
    missing = [kernel for kernel in kernels if not on_disk(kernel, arch)]
    decided = time.perf_counter()
    for reason in compile_kernels([(kernel, arch) for kernel in missing]):
        _logger.warning("anybit: a kernel is left to be compiled at its first launch: %s", reason)
    compiled = time.perf_counter()
    for kernel in kernels:
        jit.load(kernel, device.index or 0)
    _logger.info(
        "anybit: %d kernels of %d kinds of layers for up to %d tokens are ready after %.1f s; %d compiled in %.1f s",
        len(kernels), len(kinds), most, time.perf_counter() - start, len(missing), compiled - decided,
    )  # fmt: skip


def _call(kind: _Kind, tensors: list[Tensor], tokens: int) -> None:
    """All that vLLM's graph may call of a layer with so many tokens; ``jit.kernels_of`` keeps it from running."""
    spec = LinearSpec.parse(kind.spec)

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=kind.dtype, device=tensors[0].device)

    x, bias = room(tokens, spec.k), room(spec.n) if kind.bias else None
    if kind.hadamard:
        torch.ops.anybit.hadamard_linear(x, tensors, bias, kind.spec)
    else:
        torch.ops.anybit.linear(x, tensors, bias, kind.spec)
    coded = spec.activations.quantized
    gamma, halves = room(spec.k), spec.n % 16 == 0
    torch.ops.anybit.norm_linear(x, x, gamma, 1e-5, tensors, bias, kind.spec, False, kind.hadamard)
    if halves:
        torch.ops.anybit.silu_mul(room(tokens, spec.n), not coded)
        if not coded and not kind.hadamard:
            torch.ops.anybit.norm_linear(x, x, gamma, 1e-5, tensors, bias, kind.spec, True)
    if coded:
        torch.ops.anybit.silu_linear(room(tokens, 2 * spec.k), tensors, bias, kind.spec, kind.hadamard)
