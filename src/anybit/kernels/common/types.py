"""Enums that several kernels share; each is the C++ enum of the same name in types.cuh."""

from enum import Enum

import torch


class Code(Enum):
    """How codes are decoded: scale * (code - zero) with different zeros, or 8-bit floats; for weights also
    scale * code + minimum, and tables of 16 values (``anybit.scheme``).
    """

    sym = "sym"
    asym = "asym"
    bipolar = "bipolar"
    e4m3 = "float"
    min = "min"
    e2m1 = "e2m1"
    nf4 = "nf4"
    iq4 = "iq4"


class Operand(Enum):
    """The type of tensor-core operands."""

    f16 = "float16"
    bf16 = "bfloat16"
    s8 = "int8"
    e4m3 = "float8_e4m3fn"


class Output(Enum):
    """The type of the result. ``s32`` is the exact integer result, before scales."""

    s32 = "int32"
    f16 = "float16"
    bf16 = "bfloat16"
    f32 = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype

    @property
    def is_16bit(self) -> bool:
        """Whether results are float16 or bfloat16."""
        return self in (Output.f16, Output.bf16)


class Gate(Enum):
    """What joins gate and up: silu(gate) * up; gelu(gate) * up by tanh; gpt-oss's clamped SwiGLU, (up + 1) * glu."""

    silu = "silu"
    gelu_tanh = "gelu_tanh"
    swigluoai = "swigluoai"
