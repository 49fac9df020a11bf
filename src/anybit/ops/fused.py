"""Linear layers fused with what precedes them: RMSNorm, silu(gate) * up, or a Hadamard rotation.

On a GPU all launches of such an op are one plan (``ops.product``); elsewhere ops run one after another.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import Slot
from anybit.kernels.block.quantize_activations import Problem, Source, why_not
from anybit.kernels.block.rope import RopeStoreArgs
from anybit.kernels.block.rope_pages import RopePagesArgs
from anybit.kernels.packed import packed_layout
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.ops import product
from anybit.ops.autocast import under_autocast
from anybit.ops.backend import LinearSpec, backends
from anybit.ops.checks import check_input, copy_of, dense_bias
from anybit.ops.elementwise import STEP, add_rms_norm, check_norm, check_step, rms_norm, rotate_store, silu_mul
from anybit.ops.library import define
from anybit.ops.plans import Draft, OpPlan, Rows, find, planned, signature, weight_signature
from anybit.ops.product import Norm
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
    step = RopeStoreArgs(*operands)
    if step.ring.dtype == x.dtype:
        found = norm_turn(x, residual, gamma, epsilon, weight, bias, spec, step, check_step)
        if found is not None:
            return found
    qkv, total = _norm_linear(x, residual, gamma, epsilon, weight, bias, spec)
    return rotate_store(qkv.view(len(step.cosine), -1), step, paired=True), total


_TURNED: dict[type, tuple[str, ...]] = {
    RopeStoreArgs: ("cosine", "sine", "ring", "lengths", "sequences"),
    RopePagesArgs: ("table", "positions", "keys", "values", "slots"),
}
"""The tensors of a step of RoPE."""


def norm_turn(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float, weight: list[Tensor], bias: Tensor | None, spec: str,
    step: RopeStoreArgs | RopePagesArgs, check: Callable[[Tensor, int, Any], None],
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """(queries after RoPE [tokens, heads, head_dim], x + residual) in one launch, K and V stored as ``step`` says.

    None if no kernel does that. check: raises KernelError unless the step fits rows x [M, K] with so many outputs.
    """
    parsed = LinearSpec.parse(spec)
    norms = backends[parsed.backend].norm_tokens
    if parsed.activations.quantized or not x.is_cuda or not 0 < x.numel() <= norms * parsed.k:
        return None
    x, residual = x.contiguous(), residual.contiguous()
    if isinstance(step, RopeStoreArgs):
        step = replace(step, cosine=step.cosine.contiguous(), sine=step.sine.contiguous())
    names = _TURNED[type(step)]
    tensors = [getattr(step, name) for name in names]
    sizes = step.query_heads, step.key_heads, getattr(step, "tokens", 0)
    signatures = [signature(one) for one in (x, residual, gamma, bias, *tensors)]
    key = "norm_turn", names, spec, epsilon, sizes, *signatures, weight_signature(weight)

    def make() -> OpPlan:
        check_norm(x, residual, gamma)
        check_input(x, weight[0], parsed, bias)
        rows = Rows.of(x.view(-1, parsed.k))
        check(x.view(-1, parsed.k), parsed.n, step)
        norm = Norm(epsilon, True, _aligned(gamma, residual))
        asked, draft = product.asked_of(parsed, weight, bias), Draft()
        if parsed.n % packed_layout.UNIT_ROWS == 0 and (config := product.norm_config(asked, rows, norm)) is not None:
            problem, arguments = product.norm_arguments(asked, rows, norm)
            turned = sm90_packed_gemv.rotary_arguments(arguments, step)
            slots: dict[str, Any] = {
                name: Slot(name) for name, one in zip(names, tensors, strict=True) if one is not None
            }
            draft.launches.append(sm90_packed_gemv.norm_launch(problem, config, replace(turned, **slots)))
        return draft.done((*product.SLOTS, *names), x.device)

    plan = planned(key, make)
    if not plan.kernels:
        return None
    q, total = x.new_empty(x.numel() // parsed.k, step.query_heads, step.head_dim), x.new_empty(x.shape)
    plan.run(x, x, q, dense_bias(bias, x.dtype), *weight[:4], gamma, residual, total, *tensors)
    return q, total


def _aligned(*tensors: Tensor | None) -> bool:
    return all(one is None or one.data_ptr() % 16 == 0 for one in tensors)


def silu_linear(gate_up: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str, rotated: bool = False) -> Tensor:
    """Linear of silu(gate) * up: [..., 2 K] -> [..., N]."""
    y: Tensor = torch.ops.anybit.silu_linear(gate_up, weight, bias, spec, rotated)
    return y


def hadamard_linear(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    """Linear of ``anybit::hadamard`` of x: [..., K] -> [..., N]."""
    y: Tensor = torch.ops.anybit.hadamard_linear(x, weight, bias, spec)
    return y


def _planned(x: Tensor, weight: list[Tensor], spec: LinearSpec, rotated: bool) -> bool:
    """Whether one plan runs a layer of x with what precedes it, which is ``rotated`` last."""
    if not (backends[spec.backend].codes and x.is_cuda and x.numel()) or product.asked_of(spec, weight, None).columns:
        return False
    if not spec.activations.quantized:
        return not rotated and spec.k % 8 == 0  # rows between the launches begin on 16 bytes
    return not rotated or rotation_refused(spec.k, x.dtype, Device.of(x)) is None


@cache
def rotation_refused(k: int, dtype: torch.dtype, device: Device | None = None) -> str | None:
    """Why no quantize-and-pack kernel rotates rows of k values (on ``device``), as a sentence; None if one does."""
    return why_not(Problem(1, k, ActivationFormat(8, "sym"), dtype, rotated=True, device=device))


def _norm_linear(
    x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float,
    weight: list[Tensor], bias: Tensor | None, spec: str, silu: bool = False, rotated: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    how = signature(x), signature(residual), signature(gamma), signature(bias), weight_signature(weight)
    key = "norm_linear", spec, epsilon, silu, rotated, how
    plan = find(key)
    if plan is None:
        parsed = LinearSpec.parse(spec)
        if not _planned(x, weight, parsed, rotated):
            return _apart(x, residual, gamma, epsilon, weight, bias, parsed, silu, rotated)
        if not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
            other = None if residual is None else residual.contiguous()
            return _norm_linear(x.contiguous(), other, gamma, epsilon, weight, bias, spec, silu, rotated)
        check_norm(x, residual, gamma)
        check_input(x, weight[0], parsed, bias)
        norm = Norm(epsilon, residual is not None, _aligned(gamma, residual))
        asked, rows = product.asked_of(parsed, weight, bias), Rows.of(x.view(-1, parsed.k))
        plan = planned(key, lambda: product.layer_plan(asked, rows, silu, norm=norm, rotated=rotated))
    total = None if residual is None else x.new_empty(x.shape)
    y = product.run(plan, x, weight, bias, gamma, residual, total)
    return y.view(*x.shape[:-1], -1), copy_of(x) if total is None else total


def _apart(
    x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float, weight: list[Tensor], bias: Tensor | None,
    spec: LinearSpec, silu: bool, rotated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``norm_linear`` op by op."""
    normed, total = (rms_norm(x, gamma, epsilon), copy_of(x)) if residual is None else (
        add_rms_norm(x, residual, gamma, epsilon)
    )  # fmt: skip
    normed = torch.ops.anybit.hadamard(normed) if rotated else normed
    if silu and backends[spec.backend].codes:
        return product.linear(normed, weight, bias, spec, silu), total
    y = backends[spec.backend].linear(normed, weight, bias, spec)
    return silu_mul(y, paired=True) if silu else y, total


