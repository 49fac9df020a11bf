"""The bitwise GEMM compiles for sm_90a without a GPU: 1-bit products in the machine code, no spills, no calls."""

import dataclasses
import subprocess
from pathlib import Path

import pytest

from anybit import jit
from anybit.device import Device
from anybit.kernels import bitwise
from anybit.kernels.bitwise import Output, Problem
from anybit.scheme import ActivationFormat, Scheme, WeightFormat

H200 = Device.named("sm_90a")


def problem(scheme: str, m: int, n: int = 4096, k: int = 4096, output: Output = Output.f16) -> Problem:
    parsed = Scheme.parse(scheme)
    return Problem(m, n, k, parsed.weights, parsed.activations, output, H200)


def disassembler() -> Path:
    nvidia = pytest.importorskip("nvidia")
    for folder in nvidia.__path__:
        for path in Path(folder).glob("cu*/bin/nvdisasm"):
            return path
    pytest.skip("nvdisasm is not installed")


@pytest.mark.parametrize("m", [1, 64, 4096])
@pytest.mark.parametrize("scheme", ["w1a1", "w2a2", "w3a4", "w2a3asym-xasym", "w8a8"])
def test_compiles_without_spills(scheme: str, m: int) -> None:
    config = bitwise.default(problem(scheme, m))
    compiled = jit.compile(bitwise.kernel(config), "sm_90a")
    assert compiled.spill_bytes == 0 and compiled.stack_bytes == 0


@pytest.mark.parametrize("m", [16, 1024])
def test_machine_code(m: int, tmp_path: Path) -> None:
    compiled = jit.compile(bitwise.kernel(bitwise.default(problem("w2a2", m))), "sm_90a")
    cubin = tmp_path / "bitwise.cubin"
    cubin.write_bytes(compiled.cubin)
    sass = subprocess.run([disassembler(), "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert "BGMMA" in sass and ".AND.POPC" in sass
    assert "CALL" not in sass


def test_refuses_what_it_cannot_do() -> None:
    base = problem("w2a2", 64)

    def reason(**change: object) -> str:
        return bitwise.why_not(dataclasses.replace(base, **change)) or ""

    assert bitwise.why_not(base) is None
    assert "emulated on the integer units" in reason(device=Device.named("sm_100a"))
    assert "no warpgroup products" in reason(device=Device.named("sm_80"))
    assert "groups of 128" in reason(weights=WeightFormat(2, "sym", 128))
    assert "float activations" in reason(activations=ActivationFormat())
    assert "int32 ends at 2^31" in reason(weights=WeightFormat(8), activations=ActivationFormat(8, "sym"), k=40000)
    assert "is empty" in reason(m=0)


def test_every_listed_config_is_legal_and_fits() -> None:
    for scheme in ("w1a1", "w4a4", "w8a8"):
        for m in (1, 4096):
            asked = problem(scheme, m)
            configs = bitwise.configs(asked)
            assert bitwise.default(asked) in configs
            for config in configs:
                assert bitwise.shared_bytes(config) <= H200.shared_bytes
                assert min(bitwise.grid(asked, config)) >= 1


def test_config_of_another_problem_is_refused() -> None:
    config = bitwise.default(problem("w2a2", 64))
    assert "other widths" in (bitwise.why_not(problem("w4a4", 64), config) or "")
    assert "float32 is asked for" in (bitwise.why_not(problem("w2a2", 64, output=Output.f32), config) or "")
