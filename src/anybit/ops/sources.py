"""Products whose activations are coded by the kernel that makes them: an RMSNorm, or SiLU(gate) * up.

With integer activations a layer is quantize-and-pack and a product; the norm or the activation function before it is no
launch of its own then. Nor is the norm with 16-bit activations of a token or two (``packed_digits.launch_norm``).
Elsewhere (more tokens, other backends, a CPU) it is, with the same result.
"""

import torch
from torch import Tensor

from anybit.kernels.pack import Source
from anybit.kernels.packed_digits import NORM_TOKENS as NORM_TOKENS
from anybit.kernels.packed_digits import Step
from anybit.ops.backend import LinearSpec, backends
from anybit.ops.before import Before
from anybit.ops.elementwise import add_rms_norm, rms_norm, rotate_store, silu_mul
from anybit.ops.packed import PackedTiles

CODING_BACKENDS = ("bitwise", "packed", "bitwise+packed")
"""The backends whose ``linear`` takes ``before``."""
NORMING_BACKENDS = ("packed",)
"""The backends whose products of up to NORM_TOKENS tokens norm 16-bit activations themselves."""


def norm_linear(
    x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float,
    weight: list[Tensor], bias: Tensor | None, spec: str, silu: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(linear of the norm of x + residual, x + residual): x [..., K] -> [..., N] and [..., K].

    silu: the first is silu(gate) * up [..., N / 2] of outputs that are eight of gate and eight of up in turn.
    """
    y, total = torch.ops.anybit.norm_linear(x, residual, gamma, epsilon, weight, bias, spec, silu)
    return y, total


def norm_rotate_store(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float, weight: list[Tensor], bias: Tensor | None,
    spec: str, cosine: Tensor, sine: Tensor, query_heads: int, key_heads: int, ring: Tensor, lengths: Tensor,
    sequences: Tensor | None, tokens: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(``elementwise.rotate_store`` of the linear of the norm of x + residual, x + residual): one launch if possible.

    The linear's outputs are queries, keys and values, channels as ``kernels.rope.paired_channels`` says.
    """
    q, total = torch.ops.anybit.norm_rotate_store(
        x, residual, gamma, epsilon, weight, bias, spec, cosine, sine, query_heads, key_heads, ring, lengths, sequences,
        tokens,
    )  # fmt: skip
    return q, total


def _norm_rotate_store(
    x: Tensor, residual: Tensor, gamma: Tensor, epsilon: float, weight: list[Tensor], bias: Tensor | None,
    spec: str, cosine: Tensor, sine: Tensor, query_heads: int, key_heads: int, ring: Tensor, lengths: Tensor,
    sequences: Tensor | None, tokens: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    parsed = LinearSpec.parse(spec)
    if parsed.backend in NORMING_BACKENDS and x.is_cuda and x.numel():
        step = Step(cosine.contiguous(), sine.contiguous(), ring, lengths, sequences, query_heads, key_heads, tokens)
        backend: PackedTiles = backends[parsed.backend]  # type: ignore[assignment]
        found = backend.norm_rotate_store(x, residual, gamma, epsilon, weight, bias, parsed, step)
        if found is not None:
            return found[0].view(len(cosine), query_heads, -1), found[1]
    qkv, total = _norm_linear(x, residual, gamma, epsilon, weight, bias, spec)
    rotary = (cosine, sine, query_heads, key_heads)
    q = rotate_store(qkv.view(len(cosine), -1), *rotary, ring, lengths, sequences, tokens, paired=True)
    return q, total


def silu_linear(gate_up: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    """Linear of silu(gate) * up: [..., 2 K] -> [..., N]."""
    y: Tensor = torch.ops.anybit.silu_linear(gate_up, weight, bias, spec)
    return y


def _norm_linear(
    x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float,
    weight: list[Tensor], bias: Tensor | None, spec: str, silu: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    parsed = LinearSpec.parse(spec)
    backend = backends[parsed.backend]
    if not (parsed.activations.quantized and parsed.backend in CODING_BACKENDS and x.is_cuda and x.numel()):
        if parsed.backend in NORMING_BACKENDS and x.is_cuda and x.numel():
            found = backend.norm_linear(x, residual, gamma, epsilon, weight, bias, parsed, silu)  # type: ignore[attr-defined]
            if found is not None:
                y, total = found
                return y, total
        normed, total = (rms_norm(x, gamma, epsilon), x.clone()) if residual is None else (
            add_rms_norm(x, residual, gamma, epsilon)
        )  # fmt: skip
        y = backend.linear(normed, weight, bias, parsed)
        return silu_mul(y, paired=True) if silu else y, total
    rows = x.reshape(-1, parsed.k).contiguous()
    if residual is None:
        total, before = x.clone(), Before(Source.rms_norm, rows, gamma, epsilon)
    else:
        other = residual.reshape(rows.shape).contiguous()
        total = torch.empty_like(other)
        before = Before(Source.rms_norm, rows, gamma, epsilon, other, total)
    y = backend.linear(rows, weight, bias, parsed, before)  # type: ignore[call-arg]
    y = y.view(*x.shape[:-1], parsed.n)
    return silu_mul(y, paired=True) if silu else y, total.view(x.shape)


def _silu_linear(gate_up: Tensor, weight: list[Tensor], bias: Tensor | None, spec: str) -> Tensor:
    parsed = LinearSpec.parse(spec)
    backend = backends[parsed.backend]
    if not (parsed.activations.quantized and parsed.backend in CODING_BACKENDS and gate_up.is_cuda and gate_up.numel()):
        return backend.linear(silu_mul(gate_up), weight, bias, parsed)
    rows = gate_up.reshape(-1, 2 * parsed.k).contiguous()
    gate = rows[:, : parsed.k]
    y: Tensor = backend.linear(gate, weight, bias, parsed, Before(Source.silu_mul, rows))  # type: ignore[call-arg]
    return y.view(*gate_up.shape[:-1], parsed.n)


_library = torch.library.Library("anybit", "FRAGMENT")
_library.define(
    "norm_linear(Tensor x, Tensor? residual, Tensor gamma, float epsilon, Tensor[] weight, Tensor? bias, str spec, "
    "bool silu=False) -> (Tensor, Tensor)"
)
_library.define(
    "norm_rotate_store(Tensor x, Tensor residual, Tensor gamma, float epsilon, Tensor[] weight, Tensor? bias, "
    "str spec, Tensor cosine, Tensor sine, int query_heads, int key_heads, Tensor(a!) ring, Tensor lengths, "
    "Tensor? sequences, int tokens) -> (Tensor, Tensor)"
)
_library.define("silu_linear(Tensor gate_up, Tensor[] weight, Tensor? bias, str spec) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("norm_linear", _norm_linear, _device)
    _library.impl("norm_rotate_store", _norm_rotate_store, _device)
    _library.impl("silu_linear", _silu_linear, _device)
torch.library.register_fake(
    "anybit::norm_linear",
    lambda x, residual, gamma, epsilon, weight, bias, spec, silu=False: (
        x.new_empty(*x.shape[:-1], LinearSpec.parse(spec).n // (1 + silu)),
        torch.empty_like(x),
    ),
)
torch.library.register_fake(
    "anybit::norm_rotate_store",
    lambda x, residual, gamma, epsilon, weight, bias, spec, cosine, sine, query_heads, *_: (
        x.new_empty(cosine.shape[0], query_heads, cosine.shape[1]),
        torch.empty_like(x),
    ),
)
torch.library.register_fake(
    "anybit::silu_linear",
    lambda gate_up, weight, bias, spec: gate_up.new_empty(*gate_up.shape[:-1], LinearSpec.parse(spec).n),
)
