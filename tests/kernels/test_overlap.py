"""Programmatic dependent launch: what kernels may do before griddepcontrol.wait, checked in machine code.

docs/writing-kernels.md, "Kernels that overlap", has the rules.
"""

import re
from dataclasses import replace

import pytest
import torch

from anybit import jit
from anybit.device import Device
from anybit.kernels.bitplane import bitplane
from anybit.kernels.bitplane.sm80_gemm import sm80_bitplane_gemm
from anybit.kernels.block import norm_act, quantize_activations, rope, rope_pages
from anybit.kernels.block.quantize_activations import Source, Target
from anybit.kernels.experts.router import router
from anybit.kernels.experts.sm90_experts_gemv import sm90_experts_gemv
from anybit.kernels.gemm_kernel import Operands, launches
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm80_digits import sm80_packed_digits
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.kernels.packed.sm90_skinny_f16 import sm90_packed_skinny_f16
from anybit.scheme import ActivationFormat, Scheme, WeightFormat
from machine_code import before_wait, sass

HOPPER = Device.named("sm_90a")
A8, A4 = ActivationFormat(8, "sym"), ActivationFormat(4, "sym")
WRITES = r"ST[GA.]|ST$|RED|ATOM|UTMASTG|UTMAREDG|UBLKCP\.G|UBLKRED|EXIT"
LOADS = r"LDG|LD$|LD\.|LDGSTS|UTMALDG|UBLKCP"


def quantizers() -> list[jit.Kernel]:
    """Quantize-and-pack of each source, in both layouts, for few tokens and for many."""
    found = []
    for form, target, m in ((A8, Target.bytes, 1), (A4, Target.planes, 4096)):
        for source, k in ((Source.plain, 4096), (Source.rms_norm, 8192), (Source.silu_mul, 14336)):
            problem = quantize_activations.Problem(m, k, form, torch.float16, source, target, True)
            found.append(quantize_activations.kernel(quantize_activations.default(problem)))
    return found


def small_kernels() -> list[jit.Kernel]:
    """Norm, SiLU, rotary embedding."""
    row, head = norm_act.Problem(1, 4096), rope.Problem(1, 32, 8, 128, stores=True)
    return [
        norm_act.kernel("add_rms_norm", norm_act.norm_config(row)),
        norm_act.kernel("silu_mul", norm_act.silu_config(row)),
        rope.kernel(rope.default(head)),
        rope.kernel(rope.default(replace(head, stores=False))),
        rope_pages.kernel(rope_pages.default(rope_pages.Problem(1, 32, 8, 128))),
        digits()[0],
    ]


def digits() -> list[jit.Kernel]:
    """Activations to digits, and their product."""
    x, problem = jit.Slot("x"), LinearProblem(8, 4096, 4096, WeightFormat(2, "sym", 128))
    given = Operands(x, 4096, (x,) * 4, x, 4096, scratch=(x, None))
    config = sm80_packed_digits.default(problem)
    return [launch.kernel for launch in launches(sm80_packed_digits, given, problem, config)]


def few() -> list[jit.Kernel]:
    """Products for few tokens: all threads wait."""
    problem = LinearProblem(1, 28672, 4096, WeightFormat(4, "sym", 128))
    norm, qkv = (sm90_packed_gemv.norm_default(replace(problem, n=n)) for n in (28672, 6144))
    eight = replace(problem, m=8, activations=A8)
    return [
        sm90_packed_gemv.kernel(sm90_packed_gemv.default(problem)),
        sm90_packed_gemv.kernel(norm, sm90_packed_gemv.NormParams),
        sm90_packed_gemv.kernel(norm, sm90_packed_gemv.NormParams, silu=True),
        sm90_packed_gemv.kernel(qkv, sm90_packed_gemv.RotaryParams),
        sm90_packed_gemv.kernel(qkv, sm90_packed_gemv.RotaryPagesParams),
        sm90_packed_skinny_f16.kernel(sm90_packed_skinny_f16.default(replace(problem, m=16))),
        *(sm90_packed_skinny.kernel(sm90_packed_skinny.default(one)) for one in (replace(problem, n=4096), eight)),
        digits()[1],
    ]


def of_experts() -> list[jit.Kernel]:
    """Both products of a mixture, for one token and for several."""
    format, found = WeightFormat(4, "sym", 128), []
    for tokens in (1, 4):
        gate_up = sm90_experts_gemv.Problem(tokens, 8, 128, 1536, 2048, format, False)
        for problem in (gate_up, replace(gate_up, n=2048, k=768, down=True)):
            found.append(sm90_experts_gemv.kernel(sm90_experts_gemv.default(problem)))
    return found


