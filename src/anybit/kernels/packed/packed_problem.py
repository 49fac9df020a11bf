"""Host code shared by the kernels over packed weights: checks, config fields from the problem, pipelines, arguments."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from anybit import jit
from anybit.device import Device
from anybit.errors import dtype_name
from anybit.kernels.block.quantize_activations import Packed, rows_aligned
from anybit.kernels.common.types import Code, Operand, Output
from anybit.kernels.gemm_kernel import Operands
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_layout, sparse_layout
from anybit.kernels.packed.packed_layout import PackedWeight
from anybit.scheme import ActivationFormat

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_C = TypeVar("_C")


@dataclass(frozen=True)
class Facts:
    """The config fields that follow from the problem."""

    operand: Operand
    output: Output
    bits: int
    group: int
    code: Code

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of 16 rows by 128 columns, scales included."""
        return packed_layout.unit_bytes_of(self.bits, self.group, self.code.name, getattr(self, "sparse", False))


@dataclass(frozen=True)
class FewFacts(Facts):
    """``Facts`` of kernels for few tokens. gather: x is gathered.  ragged: K is not a multiple of 128."""

    gather: bool
    ragged: bool


def facts(p: LinearProblem, config: type) -> dict[str, Any]:
    """The fields of a kernel's ``Config`` that follow from the problem."""
    known = {
        "operand": p.operand,
        "output": p.output,
        "bits": p.weights.bits,
        "group": packed_layout.tile_group(p.weights),
        "code": Code[p.weights.code],
        "gather": p.act_order or not p.aligned,
        "ragged": p.k % 128 != 0,
        "wide_store": p.n % 4 == 0,
        "sparse": p.weights.sparse,
    }
    return {field.name: known[field.name] for field in fields(config) if field.name in known}


def why_not(problem: LinearProblem) -> str | None:
    """Why no kernel over tiles takes these operands, in a sentence; None if one might."""
    p, x = problem, problem.activations
    if min(p.m, p.n, p.k) < 1:
        return f"a product of M = {p.m}, N = {p.n}, K = {p.k} is empty"
    if p.weights.sparse and p.act_order:
        return sparse_layout.ORDERED
    if refusal := packed_layout.why_not(p.weights, x.quantized):
        return refusal
    if x.quantized and x.integer and (x.code != "sym" or x.bits == 1):
        return f"int8 products take symmetric activations of 2 bits or more, not {x.bits}-bit {x.code} ones"
    if p.dtype not in _SIXTEEN_BITS:
        return f"the output must be float16 or bfloat16, not {dtype_name(p.dtype)}"
    return None


def why_not_integers(problem: LinearProblem) -> str | None:
    """``why_not`` for kernels without 8-bit float products."""
    reason = why_not(problem)
    if reason is None and problem.operand is Operand.e4m3:
        return "it multiplies integers or 16-bit floats, and the activations are 8-bit floats"
    return reason


def why_not_few(
    problem: LinearProblem, most_tokens: int, otherwise: str, int8: bool = False, sparse: bool = False
) -> str | None:
    """Why a kernel for few tokens cannot take a problem, in a sentence; None if it might.

    otherwise: the kernel that takes more tokens.  int8, sparse: whether it takes int8 activations, 2:4 sparse weights.
    """
    if problem.device.capability < 90:
        return f"{problem.device.arch} has no bulk copies (sm_90 and later do): see sm80_packed_gemm.py"
    if problem.m > most_tokens:
        return f"M = {problem.m} is more than {most_tokens} tokens: see {otherwise}"
    if problem.weights.sparse and not sparse:
        return sparse_layout.DENSE_ALONE
    if problem.activations.quantized and not int8:
        return f"it takes float16 or bfloat16 activations, not {problem.activations.bits}-bit ones"
    return why_not_integers(problem)