def _silu_linear(
    gate_up: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str, rotated: bool = False
) -> Tensor:
    return _coded("silu_linear", gate_up, weight, bias, spec, Source.silu_mul, rotated)


def _hadamard_linear(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    return _coded("hadamard_linear", x, weight, bias, spec, Source.plain, True)


def _coded(
    op: str, x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str, source: Source, rotated: bool
) -> Tensor:
    """A layer after SiLU or a rotation, inside the kernel that quantizes activations if they are quantized."""
    key = op, spec, rotated, signature(x), weight_signature(weight), signature(bias)
    plan = find(key)
    if plan is None:
        parsed, gated = LinearSpec.parse(spec), source is Source.silu_mul
        if not parsed.activations.quantized or not _planned(x, weight, parsed, rotated):
            x = silu_mul(x) if gated else x
            x = torch.ops.anybit.hadamard(x) if rotated else x
            return backends[parsed.backend].linear(x, weight, bias, parsed)
        if not x.is_contiguous():
            return _coded(op, x.contiguous(), weight, bias, spec, source, rotated)
        if gated and x.shape[-1] != 2 * parsed.k:
            raise KernelError(f"gate_up has shape {tuple(x.shape)}, and the layer takes {parsed.k} features of each")
        check_input(x[..., : x.shape[-1] // 2] if gated else x, weight[0], parsed, bias)
        asked, rows = product.asked_of(parsed, weight, bias), Rows.of(x.view(-1, parsed.k * (1 + gated)))
        plan = planned(key, lambda: product.layer_plan(asked, rows, source=source, rotated=rotated))
    return product.run(plan, x, weight, bias).view(*x.shape[:-1], -1)


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