def routers() -> list[jit.Kernel]:
    """Of few tokens, with the norm before it and without, and of logits."""
    problem = router.Problem(1, 2048, 128, 8, norm=True)
    own = [router.kernel(router.config_of(replace(problem, norm=norm))) for norm in (True, False)]
    return [*own, router.launch_largest(problem, 0, 0, 0).kernel]


def large() -> list[jit.Kernel]:
    """Products whose MMA threads may leave waiting to producer threads."""
    found = []
    for scheme, m in (("w1a1", 1), ("w2a2", 64), ("w1a2", 1024), ("w4a4", 4096)):
        s = Scheme.parse(scheme)
        problem = LinearProblem(m, 4096, 4096, s.weights, s.activations, device=HOPPER)
        family = bitplane.family(problem)
        assert family is not None
        found.append(family.kernel(family.default(problem)))
    for scheme, m in (("w4a16g128", 64), ("w4a8", 16), ("w4a8", 4096)):
        s = Scheme.parse(scheme)
        asked = LinearProblem(m, 4096, 4096, s.weights, s.activations)
        found.append(sm90_packed_gemm.kernel(sm90_packed_gemm.default(asked)))
    return found


def sync() -> jit.Kernel:
    s = Scheme.parse("w2a2")
    problem = LinearProblem(64, 4096, 4096, s.weights, s.activations, device=HOPPER)
    return sm80_bitplane_gemm.kernel(sm80_bitplane_gemm.default(problem))


def matching(names: set[str], pattern: str) -> set[str]:
    return {name for name in names if re.match(pattern, name)}


@pytest.mark.parametrize(
    "kernel", [*quantizers(), *small_kernels(), *few(), *of_experts(), *routers(), sync()], ids=lambda k: k.entry
)
def test_all_threads_wait_before_they_write_or_end(kernel: jit.Kernel) -> None:
    code = jit.cached(kernel, "sm_90a").cubin
    assert any(one.startswith("ACQBULK") for one in sass(code))
    assert not matching(before_wait(code), WRITES)


@pytest.mark.parametrize("kernel", [*quantizers(), *small_kernels()], ids=lambda k: k.entry)
def test_activations_are_read_after_the_wait(kernel: jit.Kernel) -> None:
    """Before it, at most a norm's gamma is loaded, once per vector of a thread."""
    code = jit.cached(kernel, "sm_90a").cubin
    early = matching(before_wait(code), LOADS)
    norms = kernel.entry == "add_rms_norm" or getattr(kernel.config, "source", None) is Source.rms_norm
    assert early <= ({"LDG.E.128.STRONG.GPU"} if norms else set())
    assert bool(early) == (norms and kernel.config.vectors <= 4), "gamma is loaded before the wait"


@pytest.mark.parametrize("kernel", routers(), ids=lambda k: k.entry)
def test_routers_read_weights_and_gamma_before_the_wait(kernel: jit.Kernel) -> None:
    early = matching(before_wait(jit.cached(kernel, "sm_90a").cubin), LOADS)
    assert early == ({"LDG.E.128.STRONG.GPU"} if kernel.entry == "route" else set())


@pytest.mark.parametrize("kernel", large(), ids=lambda k: k.entry)
def test_large_tiles_ask_for_activations_after_the_wait(kernel: jit.Kernel) -> None:
    """Weights are bulk-copied before it; tensor maps load activations after."""
    code = jit.cached(kernel, "sm_90a").cubin
    assert any(one.startswith("ACQBULK") for one in sass(code))
    assert not matching(before_wait(code), "UTMALDG")


@pytest.mark.parametrize("kernel", of_experts()[::2], ids=lambda k: k.entry)
def test_gate_up_reads_ids_and_lets_down_start_after_the_wait(kernel: jit.Kernel) -> None:
    """down reads ids before its own wait, so they must be complete when it starts."""
    early = before_wait(jit.cached(kernel, "sm_90a").cubin)
    assert not matching(early, LOADS) and not matching(early, "PREEXIT")
    assert any(one.startswith("PREEXIT") for one in sass(jit.cached(kernel, "sm_90a").cubin))


@pytest.mark.parametrize(
    "kernel", [*quantizers(), *small_kernels(), *few(), *of_experts(), *large(), sync()], ids=lambda k: k.entry
)
def test_nothing_is_read_as_constant(kernel: jit.Kernel) -> None:
    """ld.global.nc is for data that nobody writes while a kernel runs; the preceding kernel may still be writing."""
    assert not [one for one in sass(jit.cached(kernel, "sm_90a").cubin) if "CONSTANT" in one]
