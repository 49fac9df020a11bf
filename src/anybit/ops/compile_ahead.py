"""Compile the kernels of a model's layers for every token count, before the first request.

Each kind of layer is dry-run at each token count to record which kernels it would launch. Those missing from the disk
cache are compiled in parallel, by one process per core. The recorded list is cached on disk, too.
"""

import functools
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit import jit
from anybit.choose.builtin import MOST_TOKENS
from anybit.choose.dispatch import dispatcher
from anybit.choose.registry import STEPS
from anybit.device import Device
from anybit.jit.cache import fetch
from anybit.ops import kept_choices
from anybit.ops.backend import LinearSpec
from anybit.ops.pages import RopePagesArgs, norm_rotate_pages, rotate_pages
from anybit.tune.processes import compile_kernels


@dataclass(frozen=True)
class LayerKind:
    """Layers that launch the same kernels. spec: ``str`` of their LinearSpec.  rotated: inputs go through ``hadamard``.

    heads: of a QKV projection followed by ``pages`` (RoPE and KV store): (query heads, KV heads, head_dim, paired).
    most: most tokens, for an output head, which runs nothing but its GEMM.  paired: gate and up outputs are interleaved
    eight by eight.
    """

    spec: str
    dtype: torch.dtype
    bias: bool
    rotated: bool = False
    heads: tuple[int, int, int, bool] | None = None
    most: int | None = None
    paired: bool = False


@dataclass(frozen=True)
class CompiledAhead:
    """The result: kernels ready, how many of them were compiled, seconds in all and compiling, errors of the rest."""

    kernels: int
    compiled: int
    seconds: float
    compile_seconds: float
    refused: list[str]


def compile_ahead(kinds: Mapping[LayerKind, list[Tensor]], most: int) -> CompiledAhead:
    """Compile all kernels that layers launch for 1 to ``most`` tokens, and load them on the CUDA device of the tensors.

    kinds: for each kind, the tensors of one such layer from ``ops.prepare``.
    """
    start = time.perf_counter()
    device = next(iter(kinds.values()))[0].device
    counts = [m for m in STEPS if m < most]
    while most > MOST_TOKENS and 2 * counts[-1] < most:  # beyond MOST_TOKENS, plans are made for powers of two
        counts.append(2 * counts[-1])
    counts.append(most)

    def call_all() -> None:
        for kind, tensors in kinds.items():
            for tokens in counts:
                if kind.most is None:
                    _call(kind, tensors, tokens)
                elif tokens < 2 * kind.most:
                    _multiply(kind, tensors, min(tokens, kind.most))

    gpu = Device.of(torch.empty(0, device=device))
    layers = [f"{kind} {[tuple(one.shape) for one in tensors]}" for kind, tensors in kinds.items()]
    name, choices = kept_choices.name_of(layers, most, gpu), dispatcher(gpu.name).choices
    kept = None if name is None else kept_choices.read(name)
    if kept is not None:
        choices.update(kept.choices)
        return make_ready(kept.kernels, device, start)
    kernels = jit.kernels_of(call_all)
    if name is not None:
        kept_choices.write(name, kept_choices.Chosen(kernels, choices))
    return make_ready(kernels, device, start)


def make_ready(kernels: list[jit.Kernel], device: torch.device, start: float | None = None) -> CompiledAhead:
    """Compile kernels that the disk cache lacks, and load all on a CUDA device. start: perf_counter to time from."""
    start = time.perf_counter() if start is None else start
    arch = Device.of(torch.empty(0, device=device)).arch
    missing = [kernel for kernel in kernels if not fetch(kernel, arch)]
    random.Random(os.getpid()).shuffle(missing)  # ranks that start together compile different ones first
    decided = time.perf_counter()
    refused = compile_kernels([(kernel, arch) for kernel in missing])
    compiled = time.perf_counter()
    for kernel in kernels:
        jit.load(kernel, device.index or 0)
    return CompiledAhead(len(kernels), len(missing), time.perf_counter() - start, compiled - decided, refused)


def _call(kind: LayerKind, tensors: list[Tensor], tokens: int) -> None:
    """Call every op that a graph may run on a layer with ``tokens`` tokens (``jit.kernels_of`` skips the launches)."""
    spec = LinearSpec.parse(kind.spec)

    room = functools.partial(_room, kind, tensors)
    x, gamma, bias = _multiply(kind, tensors, tokens)
    coded = spec.activations.quantized
    torch.ops.anybit.norm_linear(x, x, gamma, 1e-5, tensors, bias, kind.spec, False, kind.rotated)
    if spec.n % 16 == 0:
        torch.ops.anybit.silu_mul(room(tokens, spec.n), kind.paired)
    if kind.paired:
        torch.ops.anybit.norm_linear(x, x, gamma, 1e-5, tensors, bias, kind.spec, True, kind.rotated)
    if coded:
        torch.ops.anybit.silu_linear(room(tokens, 2 * spec.k), tensors, bias, kind.spec, kind.rotated)
    if kind.heads is not None:  # its inputs are hidden states, which also go through the final norm
        torch.ops.anybit.add_rms_norm(x, x, gamma, 1e-5)
        query_heads, key_heads, dim, paired = kind.heads
        positions = torch.zeros(tokens, dtype=torch.int64, device=tensors[0].device)
        step = RopePagesArgs(room(1, dim), positions, None, None, None, query_heads, key_heads)
        width = (query_heads + 2 * key_heads) * dim  # of the whole layer, which may be several GEMMs
        rotate_pages(step, room(tokens, width), paired=paired)
        if paired:
            norm_rotate_pages(step, x, x, gamma, 1e-5, tensors, bias, kind.spec)


def _room(kind: LayerKind, tensors: list[Tensor], *shape: int) -> Tensor:
    return torch.empty(shape, dtype=kind.dtype, device=tensors[0].device)


def _multiply(kind: LayerKind, tensors: list[Tensor], tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Call a layer's plain GEMM. Returns x, a gamma for norms before it, and the bias."""
    spec, room = LinearSpec.parse(kind.spec), functools.partial(_room, kind, tensors)
    x, gamma, bias = room(tokens, spec.k), room(spec.k), room(spec.n) if kind.bias else None
    if kind.rotated:
        torch.ops.anybit.hadamard_linear(x, tensors, bias, kind.spec)
    else:
        torch.ops.anybit.linear(x, tensors, bias, kind.spec)
    return x, gamma, bias
