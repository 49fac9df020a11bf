"""The mma.sync GEMM and quantize-and-pack compile for every architecture that has them, without a GPU.

Two architectures compile a scheme, all with ANYBIT_EXHAUSTIVE=1 in the environment.
"""

import pytest

from anybit import jit
from anybit.device import Device
from anybit.kernels.bitplane.sm80_gemm import sm80_bitplane_gemm
from anybit.kernels.block import quantize_activations
from anybit.kernels.block.quantize_activations import Source, Target
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import ActivationFormat, Scheme
from cases import EXHAUSTIVE
from machine_code import ARCHITECTURES, sass


def problem(scheme: str, m: int, arch: str, n: int = 4096, k: int = 4096) -> LinearProblem:
    parsed = Scheme.parse(scheme)
    formats, device = (parsed.weights, parsed.activations), Device.named(arch)
    return LinearProblem(m, n, k, *formats, device=device, y_aligned=n % 8 == 0)


@pytest.mark.parametrize(
    ("arch", "scheme", "m"),
    [
        (arch, *case)
        for i, arch in enumerate(ARCHITECTURES)
        for j, case in enumerate((("w1a1", 4096), ("w2a2", 64), ("w4a4asym-xasym", 1), ("w8a8", 256)))
        if EXHAUSTIVE or (i + j) % 2 == 0
    ],
)
def test_default_config_compiles_without_spills(arch: str, scheme: str, m: int) -> None:
    config = sm80_bitplane_gemm.default(problem(scheme, m, arch))
    compiled = jit.cached(sm80_bitplane_gemm.kernel(config), arch)
    assert compiled.spill_bytes == compiled.stack_bytes == 0
    assert compiled.registers <= 168
    instructions = sass(compiled.cubin)
    assert any(one.startswith("BMMA.168256.AND.POPC") for one in instructions)
    # Emulation would be a function that returns; ptxas may leave the main loop by a CALL that never does.
    assert not [one for one in instructions if one.startswith("RET") or ".XOR" in one]


@pytest.mark.parametrize(
    ("scheme", "k", "words"),
    [
        ("w4a16", 4096, "bit planes need quantized activations, and these have 16 bits"),
        ("w4a4g128", 4096, "these weights have groups of 128"),
        ("w8a8", 40000, "reach 2601000000 and overflow int32"),
    ],
)
def test_why_not_names_the_reason(scheme: str, k: int, words: str) -> None:
    reason = sm80_bitplane_gemm.why_not(problem(scheme, 16, "sm_80", k=k))
    assert reason is not None and words in reason


def test_every_config_is_legal_and_one_fits_everywhere() -> None:
    for arch in ARCHITECTURES:
        for scheme in ("w1a1", "w3a5", "w8a8"):
            for m in (1, 64, 4096):
                asked = problem(scheme, m, arch)
                found = sm80_bitplane_gemm.configs(asked)
                assert found and all(sm80_bitplane_gemm.why_not(asked, config) is None for config in found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("bits", "code", "source", "target"),
    [
        (1, "bipolar", Source.plain, Target.planes),
        (4, "asym", Source.rms_norm, Target.planes),
        (8, "sym", Source.silu_mul, Target.bytes),
    ],
)
def test_quantizing_into_packs_compiles_without_spills(bits, code, source, target, arch) -> None:
    asked = quantize_activations.Problem(64, 4096, ActivationFormat(bits, code), source=source, target=target)
    compiled = jit.cached(
        quantize_activations.kernel(quantize_activations.default(asked)), arch
    )  # a division's slow path is a call: no check()
    assert compiled.spill_bytes == compiled.stack_bytes == 0
    assert compiled.registers <= 64


@pytest.mark.parametrize(("k", "arch"), [(576, "sm_80"), (1536, "sm_90a"), (14336, "sm_90a")])
def test_pack_after_a_rotation(k: int, arch: str) -> None:
    asked = quantize_activations.Problem(64, k, ActivationFormat(4, "asym"), source=Source.rms_norm, rotated=True)
    compiled = jit.cached(quantize_activations.kernel(quantize_activations.default(asked)), arch)
    assert compiled.spill_bytes == compiled.stack_bytes == 0
    assert compiled.registers <= 64
