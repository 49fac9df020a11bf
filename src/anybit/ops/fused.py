"""Linear layers fused with what precedes them: RMSNorm, silu(gate) * up, or a Hadamard rotation.

With quantized activations these run inside the quantize-and-pack kernel before the GEMM. With 16-bit activations a norm
is fused into the GEMM at one or two tokens (``sm90_packed_gemv.launch_norm``). Otherwise (more tokens, other backends,
a CPU) they are separate launches with the same result.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.block.quantize_activations import Problem, Source, why_not
from anybit.kernels.block.rope import RopeStoreArgs
from anybit.ops import call_cache
from anybit.ops.autocast import under_autocast
from anybit.ops.backend import LinearSpec, backends
from anybit.ops.checks import copy_of, rows_of
from anybit.ops.elementwise import STEP, add_rms_norm, check_norm, rms_norm, rotate_store, silu_mul
from anybit.ops.library import define
from anybit.ops.prologue import ActivationPrologue
from anybit.scheme import ActivationFormat


def norm_linear(
    x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float,
    weight: list[Tensor], bias: Tensor | None, spec: str, silu: bool = False, rotated: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(linear of RMSNorm(x + residual), x + residual): x [..., K] -> [..., N] and [..., K].

    silu: the first is silu(gate) * up [..., N / 2], of outputs interleaved eight by eight.
    rotated: ``anybit::hadamard`` follows the norm.
    """
    y, total = torch.ops.anybit.norm_linear(x, residual, gamma, epsilon, weight, bias, spec, silu, rotated)
    return y, total


