"""The small kernels between a Llama's GEMMs, one launch each: RMSNorm with residual add, SiLU, RoPE.

On a GPU they take float16 and bfloat16; on a CPU they are plain torch with the same rounding where it matters.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anybit.errors import KernelError
from anybit.jit import Slot
from anybit.kernels.attention.kv_page import ring_places
from anybit.kernels.block import rope
from anybit.kernels.block.norm_act import paired_rows as paired_rows
from anybit.kernels.block.rope import NO_NORMS as NO_NORMS
from anybit.kernels.block.rope import Norms as Norms
from anybit.kernels.block.rope import RopeStoreArgs
from anybit.kernels.block.rope import paired_channels as paired_channels
from anybit.ops import product
from anybit.ops.library import calls, define
from anybit.ops.plans import PLANS, OpPlan, Rows, key_of, new_plan
from anybit.ops.product import Norm


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Gamma * x / rms(x) over the last dimension: x [..., K], gamma [K] -> [..., K]."""
    y: Tensor = calls.rms_norm(x, gamma, epsilon)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm of x + residual, x + residual) in one pass. All [..., K]."""
    y, total = calls.add_rms_norm(x, residual, gamma, epsilon)
    return y, total


def silu_mul(gate_up: Tensor, paired: bool = False) -> Tensor:
    """silu(gate) * up of a fused projection: [..., 2 K] -> [..., K]. paired: gate and up interleaved eight by eight."""
    y: Tensor = calls.silu_mul(gate_up, paired)
    return y


def rotate(
    qkv: Tensor, cosine: Tensor, sine: Tensor, query_heads: int, key_heads: int, norms: Norms = NO_NORMS,
    paired: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RoPE on the queries and keys of a fused QKV projection, after a per-head QK norm if there is one (Qwen3).

    qkv: [tokens, (query_heads + 2 * key_heads) * head_dim].  cosine, sine: [tokens, head_dim].  paired: channels are in
    the order of ``kernels.rope.paired_channels``; only without norms.
    Returns q [tokens, query_heads, head_dim] and k [tokens, key_heads, head_dim].
    """
    q, k = calls.rotate(qkv, cosine, sine, query_heads, key_heads, *norms, paired)
    return q, k


def rotate_store(qkv: Tensor, step: RopeStoreArgs, norms: Norms = NO_NORMS, paired: bool = False) -> Tensor:
    """``rotate`` that stores keys and values directly into the residual of a KV cache.

    qkv: [batch * tokens, ...], the newest tokens of each sequence.
    Returns the queries after RoPE [batch * tokens, query_heads, head_dim].
    """
    q: Tensor = calls.rotate_store(qkv, *step.operands(), *norms, paired)
    return q


