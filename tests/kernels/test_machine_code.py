"""The machine code checks, tried on the example kernel and on one instruction of each kind."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from anybit import jit
from emulator import instructions, row_sums
from machine_code import ARCHITECTURES, check, count

PARAMS = "struct Params { uint32_t* x; };\n"


@dataclass(frozen=True)
class Params:
    x: jit.Pointer


@dataclass(frozen=True)
class Nothing:
    pass


def kernel(folder: Path, body: str, threads: int = 128) -> jit.Kernel:
    """A kernel with this body, in which d, a and b are fragments loaded from p.x and stored to it."""
    header = folder / f"one{len(list(folder.iterdir()))}.cuh"  # a loaded kernel is not read again
    header.write_text(
        '#include "common/ptx/wgmma.cuh"\n' + PARAMS + "template <class Config> __global__ void "
        "__launch_bounds__(Config::threads) one(const __grid_constant__ Params p) {\n"
        "uint32_t* x = p.x + threadIdx.x; int32_t d[4] = {}; float f[4] = {};\n"
        "uint32_t a[4] = {x[0], x[1], x[2], x[3]}, b[2] = {x[4], x[5]}, c[4] = {x[6], x[7], x[8], x[9]};\n"
        "uint32_t c2[2] = {x[6], x[7]};\n"
        f"{body}\nfor (int i = 0; i < 4; i++) x[i] = d[i] + __float_as_uint(f[i]);\n}}\n"
    )
    return jit.Kernel(str(header), "one", Nothing(), Params, threads)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_check_accepts_the_example(arch: str) -> None:
    check(row_sums.kernel(row_sums.Config()), arch, has="LDGSTS", lacks="HMMA", registers=40)


@pytest.mark.parametrize(
    ("body", "has"),
    [
        ("ptx::mma_m16n8k256_b1(d, a, b);", r"BMMA.168256.AND.POPC"),
        ("ptx::mma_m16n8k32_s8(d, a, b);", r"IMMA.16832.S8.S8"),
        ("ptx::mma_m16n8k32_u8s8(d, a, b);", r"IMMA.16832.U8.S8"),
        ("ptx::mma_m16n8k16_u8s8(d, c2, b[0]);", r"IMMA.16816.U8.S8"),
        ("ptx::mma_m16n8k16_f16(f, a, b);", r"HMMA.16816.F32 "),
        ("ptx::mma_m16n8k16_bf16(f, a, b);", r"HMMA.16816.F32.BF16"),
        ("ptx::mma_sp_m16n8k32_f16(f, a, c, x[9]);", r"HMMA.SP.16832.F32"),
        ("ptx::mma_sp_m16n8k64_s8(d, a, c, x[9]);", r"IMMA.SP.16864.S8.S8"),
        ("d[0] = ptx::movmatrix_trans(a[0]);", r"MOVM"),
        ("f[0] = ptx::ex2_approx(f[1] + __uint_as_float(a[0]));", r"MUFU.EX2"),
    ],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_check_finds_instructions(tmp_path: Path, body: str, has: str, arch: str) -> None:
    check(kernel(tmp_path, body), arch, has=has)


@pytest.mark.parametrize(
    ("product", "has"),
    [
        ("ptx::wgmma_b1<32>(acc, desc, desc, true)", r"BGMMA.64x32x256.AND.POPC"),
        ("ptx::wgmma_s8<32>(acc, desc, desc, true)", r"IGMMA.64x32x32.S8.S8"),
        ("ptx::wgmma_u8s8<32>(acc, a, desc, true)", r"IGMMA.64x32x32.U8.S8"),
        ("ptx::wgmma_e4m3<32>(facc, desc, desc, true)", r"QGMMA.64x32x32.F32.E4M3.E4M3"),
        ("ptx::wgmma_f16<32>(facc, a, desc, true)", r"HGMMA.64x32x16.F32 "),
        ("ptx::wgmma_bf16<32>(facc, desc, desc, true)", r"HGMMA.64x32x16.F32.BF16"),
    ],
)
def test_wgmma_instructions(tmp_path: Path, product: str, has: str) -> None:
    body = (
        "int32_t acc[16] = {}; float facc[16] = {}; const uint64_t desc = ptx::wgmma_descriptor("
        "ptx::shared_address(ptx::dynamic_shared()), ptx::Swizzle::bytes_128, 1024);\n"
        f"ptx::wgmma_fence(); {product}; ptx::wgmma_commit_group(); ptx::wgmma_wait_group<0>();\n"
        "for (int i = 0; i < 16; i++) d[i % 4] += acc[i] + static_cast<int>(facc[i]);"
    )
    check(kernel(tmp_path, body), "sm_90a", has=has)


def test_what_hopper_emulates_is_noticed(tmp_path: Path) -> None:
    """4-bit products are native before sm_90, and emulated by many instructions on it."""
    s4 = kernel(tmp_path, "ptx::mma_m16n8k64_s4(d, a, b);")
    check(s4, "sm_80", has=r"IMMA.16864.S4.S4")
    assert count(jit.cached(s4, "sm_90a").cubin, r"IMMA.16864") == 0


def test_spills_and_calls_are_noticed(tmp_path: Path) -> None:
    spills = kernel(
        tmp_path,
        "uint32_t v[200]; for (int i = 0; i < 200; i++) v[i] = x[7 * i]; __syncthreads();"
        "for (int i = 0; i < 200; i++) x[9 * i] = v[i] * v[199 - i];",
        threads=1024,
    )
    with pytest.raises(AssertionError, match=r"one for sm_90a with Nothing\(\) spills \d+ bytes"):
        check(spills, "sm_90a")
    calls = kernel(tmp_path, "f[0] = __fdiv_rn(f[1] + x[3], __uint_as_float(a[1]));")
    with pytest.raises(AssertionError, match=r"has \['CALL"):
        check(calls, "sm_90a")
    with pytest.raises(AssertionError, match="has no BGMMA among"):
        check(row_sums.kernel(row_sums.Config()), "sm_90a", has="BGMMA")


@pytest.mark.parametrize(
    ("entry", "arch"),
    [
        *(("mma_integers", arch) for arch in ARCHITECTURES),
        *(("mma_floats", arch) for arch in ("sm_89", "sm_90a", "sm_100a", "sm_120a")),
        *((entry, arch) for entry in ("fragments", "copies", "clusters", "warps") for arch in ("sm_100a", "sm_120a")),
    ],
)
def test_ptx_compiles_where_the_instructions_exist(entry: str, arch: str) -> None:
    (case,) = (case for case in instructions.CASES if case.entry == entry)
    assert jit.cached(case.kernel, arch).spill_bytes == 0


def test_what_an_architecture_lacks_is_refused_in_a_sentence(tmp_path: Path) -> None:
    b1 = kernel(tmp_path, "ptx::mma_m16n8k256_b1(d, a, b);")
    with pytest.raises(jit.CompileError, match="1-bit tensor cores end with sm_90: sm_100 and later emulate them"):
        jit.compile(b1, "sm_100a")
    wgmma = kernel(tmp_path, "ptx::wgmma_fence();")
    for arch in ("sm_89", "sm_90", "sm_100a"):
        with pytest.raises(jit.CompileError, match="wgmma needs sm_90a"):
            jit.compile(wgmma, arch)
    fp4 = kernel(tmp_path, "ptx::mma_m16n8k64_nvf4(f, a, b, a[0], a[1]);")
    check(fp4, "sm_120a", has=r"OMMA.*E2M1")
    with pytest.raises(jit.CompileError, match=r"block-scaled fp4 mma\.sync needs sm_120a"):
        jit.compile(fp4, "sm_90a")
