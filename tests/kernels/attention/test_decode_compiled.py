"""Decode attention and packing compile for every architecture: no spills, tensor cores, nothing emulated."""

import dataclasses

import pytest

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.kernels.attention.decode import decode
from anybit.kernels.attention.kv_quantize import kv_quantize
from anybit.ops.kv_rows import layout
from anybit.scheme import KVFormat
from cases_decode import Case, problem
from machine_code import disassembly

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a")
CASES = [
    Case("kv4g128", heads=32, kv_heads=8),
    Case("kv2g128", heads=32, kv_heads=8),
    Case("kv4", bf16=True),
    Case("kv2t", head_dim=64, softcap=30.0),
    Case("k8v4g32", head_dim=96, window=512),
    Case("kv16", head_dim=256, alibi=True),
    Case("kv4g128", queries=16),
    Case("kv16", heads=32, kv_heads=8, lengths=(640,)),  # a cluster for each pair
    Case("kv2", head_dim=64, heads=12, kv_heads=4, queries=8, page=64, lengths=(500,)),  # no room for one
]


PAIRS = [
    *((case, "sm_90a") for case in CASES),
    *((case, "sm_80") for case in CASES[:3:2]),
    *((case, arch) for case in CASES[:1] for arch in ("sm_86", "sm_89", "sm_120a")),
]


@pytest.mark.parametrize(("case", "arch"), PAIRS, ids=str)
def test_compiles_without_spills(case: Case, arch: str):
    device = Device.named(arch)
    asked = problem(case)
    config = decode.default(asked, device)
    assert decode.why_not(asked, config, device) is None
    compiled = jit.cached(decode.kernel(config, asked.layout), arch)
    assert compiled.spill_bytes == 0 and compiled.registers <= 255
    code = disassembly(compiled.cubin)
    assert "HMMA" in code and "MOVM" in code
    assert ("UBLKCP" in code) == (device.capability >= 90)
    assert ("LDGSTS" in code) == (device.capability < 90)


@pytest.mark.parametrize(("format", "queries"), [("kv4g128", 5), ("kv8", 1)])
def test_rows_of_a_pool_compile_for_one_token_and_for_drafts(format: str, queries: int):
    device, rows = Device.named("sm_90a"), layout(KVFormat.parse(format), 128, 32)
    asked = decode.Problem(rows.layout, 32, 32, 8, queries, rows.ring, 128, 8192, front=rows.front, slots=rows.slots)
    compiled = jit.cached(decode.kernel(decode.default(asked, device), asked.layout), "sm_90a")
    assert compiled.spill_bytes == 0


def test_floats_of_4_bits_go_to_the_tensor_cores_as_they_are():
    device, asked = Device.named("sm_120a"), problem(Case("kvfp4", heads=32, kv_heads=8))
    compiled = jit.cached(decode.kernel(decode.default(asked, device), asked.layout), "sm_120a")
    assert compiled.spill_bytes == 0
    assert "OMMA" in disassembly(compiled.cubin)
    with pytest.raises(KernelError, match="need the tensor cores of sm_120"):
        decode.default(asked, Device.named("sm_90a"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_packing_compiles(arch: str):
    asked = problem(CASES[2])
    config = kv_quantize.default(kv_quantize.Problem(asked.layout, 2, 2, 1, bf16=True))
    compiled = jit.cached(kv_quantize.kernel(config), arch)
    assert compiled.spill_bytes == 0


def test_refusals_are_sentences():
    device = Device.named("sm_90a")
    asked = problem(CASES[0])
    config = decode.default(asked, device)
    refusals = {
        "sm_80 or later": (asked, config, dataclasses.replace(device, arch="sm_75")),
        "cannot share 8 KV heads": (dataclasses.replace(asked, heads=12), config, device),
        "1 to 16 tokens": (dataclasses.replace(asked, queries=17), config, device),
        "more slack": (dataclasses.replace(asked, queries=16, ring=128), config, device),
        "2 to 16 warps": (asked, dataclasses.replace(config, warps=17), device),
        "shared memory": (asked, dataclasses.replace(config, stages=9), device),
        "bulk copies need": (asked, config, Device.named("sm_80")),
        "fixed split merges within": (
            dataclasses.replace(asked, split=4 * config.block),
            dataclasses.replace(config, split=4, merge_warps=2),
            device,
        ),
        f"heads have {config.head_dim} channels": (asked, dataclasses.replace(config, merge_warps=3), device),
    }
    for words, (p, c, d) in refusals.items():
        assert words in (decode.why_not(p, c, d) or ""), words


def test_a_kernel_for_one_token_stores_no_more():
    asked = kv_quantize.Problem(problem(CASES[0]).layout, 1, 8, 1)
    config = kv_quantize.default(asked)
    assert config.single and kv_quantize.why_not(asked, config, Device.named("sm_90a")) is None
    more = dataclasses.replace(asked, tokens=2)
    assert not kv_quantize.default(more).single
    assert "stores 1 token, not 2" in (kv_quantize.why_not(more, config, Device.named("sm_90a")) or "")