def _rms_norm_cpu(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    wide = x.float().contiguous()  # results are contiguous on every device, as the fakes promise
    return gamma * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def _add_rms_norm_cpu(x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total = (x + residual).contiguous()
    return _rms_norm_cpu(total, gamma, epsilon), total


def _silu_mul_cpu(gate_up: Tensor, paired: bool = False) -> Tensor:
    if paired:
        gate, up = (part.flatten(-2) for part in gate_up.unflatten(-1, (-1, 2, 8)).unbind(-2))
    else:
        gate, up = gate_up.chunk(2, dim=-1)
    y: Tensor = torch.nn.functional.silu(gate) * up
    return y.contiguous()


def _rotate_cpu(
    qkv: Tensor, cosine: Tensor, sine: Tensor, query_heads: int, key_heads: int, q_gamma: Tensor | None,
    k_gamma: Tensor | None, epsilon: float, paired: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, dim = cosine.shape
    heads = qkv.view(tokens, -1, dim)
    results = []
    for part, gamma in ((heads[:, :query_heads], q_gamma), (heads[:, query_heads : query_heads + key_heads], k_gamma)):
        x = part if gamma is None else _rms_norm_cpu(part, gamma, epsilon)
        if paired:
            x = x.unflatten(-1, (-1, 2, 8)).transpose(-2, -3).flatten(-3)
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat((-high, low), dim=-1)
        results.append(x * cosine[:, None] + turned * sine[:, None])
    return results[0], results[1]


def check_norm(x: Tensor, residual: Tensor | None, gamma: Tensor) -> None:
    """Raise KernelError, naming both values, unless shape, dtype and device match: x, residual [..., K], gamma [K]."""
    _refuse_strided("gamma", gamma)
    if gamma.shape != x.shape[-1:] or gamma.dtype != x.dtype or gamma.device != x.device:
        raise KernelError(
            f"gamma must be {x.dtype} [{x.shape[-1]}] on {x.device} as x is, not {gamma.dtype} {tuple(gamma.shape)} on "
            f"{gamma.device}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device):
        raise KernelError(
            f"residual must be {x.dtype} {tuple(x.shape)} on {x.device} as x is, not {residual.dtype} "
            f"{tuple(residual.shape)} on {residual.device}"
        )


def _norm_cuda(x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor | None]:
    key = key_of(("rms_norm", epsilon), (x, residual, gamma))
    plan = PLANS.get(key)
    if plan is None:
        check_norm(x, residual, gamma)
        rows = Rows.of(x)
        if rows.copied or (residual is not None and not residual.is_contiguous()):
            return _norm_cuda(x.contiguous(), None if residual is None else residual.contiguous(), gamma, epsilon)
        aligned = all(one is None or one.data_ptr() % 16 == 0 for one in (residual, gamma))
        norm = Norm(epsilon, residual is not None, aligned)
        plan = PLANS[key] = norm_plan(rows, norm, x.shape)
    total = None if residual is None else x.new_empty(x.shape)
    return plan.call(x, gamma, residual, total), total


def norm_plan(rows: Rows, norm: Norm, shape: Sequence[int] = ()) -> OpPlan:
    """The plan of RMSNorm. shape: of the result."""
    plan = new_plan(shape, rows.device, "gamma", "residual", "total")
    product.rms_norm(plan, rows, norm, Slot("y"))
    return plan


def silu_plan(rows: Rows, paired: bool, shape: Sequence[int] = ()) -> OpPlan:
    """The plan of SiLU(gate) * up. shape: of the result."""
    plan = new_plan(shape, rows.device)
    product.silu_mul(plan, rows, Slot("y"), paired)
    return plan


def _rms_norm_cuda(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return _norm_cuda(x, None, gamma, epsilon)[0]


def _add_rms_norm_cuda(x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    y, total = _norm_cuda(x, residual, gamma, epsilon)
    assert total is not None
    return y, total


def _silu_mul_cuda(gate_up: Tensor, paired: bool = False) -> Tensor:
    key = key_of(("silu_mul", paired), (gate_up,))
    plan = PLANS.get(key)
    if plan is None:
        if gate_up.shape[-1] % 2:
            raise KernelError(f"gate_up holds gate and up, so its last dimension must be even, not {gate_up.shape[-1]}")
        rows = Rows.of(gate_up)
        if rows.copied:
            return _silu_mul_cuda(gate_up.contiguous(), paired)
        plan = PLANS[key] = silu_plan(rows, paired, (*gate_up.shape[:-1], gate_up.shape[-1] // 2))
    return plan.call(gate_up)


def _rotate_cuda(
    qkv: Tensor, cosine: Tensor, sine: Tensor, query_heads: int, key_heads: int, q_gamma: Tensor | None,
    k_gamma: Tensor | None, epsilon: float, paired: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    k = qkv.new_empty(cosine.shape[0], key_heads, cosine.shape[1])
    return _turn(qkv, cosine, sine, query_heads, key_heads, (q_gamma, k_gamma, epsilon), paired, k), k


_TURNED = ("cosine", "sine", "q_gamma", "k_gamma", "k", "residual", "lengths", "sequences")


def _turn(
    qkv: Tensor, cosine: Tensor, sine: Tensor, query_heads: int, key_heads: int, norms: Norms, paired: bool,
    k: Tensor | None, step: RopeStoreArgs | None = None,
) -> Tensor:  # fmt: skip
    """The queries after RoPE. k: output for keys; None with a ``step``, which stores keys in its ring."""
    q_gamma, k_gamma, epsilon = norms
    stored = (None, None, None) if step is None else (step.ring, step.lengths, step.sequences)
    tensors, each = (cosine, sine, q_gamma, k_gamma, k, *stored), 1 if step is None else step.tokens
    key = key_of(("rotate", query_heads, key_heads, epsilon, paired, each), (qkv, *tensors))
    plan = PLANS.get(key)
    if plan is None:
        tokens, dim = cosine.shape
        _check_heads(qkv, tokens, query_heads, key_heads, dim)
        check_rotary(qkv, cosine, sine, q_gamma, k_gamma)
        if tokens and not (qkv.stride(1) == 1 and cosine.is_contiguous() and sine.is_contiguous()):
            dense = qkv.contiguous(), cosine.contiguous(), sine.contiguous()
            return _turn(*dense, query_heads, key_heads, norms, paired, k, step)
        plan = new_plan((tokens, query_heads, dim), qkv.device, *_TURNED)
        slots: dict[str, Any] = {
            name: None if one is None else Slot(name) for name, one in zip(_TURNED, tensors, strict=True)
        }
        problem = rope.Problem(tokens, query_heads, key_heads, dim, qkv.dtype, paired, step is not None)
        params = rope.Params(
            qkv=Slot("x"), q=Slot("y"), **slots, qkv_stride=qkv.stride(0), query_heads=query_heads, key_heads=key_heads,
            tokens=each, ring=1 if step is None else step.ring_tokens, epsilon=epsilon,
        )  # fmt: skip
        plan.launches += rope.launches(problem, params) if tokens else ()
        PLANS[key] = plan
    return plan.call(qkv, *tensors)


def _rotate_store_cpu(
    qkv: Tensor, cosine: Tensor, sine: Tensor, ring: Tensor, lengths: Tensor, sequences: Tensor | None,
    query_heads: int, key_heads: int, tokens: int, *norms_and_paired: Any,
) -> Tensor:  # fmt: skip
    dim = cosine.shape[1]
    q, k = _rotate_cpu(qkv, cosine, sine, query_heads, key_heads, *norms_and_paired)
    v = qkv.view(len(qkv), -1, dim)[:, -key_heads:]
    slots = ring.shape[-1] // dim
    places = ring_places(slots, dim).to(ring.device)
    batch = len(qkv) // tokens
    rows = range(batch) if sequences is None else sequences.tolist()
    for row, sequence in enumerate(rows):
        end = int(lengths[sequence])
        taken = torch.arange(end - tokens, end) % slots
        for part, new in enumerate((k, v)):
            mine = new[row * tokens : (row + 1) * tokens].transpose(0, 1).to(ring.dtype)
            ring[sequence, :, part][:, places[part, taken].flatten()] = mine.flatten(1)
    return q


def _rotate_store_cuda(qkv: Tensor, *operands: Any) -> Tensor:
    step, (*norms, paired) = RopeStoreArgs(*operands[:8]), operands[8:]
    check_counts(step.lengths, step.sequences, qkv.device)
    ring = step.ring
    if ring.dtype != qkv.dtype or not ring.is_contiguous() or ring.shape[1] != step.key_heads:
        raise KernelError(
            f"ring must be a layer's contiguous {qkv.dtype} [sequences, {step.key_heads}, 2, slots * {step.head_dim}], "
            f"not {ring.dtype} {tuple(ring.shape)} with strides {ring.stride()}"
        )
    return _turn(qkv, step.cosine, step.sine, step.query_heads, step.key_heads, tuple(norms), paired, None, step)


def _check_heads(qkv: Tensor, tokens: int, query_heads: int, key_heads: int, dim: int) -> None:
    if qkv.shape != (tokens, (query_heads + 2 * key_heads) * dim):
        raise KernelError(
            f"qkv must be [{tokens}, {(query_heads + 2 * key_heads) * dim}] for {query_heads} query and {key_heads} "
            f"key heads of {dim}, not {tuple(qkv.shape)}"
        )


def check_rotary(
    qkv: Tensor, cosine: Tensor, sine: Tensor, q_gamma: Tensor | None = None, k_gamma: Tensor | None = None
) -> None:
    """Raise KernelError, naming both values, unless tables [tokens, dim] and gammas [dim] match qkv."""
    _check_like("cosine", cosine, qkv, cosine.shape)
    _check_like("sine", sine, qkv, cosine.shape)
    for name, gamma in (("q_gamma", q_gamma), ("k_gamma", k_gamma)):
        if gamma is not None:
            _check_like(name, gamma, qkv, cosine.shape[1:])
            _refuse_strided(name, gamma)


def _refuse_strided(name: str, gamma: Tensor) -> None:
    if not gamma.is_contiguous():  # kernels take only its address
        raise KernelError(f"{name} must be contiguous, and its strides are {gamma.stride()}")


def _check_like(name: str, found: Tensor, qkv: Tensor, shape: torch.Size) -> None:
    if found.dtype != qkv.dtype or found.shape != shape or found.get_device() != qkv.get_device():
        raise KernelError(
            f"{name} must be {qkv.dtype} {tuple(shape)} on {qkv.device} as qkv is, not {found.dtype} "
            f"{tuple(found.shape)} on {found.device}"
        )


def check_step(x: Tensor, outputs: int, step: RopeStoreArgs) -> None:
    """Raise KernelError unless a step fits a QKV GEMM of rows x [M, K] with ``outputs`` outputs."""
    check_rotary(x, step.cosine, step.sine)
    check_counts(step.lengths, step.sequences, x.device)
    tokens, dim = step.cosine.shape
    wanted = (step.query_heads + 2 * step.key_heads) * dim
    if tokens != len(x) or outputs != wanted:
        raise KernelError(
            f"cosine has {tokens} tokens and x {len(x)}; {step.query_heads} query and {step.key_heads} key heads of "
            f"{dim} need {wanted} outputs and the layer has {outputs}: both pairs must be equal"
        )


def check_counts(lengths: Tensor, sequences: Tensor | None, device: torch.device) -> None:
    """Raise KernelError unless lengths and sequences are contiguous int32 vectors on ``device``."""
    for name, found in (("lengths", lengths), ("sequences", sequences)):
        if found is not None and (
            found.dtype != torch.int32 or found.device != device or found.dim() != 1 or not found.is_contiguous()
        ):
            raise KernelError(
                f"{name} must be a contiguous int32 vector on {device}, not {found.dtype} {tuple(found.shape)} with "
                f"strides {found.stride()} on {found.device}"
            )


def _rotate_fake(
    qkv: Tensor, cosine: Tensor, sine: Tensor, query_heads: int, key_heads: int, *_: object
) -> tuple[Tensor, Tensor]:
    tokens, dim = cosine.shape
    return qkv.new_empty(tokens, query_heads, dim), qkv.new_empty(tokens, key_heads, dim)


STEP = (
    "Tensor cosine, Tensor sine, Tensor(a!) ring, Tensor lengths, Tensor? sequences, int query_heads, int key_heads, "
    "int tokens"
)
"""``RopeStoreArgs`` as arguments of an op's schema."""
_NORMS = "Tensor? q_gamma, Tensor? k_gamma, float epsilon, bool paired"
_library = torch.library.Library("anybit", "FRAGMENT")
define(
    _library, "rms_norm(Tensor x, Tensor gamma, float epsilon) -> Tensor",
    lambda x, gamma, epsilon: x.new_empty(x.shape), _rms_norm_cpu, _rms_norm_cuda,
)  # fmt: skip
define(
    _library, "add_rms_norm(Tensor x, Tensor residual, Tensor gamma, float epsilon) -> (Tensor, Tensor)",
    lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)), _add_rms_norm_cpu, _add_rms_norm_cuda,
)  # fmt: skip
define(
    _library, "silu_mul(Tensor gate_up, bool paired=False) -> Tensor",
    lambda x, paired=False: x.new_empty(*x.shape[:-1], x.shape[-1] // 2), _silu_mul_cpu, _silu_mul_cuda,
)  # fmt: skip
define(
    _library,
    f"rotate(Tensor qkv, Tensor cosine, Tensor sine, int query_heads, int key_heads, {_NORMS}) -> (Tensor, Tensor)",
    _rotate_fake, _rotate_cpu, _rotate_cuda,
)  # fmt: skip
define(
    _library, f"rotate_store(Tensor qkv, {STEP}, {_NORMS}) -> Tensor",
    lambda qkv, cosine, sine, ring, lengths, sequences, query_heads, *_: qkv.new_empty(
        cosine.shape[0], query_heads, cosine.shape[1]
    ),
    _rotate_store_cpu, _rotate_store_cuda,
)  # fmt: skip
