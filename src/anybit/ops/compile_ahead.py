"""Compile the kernels of a model's layers for every token count, before the first request.

Each kind of layer is planned at each token count, which needs no tensors. Kernels missing from the disk cache are
compiled in parallel, by one process per core.
"""

import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anybit import jit
from anybit.choose.builtin import MOST_TOKENS
from anybit.choose.space import STEPS
from anybit.device import Device
from anybit.jit import Kernel as Kernel
from anybit.jit import Slot
from anybit.jit.cache import fetch
from anybit.kernels.block import hadamard, rope_pages
from anybit.kernels.block.quantize_activations import Source
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.ops.backend import LinearSpec
from anybit.ops.elementwise import norm_plan, silu_plan
from anybit.ops.experts import experts_plan
from anybit.ops.fused import rotation_refused
from anybit.ops.plans import Rows
from anybit.ops.prepared_experts import ExpertsSpec
from anybit.ops.product import Norm, asked_of, layer_plan, norm_config
from anybit.ops.router import router_plan
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
class ExpertsKind:
    """Layers of experts that launch the same kernels. spec: ``str`` of their ExpertsSpec.  top: experts of a token.

    router: experts and ``renormalize`` of anybit's router; None where another one runs.
    """

    spec: str
    dtype: torch.dtype
    top: int
    bias: bool
    router: tuple[int, bool] | None = None


@dataclass(frozen=True)
class CompiledAhead:
    """The result: kernels ready, how many of them were compiled, seconds in all and compiling, errors of the rest."""

    kernels: int
    compiled: int
    seconds: float
    compile_seconds: float
    refused: list[str]


def compile_ahead(kinds: Mapping[LayerKind | ExpertsKind, list[Tensor]], most: int) -> CompiledAhead:
    """Compile all kernels that layers launch for 1 to ``most`` tokens, and load them on the CUDA device of the tensors.

    kinds: for each kind, the tensors of one such layer from ``ops.prepare``; of experts, those of gate_up.
    """
    start = time.perf_counter()
    device = next(iter(kinds.values()))[0].device
    counts = [m for m in STEPS if m < most]
    while most > MOST_TOKENS and 2 * counts[-1] < most:  # beyond MOST_TOKENS, kernels are chosen for powers of two
        counts.append(2 * counts[-1])
    counts.append(most)
    kernels = dict[jit.Kernel, None]()
    for kind, tensors in kinds.items():
        if isinstance(kind, ExpertsKind):
            kernels.update(dict.fromkeys(kernels_of_experts(kind, tensors[0], most)))
            continue
        for tokens in counts:
            if kind.most is None or tokens < 2 * kind.most:
                kernels.update(dict.fromkeys(kernels_of(kind, tensors, min(tokens, kind.most or tokens))))
    return make_ready(list(kernels), device, start)


def make_ready(kernels: list[jit.Kernel], device: torch.device, start: float | None = None) -> CompiledAhead:
    """Compile kernels that the disk cache lacks, and load all on a CUDA device. start: perf_counter to time from."""
    start = time.perf_counter() if start is None else start
    arch = Device.of(torch.empty(0, device=device)).arch
    found = {kernel: fetch(kernel, arch) for kernel in kernels}
    missing = [kernel for kernel, code in found.items() if code is None]
    random.Random(os.getpid()).shuffle(missing)  # ranks that start together compile different ones first
    decided = time.perf_counter()
    refused = compile_kernels([(kernel, arch) for kernel in missing])
    compiled = time.perf_counter()
    for kernel, code in found.items():
        jit.launcher(kernel, device.index or 0, code)
    return CompiledAhead(len(kernels), len(missing), time.perf_counter() - start, compiled - decided, refused)


def kernels_of_experts(kind: ExpertsKind, weight: Tensor, most: int) -> Iterator[jit.Kernel]:
    """The kernels of experts for 1 to ``most`` tokens with int32 ids. weight: a tensor on their device."""
    spec, tokens = ExpertsSpec.parse(kind.spec), 1
    k, gpu = spec.gate_up.k, Device.of(weight)
    while tokens <= most:
        rows = Rows(Slot("x"), tokens, k, k, k % 8 == 0, kind.dtype, weight.device, gpu)
        yield from experts_plan(spec, rows, kind.top, torch.int32, (kind.bias, kind.bias)).kernels
        if kind.router is not None:
            for epsilon in (None, 1e-5):
                yield from router_plan(rows, kind.router[0], kind.top, kind.router[1], epsilon).kernels
        tokens += 1 + tokens // 16  # close enough that no tile of tokens is left out


def kernels_of(kind: LayerKind, tensors: list[Tensor], tokens: int) -> Iterator[jit.Kernel]:
    """The kernels of every op that a graph may run on a layer with ``tokens`` tokens."""
    spec, device = LinearSpec.parse(kind.spec), tensors[0].device
    gpu = Device.of(tensors[0])

    def rows(k: int) -> Rows:
        return Rows(Slot("x"), tokens, k, k, k % 8 == 0, kind.dtype, device, gpu)

    asked = replace(asked_of(spec, tensors, None), bias=(kind.dtype, True) if kind.bias else None)
    x, norm, coded = rows(spec.k), Norm(1e-5), spec.activations.quantized
    inside = kind.rotated and coded and rotation_refused(spec.k, kind.dtype, gpu) is None
    if kind.rotated and not inside:
        turned = hadamard.Problem(tokens, spec.k, kind.dtype, gpu)
        if hadamard.why_not(turned) is None:
            yield hadamard.kernel(hadamard.default(turned))
    yield from layer_plan(asked, x, rotated=inside).kernels
    if kind.most is not None:
        return
    if asked.columns or (kind.rotated and not inside):  # op by op
        yield from norm_plan(x, norm).kernels
    else:
        for silu in (False, True) if kind.paired else (False,):
            yield from layer_plan(asked, x, (), silu, norm=norm, rotated=inside).kernels
        if coded:
            yield from layer_plan(asked, rows(2 * spec.k), source=Source.silu_mul, rotated=inside).kernels
    if spec.n % 16 == 0:
        yield from silu_plan(rows(spec.n), kind.paired).kernels
    if kind.heads is not None:  # its inputs are hidden states, which also go through the final norm
        yield from norm_plan(x, norm).kernels
        query_heads, key_heads, dim, paired = kind.heads
        turn = rope_pages.Problem(tokens, query_heads, key_heads, dim, kind.dtype, paired)
        yield rope_pages.kernel(rope_pages.default(turn))
        if paired and (config := norm_config(asked, x, norm)) is not None:
            yield sm90_packed_gemv.kernel(config, sm90_packed_gemv.RotaryPagesParams)