def why_not_config(problem: LinearProblem, config: Any, shared_bytes: int) -> str | None:
    """Why a config for few tokens is illegal (wrong problem, too small or large), in a sentence; None if it is not."""
    c, ahead = config, getattr(config, "prologue_stages", 1)
    if any(getattr(c, name) != value for name, value in facts(problem, type(c)).items()):
        return "the config was made for another problem"
    if c.tile_m < problem.m:
        return f"the config is for up to {c.tile_m} tokens, and there are {problem.m}"
    if not 1 <= c.warps <= 32:
        return f"a block has 1 to 32 warps, not {c.warps}"
    if not 1 <= ahead <= c.stages:
        return f"prologue_stages = {ahead} must be 1 to stages = {c.stages}"
    return problem.device.why_not_shared(shared_bytes)


SIZES = (96, 64, 48, 32, 16, 8, 1)
"""Kibibytes of pipelines to try until a config fits shared memory."""


def sizes(c: Any, units: int) -> tuple[int, ...]:
    """Kibibytes of a config's pipelines, of ``units`` a copy, and of smaller ones to try."""
    own = -(-c.warps * c.stages * units * c.unit_bytes >> 10)
    return own, *(size for size in SIZES if size < own)


def ring(size: int, stage: int, most: int, ahead: int = 0) -> tuple[int, int]:
    """(stages, prologue_stages): as many stages of ``stage`` bytes as ``size`` bytes hold, at most ``most``.

    ahead: prologue_stages; 0: enough in flight to saturate memory, but few enough not to delay the activations.
    """
    stages = max(1, min(most, size // stage))
    return stages, max(1, min(stages, ahead or ((20 << 10) if stages >= most else (36 << 10)) // stage))


def legal(
    problem: LinearProblem, first: _C, why_not: Callable[[LinearProblem, _C], str | None], candidates: Iterable[_C]
) -> Iterator[_C]:
    """The first config, then every other legal one, without duplicates."""
    yield first
    yield from (one for one in dict.fromkeys(candidates) if one != first and why_not(problem, one) is None)


class Params(jit.Params, header="packed/packed_params.cuh"):
    """Arguments of one launch for few tokens."""


def arguments(operands: Operands, problem: LinearProblem, config: object = None) -> Params:
    """The Params of a launch for few tokens, unchecked."""
    o, p = operands, problem
    return Params(
        *o.weight, o.x, o.x_scale, o.bias, o.y,
        p.m, p.n, p.k, o.x_stride, p.k_blocks, p.weight_tiles,
    )  # fmt: skip


_CODED = {torch.int8: ActivationFormat(8, "sym"), torch.float8_e4m3fn: ActivationFormat(8, "float")}


def problem_of(weight: PackedWeight, m: int, dtype: torch.dtype, output: torch.dtype, device: Device) -> LinearProblem:
    """The problem of m tokens for a weight; dtype: of x, ``output`` or that of 8-bit codes."""
    coded, ordered = _CODED.get(dtype, ActivationFormat()), weight.permutation is not None
    return LinearProblem(m, *weight.shape, weight.format, coded, output, device, ordered, weight.padded[1])


def product(
    x: Tensor | Packed, weight: PackedWeight, y: Tensor, bias: Tensor | None = None, *, gathers: bool = False,
    x_scale: Tensor | None = None,
) -> tuple[LinearProblem, Operands]:  # fmt: skip
    """The problem and operands of y[:] = x W^T + bias, after ``packed_layout.check_operands``.

    x: rows, or codes (a tensor of 8 bits with x_scale).  gathers: of the kernel's ``Traits``; if False, x comes from
    ``packed_layout.in_order``.
    """
    form, x_sum = None, None
    if isinstance(x, Packed):
        form, x_scale, x_sum, x = x.format, x.scale, x.sum, x.codes[:, : x.k]
    m, k = x.shape
    packed_layout.check_operands(weight, x, y, x_scale, bias, ordered=not gathers)
    asked = problem_of(weight, m, x.dtype, y.dtype, Device.of(y))
    ordered = gathers and weight.permutation is not None
    problem = replace(asked, k=k, activations=form or asked.activations, act_order=ordered, aligned=rows_aligned(x))
    return problem, Operands(x, x.stride(0), weight.pointers, y, y.stride(0), bias, x_scale, x_sum)
