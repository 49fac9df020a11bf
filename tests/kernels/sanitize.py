"""Small launches for compute-sanitizer, memcheck or racecheck:

    compute-sanitizer --tool memcheck --report-api-errors no python tests/kernels/sanitize.py [kv]

(without API errors: a newer cuda-bindings asks an older driver for functions that it lacks; racecheck with
--kernel-name regex=bitplane --kernel-name regex=quantize, as it may fail on other kernels). Each product is
also compared with the reference, to catch errors that only appear under the tool's timing. With kv: packing into
the KV cache (prompts, steps, windows that become full) and decode attention (even split, masks).
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "kernels"), str(TESTS), str(TESTS / "emulator")]

import torch  # noqa: E402

from anybit.cache.attention import decode_kernel, decode_reference  # noqa: E402
from anybit.kernels.bitplane import bitplane  # noqa: E402
from anybit.kernels.bitplane.bitplane_problem import Facts  # noqa: E402
from anybit.kernels.bitplane.sm80_gemm import sm80_bitplane_gemm  # noqa: E402
from anybit.kernels.bitplane.sm90_stacked.sm90_bitplane_stacked import Stationary  # noqa: E402
from anybit.kernels.common.types import Output  # noqa: E402
from anybit.kernels.linear_problem import LinearProblem  # noqa: E402
from anybit.scheme import Scheme  # noqa: E402
from cases import assert_codes_equal, quantized  # noqa: E402
from cases_bitplane import H200, TOKENS_A, check_on_gpu, gemm, resident, rings, skinny, stacked  # noqa: E402
from cases_decode import Case, relative_error  # noqa: E402

CASES = [
    *((5, 24, 300, "w2a2"), (70, 136, 1100, "w3a4asym-xasym"), (17, 40, 2048, "w1a1"), (1, 72, 77, "w4a8")),
    (150, 264, 1100, "w2a2"),  # float16 results leave by tensor map
]
RINGS: dict[str, Any] = {"weight_chunks": 2, "activation_chunks": 2}
# Ways that small products do not take by default, with 16-bit results: split tiles, clusters that
# share k, several tiles of stacked planes.
Way = tuple[int, int, int, str, Callable[..., Facts], dict[str, Any]]
WAYS: list[Way] = [
    (150, 264, 1100, "w1a1", gemm, {"tile_m": 128, "tma_store": True, "epilogue_stages": 4}),
    (300, 264, 2100, "w2a2", gemm, {"tile_m": 256, "tma_store": True} | RINGS),
    (70, 72, 2100, "w2a2", skinny, TOKENS_A | rings(6, 3, 3)),
    (9, 72, 2100, "w1a2", skinny, {"tile_b": 16, "cluster_k": 2}),
    (64, 136, 2100, "w1a2", resident, {"tile_b": 32, "fill_waves": True}),
    (70, 128, 2100, "w2a2", resident, {"tile_b": 32, "accumulator_sets": 2, "prologue_stages": 1}),
    (64, 136, 2048, "w3a4", resident, TOKENS_A | {"accumulator_sets": 2}),
    (64, 136, 3100, "w3a4", resident, {"tile_b": 32, "prologue_stages": 1, "cp_async_activations": True}),
    (
        1030,
        4104,
        2100,
        "w1a2",
        stacked,
        {"tile_m": 128, "stationary": Stationary.activations, "activation_stages": 3, "weight_stages": 3},
    ),
    (1030, 4104, 1100, "w2a2asym-xasym", stacked, {"tile_m": 128, "weight_stages": 3}),
]


LENGTHS = (300, 7, 128, 1025)
KV = [
    Case("kv4g128", lengths=LENGTHS),
    Case("kv2g128t", lengths=LENGTHS, heads=32, data="spiky"),
    Case("kv2g32", lengths=LENGTHS, head_dim=64, bf16=True, queries=3),
    Case("k8v4", lengths=LENGTHS, heads=32, window=150, sinks=True),
]


def problems() -> list[tuple[int, int, int, Scheme]]:
    return [(m, n, k, Scheme.parse(text)) for m, n, k, text in CASES]


def ways() -> list[tuple[LinearProblem, Facts]]:
    """The problems and configs of WAYS."""
    found = []
    for m, n, k, text, make, change in WAYS:
        problem = problem_of(m, n, k, text)
        config = make(problem, **change)
        reason = bitplane.family_of(config).why_not(problem, config)
        assert reason is None, reason
        found.append((problem, config))
    return found


def problem_of(m: int, n: int, k: int, text: str) -> LinearProblem:
    """A product with 16-bit results."""
    scheme = Scheme.parse(text)
    return LinearProblem(m, n, k, scheme.weights, scheme.activations, device=H200)


def kv() -> None:
    for case in KV:
        here, _, _ = case.build("cpu")
        cache, sequences, q = case.build("cuda")
        torch.cuda.synchronize()
        assert torch.equal(here.pages[1], cache.pages[1].cpu()), case
        want, _ = decode_reference(q, cache, 1, sequences, case.masks("cuda"), precision=torch.float64)
        for split in (0, 0, 256):
            out, _ = decode_kernel(q, cache, 1, sequences, case.masks("cuda"), split=split)
            torch.cuda.synchronize()
            assert relative_error(out, want) < (1e-2 if case.bf16 else 2e-3), case
    print(f"{len(KV)} cases, packing and attention: ok")


def main() -> None:
    for m, n, k, scheme in problems():
        for output in (Output.s32, Output.f16):
            problem = LinearProblem(m, n, k, scheme.weights, scheme.activations, output.dtype, H200)
            for family in (sm80_bitplane_gemm, bitplane):
                check_on_gpu(problem, family.default(problem))
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).half()
        assert_codes_equal(quantized(x.cuda(), scheme.activations), x, scheme.activations, mean=1e-5)
    for problem, config in ways():
        check_on_gpu(problem, config)
    torch.cuda.synchronize()
    print(f"{len(CASES)} cases, both families, and {len(WAYS)} ways: ok")


if __name__ == "__main__":
    kv() if "kv" in sys.argv[1:] else main()
