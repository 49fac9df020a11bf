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
from anybit.ops.backend import LinearSpec, backends
from anybit.ops.checks import check_input, copy_of, dense_bias
from anybit.ops.elementwise import STEP, add_rms_norm, check_norm, check_step, rms_norm, rotate_store, silu_mul
from anybit.ops.library import calls, define, under_autocast
from anybit.ops.plans import PLANS, Rows, key_of, new_plan
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
    y, total = calls.norm_linear(x, residual, gamma, epsilon, weight, bias, spec, silu, rotated)
    return y, total


def norm_rotate_store(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float, weight: list[Tensor], bias: Tensor | None, spec: str,
    step: RopeStoreArgs,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``norm_linear`` as QKV, then ``elementwise.rotate_store``: (queries after RoPE, x + residual), fused if possible.

    The linear's outputs are queries, keys and values in the channel order of ``kernels.rope.paired_channels``.
    """
    q, total = calls.norm_rotate_store(
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
    x, residual = x.contiguous(), residual.contiguous()
    if isinstance(step, RopeStoreArgs):
        step = replace(step, cosine=step.cosine.contiguous(), sine=step.sine.contiguous())
    names = _TURNED[type(step)]
    tensors = [getattr(step, name) for name in names]
    sizes = step.query_heads, step.key_heads, getattr(step, "tokens", 0)
    key = key_of(("norm_turn", names, spec, epsilon, sizes), (x, residual, gamma, bias, *tensors), weight)
    plan = PLANS.get(key)
    if plan is None:
        layer = LinearSpec.parse(spec)
        tokens, head_dim = x.numel() // layer.k, step.head_dim
        plan = new_plan((tokens, step.query_heads, head_dim), x.device, *product.SLOTS, *names)
        if 0 < tokens <= backends[layer.backend].norm_tokens and not layer.activations.quantized and x.is_cuda:
            check_norm(x, residual, gamma)
            check_input(x, weight[0], layer, bias)
            check(x.view(-1, layer.k), layer.n, step)
            rows, norm = Rows.of(x.view(-1, layer.k)), Norm(epsilon, True, _aligned(gamma, residual))
            asked = product.asked_of(layer, weight, bias)
            config = product.norm_config(asked, rows, norm) if layer.n % packed_layout.UNIT_ROWS == 0 else None
            if config is not None:
                problem, arguments = product.norm_arguments(asked, rows, norm)
                slots: dict[str, Any] = {name: Slot(name) for name in names if getattr(step, name) is not None}
                turned = replace(sm90_packed_gemv.rotary_arguments(arguments, step), **slots)
                plan.launches.append(sm90_packed_gemv.norm_launch(problem, config, turned))
        PLANS[key] = plan
    if not plan.launches:
        return None
    total = x.new_empty(x.shape)
    return plan.call(x, dense_bias(bias, x.dtype), *weight[:4], gamma, residual, total, *tensors), total


def _aligned(*tensors: Tensor | None) -> bool:
    return all(one is None or one.data_ptr() % 16 == 0 for one in tensors)


def silu_linear(gate_up: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str, rotated: bool = False) -> Tensor:
    """Linear of silu(gate) * up: [..., 2 K] -> [..., N]."""
    y: Tensor = calls.silu_linear(gate_up, weight, bias, spec, rotated)
    return y


def hadamard_linear(x: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    """Linear of ``anybit::hadamard`` of x: [..., K] -> [..., N]."""
    y: Tensor = calls.hadamard_linear(x, weight, bias, spec)
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
    key = key_of(("norm_linear", spec, epsilon, silu, rotated), (x, residual, gamma, bias), weight)
    plan = PLANS.get(key)
    if plan is None:
        layer = LinearSpec.parse(spec)
        if not _planned(x, weight, layer, rotated):
            plan = new_plan((), x.device)
        elif not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
            other = None if residual is None else residual.contiguous()
            return _norm_linear(x.contiguous(), other, gamma, epsilon, weight, bias, spec, silu, rotated)
        else:
            check_norm(x, residual, gamma)
            check_input(x, weight[0], layer, bias)
            norm = Norm(epsilon, residual is not None, _aligned(gamma, residual))
            asked, rows = product.asked_of(layer, weight, bias), Rows.of(x)
            plan = product.layer_plan(asked, rows, x.shape[:-1], silu, norm=norm, rotated=rotated)
        PLANS[key] = plan
    if not plan.launches:
        return _apart(x, residual, gamma, epsilon, weight, bias, spec, silu, rotated)
    total = None if residual is None else x.new_empty(x.shape)
    y = plan.call(x, bias, *weight[:4], gamma, residual, total)
    return y, copy_of(x) if total is None else total


def _apart(
    x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float, weight: list[Tensor], bias: Tensor | None,
    spec: str, silu: bool, rotated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``norm_linear`` op by op."""
    normed, total = (rms_norm(x, gamma, epsilon), copy_of(x)) if residual is None else (
        add_rms_norm(x, residual, gamma, epsilon)
    )  # fmt: skip
    normed = calls.hadamard(normed) if rotated else normed
    ends = silu and backends[spec.partition(":")[0]].codes
    y = product.linear(normed, weight, bias, spec, ends)
    return silu_mul(y, paired=True) if silu and not ends else y, total


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
    key = key_of((op, spec, rotated), (x, bias), weight)
    plan, gated = PLANS.get(key), source is Source.silu_mul
    if plan is None:
        layer = LinearSpec.parse(spec)
        if not layer.activations.quantized or not _planned(x, weight, layer, rotated):
            plan = new_plan((), x.device)
        elif not x.is_contiguous():
            return _coded(op, x.contiguous(), weight, bias, spec, source, rotated)
        else:
            if gated and x.shape[-1] != 2 * layer.k:
                raise KernelError(f"gate_up has shape {tuple(x.shape)}, and the layer takes {layer.k} features of each")
            check_input(x[..., : x.shape[-1] // 2] if gated else x, weight[0], layer, bias)
            asked = product.asked_of(layer, weight, bias)
            plan = product.layer_plan(asked, Rows.of(x), x.shape[:-1], source=source, rotated=rotated)
        PLANS[key] = plan
    if not plan.launches:
        x = silu_mul(x) if gated else x
        x = calls.hadamard(x) if rotated else x
        return product.linear(x, weight, bias, spec)
    return plan.call(x, bias, *weight[:4])


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