def norm_rotate_store(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float, weight: list[Tensor], bias: Tensor | None, spec: str,
    step: RopeStoreArgs,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``norm_linear`` as QKV, then ``elementwise.rotate_store``: (queries after RoPE, x + residual), fused if possible.

    The linear's outputs are queries, keys and values in the channel order of ``kernels.rope.paired_channels``.
    """
    q, total = torch.ops.anybit.norm_rotate_store(
        x, residual, gamma, epsilon, weight, bias, spec, *step.operands()
    )  # fmt: skip
    return q, total


def _norm_rotate_store(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float, weight: list[Tensor], bias: Tensor | None, spec: str,
    *operands: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    parsed, step = LinearSpec.parse(spec), RopeStoreArgs(*operands)
    backend = backends[parsed.backend]
    if backend.norm_tokens and x.is_cuda and x.numel():
        check_norm(x, residual, gamma)
        dense = replace(step, cosine=step.cosine.contiguous(), sine=step.sine.contiguous())
        found = backend.norm_rotate_store(x, residual, gamma, epsilon, weight, bias, parsed, dense)
        if found is not None:
            return found[0].view(-1, step.query_heads, step.head_dim), found[1]
    qkv, total = _norm_linear(x, residual, gamma, epsilon, weight, bias, spec)
    return rotate_store(qkv.view(len(step.cosine), -1), step, paired=True), total


def silu_linear(gate_up: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str, rotated: bool = False) -> Tensor:
    """Linear of silu(gate) * up: [..., 2 K] -> [..., N]."""
    y: Tensor = torch.ops.anybit.silu_linear(gate_up, weight, bias, spec, rotated)
    return y


def hadamard_linear(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    """Linear of ``anybit::hadamard`` of x: [..., K] -> [..., N]."""
    y: Tensor = torch.ops.anybit.hadamard_linear(x, weight, bias, spec)
    return y


def _codes(x: Tensor, spec: LinearSpec, rotated: bool) -> bool:
    """Whether a layer's quantize-and-pack kernel can take a prologue (and a rotation, if ``rotated``)."""
    coding = spec.activations.quantized and backends[spec.backend].codes and x.is_cuda and x.numel() > 0
    return coding and not (rotated and rotation_refused(spec.k, x.dtype, Device.of(x)))


@cache
def rotation_refused(k: int, dtype: torch.dtype, device: Device | None = None) -> str | None:
    """Why no quantize-and-pack kernel rotates rows of k values (on ``device``), as a sentence; None if one does."""
    return why_not(Problem(1, k, ActivationFormat(8, "sym"), dtype, rotated=True, device=device))


def _norm_linear(
    x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float,
    weight: list[Tensor], bias: Tensor | None, spec: str, silu: bool = False, rotated: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    how = (call_cache.signature(x), call_cache.signature(residual), call_cache.signature(gamma), epsilon, rotated, silu)
    key = spec, how, call_cache.weight_signature(weight), call_cache.signature(bias)
    call = None if residual is None else call_cache.find(key)
    if call is not None:
        y, total = call(x, weight, bias, gamma, residual)
        return y.view(*x.shape[:-1], y.shape[1]), total
    parsed = LinearSpec.parse(spec)
    backend, codes = backends[parsed.backend], _codes(x, parsed, rotated)
    few = 0 < x.numel() <= backend.norm_tokens * parsed.k
    norms = few and not (codes or rotated) and x.is_cuda
    if codes or norms:  # a separate norm op checks this itself
        check_norm(x, residual, gamma)
    if not codes:
        if norms:
            found = backend.norm_linear(x, residual, gamma, epsilon, weight, bias, parsed, silu)
            if found is not None:
                y, total = found
                return y, total
        normed, total = (rms_norm(x, gamma, epsilon), copy_of(x)) if residual is None else (
            add_rms_norm(x, residual, gamma, epsilon)
        )  # fmt: skip
        normed = torch.ops.anybit.hadamard(normed) if rotated else normed
        gated = call_cache.linear_silu(normed, weight, bias, spec) if silu else None
        if gated is not None:
            return gated, total
        y = call_cache.linear(normed, weight, bias, spec)
        return silu_mul(y, paired=True) if silu else y, total
    rows = x.reshape(-1, parsed.k).contiguous()
    if residual is None:
        total, prologue = copy_of(x), ActivationPrologue(Source.rms_norm, rows, gamma, epsilon, rotated=rotated)
    else:
        other = residual.reshape(rows.shape).contiguous()
        total = torch.empty_like(other)
        prologue = ActivationPrologue(Source.rms_norm, rows, gamma, epsilon, other, total, rotated)
        if x.is_contiguous() and residual.is_contiguous():
            call = call_cache.keep(key, lambda: call_cache.linear_call(prologue, weight, bias, parsed, silu))
        if call is not None:
            y, total = call(x, weight, bias, gamma, residual)
            return y.view(*x.shape[:-1], y.shape[1]), total
    gated = backend.linear_silu(prologue, weight, bias, parsed) if silu else None
    if gated is None:
        y = backend.linear(prologue, weight, bias, parsed)
        gated = silu_mul(y, paired=True) if silu else y
    return gated.view(*x.shape[:-1], gated.shape[1]), total.view(x.shape)


def _silu_linear(
    gate_up: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str, rotated: bool = False
) -> Tensor:
    how = "silu", call_cache.signature(gate_up), rotated
    key = spec, how, call_cache.weight_signature(weight), call_cache.signature(bias)
    call = call_cache.find(key)
    if call is not None:
        y: Tensor = call(gate_up, weight, bias)
        return y.view(*gate_up.shape[:-1], y.shape[1])
    parsed = LinearSpec.parse(spec)
    backend = backends[parsed.backend]
    if not _codes(gate_up, parsed, rotated):
        made = silu_mul(gate_up)
        return call_cache.linear(torch.ops.anybit.hadamard(made) if rotated else made, weight, bias, spec)
    if gate_up.shape[-1] != 2 * parsed.k:
        raise KernelError(f"gate_up has shape {tuple(gate_up.shape)}, and the layer takes {parsed.k} features of each")
    rows = gate_up.reshape(-1, 2 * parsed.k).contiguous()
    prologue = ActivationPrologue(Source.silu_mul, rows, rotated=rotated)
    if gate_up.is_contiguous():
        call = call_cache.keep(key, lambda: call_cache.linear_call(prologue, weight, bias, parsed))
    y = backend.linear(prologue, weight, bias, parsed) if call is None else call(rows, weight, bias)
    return y.view(*gate_up.shape[:-1], parsed.n)


def _hadamard_linear(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    parsed = LinearSpec.parse(spec)
    backend = backends[parsed.backend]
    if not _codes(x, parsed, True):
        return backend.linear(torch.ops.anybit.hadamard(x), weight, bias, parsed)
    rows = rows_of(x, parsed.k)
    prologue = ActivationPrologue(Source.plain, rows, rotated=True)
    y: Tensor = backend.linear(prologue, weight, bias, parsed)
    return y.view(*x.shape[:-1], parsed.n)


_library = torch.library.Library("anybit", "FRAGMENT")
define(
    _library,
    "norm_linear(Tensor x, Tensor? residual, Tensor gamma, float epsilon, Tensor[] weight, Tensor? bias, str spec, "
    "bool silu=False, bool rotated=False) -> (Tensor, Tensor)",
    lambda x, residual, gamma, epsilon, weight, bias, spec, silu=False, rotated=False: (
        x.new_empty(*x.shape[:-1], LinearSpec.parse(spec).n // (1 + silu)),
        x.new_empty(x.shape),
    ),
    _norm_linear,
)
define(
    _library,
    "norm_rotate_store(Tensor x, Tensor residual, Tensor gamma, float epsilon, Tensor[] weight, Tensor? bias, "
    f"str spec, {STEP}) -> (Tensor, Tensor)",
    lambda x, residual, gamma, epsilon, weight, bias, spec, *step: (
        x.new_empty(step[0].shape[0], step[5], step[0].shape[1]),
        x.new_empty(x.shape),
    ),
    _norm_rotate_store,
)


def _linear_fake(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str, rotated: bool = False) -> Tensor:
    return x.new_empty(*x.shape[:-1], LinearSpec.parse(spec).n)


define(
    _library, "silu_linear(Tensor gate_up, Tensor[] weight, Tensor? bias, str spec, bool rotated=False) -> Tensor",
    _linear_fake, _silu_linear,
)  # fmt: skip
define(
    _library, "hadamard_linear(Tensor x, Tensor[] weight, Tensor? bias, str spec) -> Tensor",
    _linear_fake, _hadamard_linear,
)  # fmt: skip
under_autocast(_library, "hadamard_linear")
