"""Small launches of the packed kernels for compute-sanitizer, memcheck or racecheck:

    compute-sanitizer --tool memcheck --report-api-errors no python3 tests/kernels/sanitize_packed.py [digits] ...

Every way in which they share work (pipelines, clusters), each compared with float64.
"""

import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "kernels"), str(TESTS), str(TESTS / "emulator")]

import torch  # noqa: E402

from anybit import jit  # noqa: E402
from anybit.device import Device  # noqa: E402
from anybit.kernels.block.rope import RopeStoreArgs  # noqa: E402
from anybit.kernels.gemm_kernel import GemmKernel  # noqa: E402
from anybit.kernels.linear_problem import LinearProblem  # noqa: E402
from anybit.kernels.multiply import multiply  # noqa: E402
from anybit.kernels.packed import packed_problem  # noqa: E402
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm  # noqa: E402
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv  # noqa: E402
from anybit.kernels.packed.sm90_skinny_f16 import sm90_packed_skinny_f16  # noqa: E402
from anybit.ops.elementwise import silu_mul  # noqa: E402
from anybit.scheme import WeightFormat  # noqa: E402
from cases_packed import TOLERANCE, PackedCase, check_on_gpu, operands, product  # noqa: E402

W4 = WeightFormat(4, "sym", 128)
HALF, BFLOAT = torch.float16, torch.bfloat16
FEW: dict[str, list[tuple[GemmKernel[Any], int, int, int, WeightFormat, torch.dtype, bool]]] = {
    "digits": [
        (sm90_packed_gemv, 1, 200, 1024, W4, HALF, False),
        (sm90_packed_gemv, 3, 77, 300, WeightFormat(3, "asym", 64), BFLOAT, False),
        (sm90_packed_gemv, 2, 256, 512, WeightFormat(2, "bipolar", None), HALF, True),
        (sm90_packed_gemv, 1, 9000, 256, W4, HALF, False),
    ],
    "mid": [
        (sm90_packed_skinny_f16, 5, 77, 300, WeightFormat(4, "sym", 64), HALF, False),
        (sm90_packed_skinny_f16, 16, 256, 1024, WeightFormat(3, "asym", 32), BFLOAT, True),
        (sm90_packed_skinny_f16, 12, 9000, 512, W4, HALF, False),
    ],
}
LARGE: list[tuple[int, int, int, tuple[int | bool | None, ...]]] = [
    (70, 320, 1024, (64, 2, 1, 1, 1)),
    (16, 192, 1024, (16, 1, 4, 1, 1)),
    (37, 128, 1024, (64, 1, 2, 2, 1)),
    (20, 256, 512, (32, 2, 2, 2, 2)),
    (16, 192, 3072, (16, 1, 2, 2, 1, 6)),
    (30, 192, 1024, (32, 2, 1, 3, 1)),
    (16, 448, 1024, (16, 4, 1, 1, 1, None, True)),
    (16, 192, 1024, (16, 1, 2, 2, 1, None, False, 2)),
    # Stages of two steps, as for qkv and down at 16 tokens.
    (16, 4352, 1024, (16, 1, 2, 2, 1, None, False, 2)),
    (16, 192, 8192, (16, 1, 3, 2, 1)),
    # More weights than shared memory holds, as for qkv at 64 tokens.
    (60, 192, 4096, (64, 1, 2, 1, 1)),
]
WAYS = {"large": LARGE}


def launch(
    it: PackedCase, config: sm90_packed_gemv.Config, y: torch.Tensor, norm: tuple[Any, ...], silu: bool = False,
    step: RopeStoreArgs | None = None,
) -> None:  # fmt: skip
    """A product with a fused norm, and with SiLU or a step of RoPE."""
    problem = packed_problem.problem_of(it.packed, len(it.x), HALF, HALF, Device.of(it.x))
    params = sm90_packed_gemv.norm_arguments(operands(it.packed, it.x, y, it.bias), problem, *norm)
    params = params if step is None else sm90_packed_gemv.rotary_arguments(params, step)
    one = sm90_packed_gemv.norm_launch(problem, config, params, silu)
    jit.launch(one.kernel, one.params, one.grid, pdl=one.pdl)


def ends() -> None:
    """Products with a fused norm and SiLU, or with fused rotary embedding and key store."""
    for m, k, dim in ((1, 576, 64), (2, 512, 32)):
        heads, kv_heads, slots = 4, 2, 32
        n = (heads + 2 * kv_heads) * dim
        it = product(W4, m, n, k, bias=True, device="cuda")
        gamma, residual, total = torch.rand(k, device="cuda").half(), torch.randn_like(it.x), torch.zeros_like(it.x)
        problem = packed_problem.problem_of(it.packed, m, HALF, HALF, Device.of(it.x))
        config = sm90_packed_gemv.norm_default(problem)
        norm = gamma, 1e-5, residual, total
        gated = torch.empty(m, n // 2, dtype=HALF, device="cuda")
        launch(it, config, gated, norm, silu=True)
        q = torch.empty(m, heads * dim, dtype=HALF, device="cuda")
        ring = torch.zeros(m, kv_heads, 2, slots * dim, dtype=HALF, device="cuda")
        lengths = torch.tensor([40, 7][:m], dtype=torch.int32, device="cuda")
        angles = torch.rand(m, dim, device="cuda")
        step = RopeStoreArgs(angles.cos().half(), angles.sin().half(), ring, lengths, None, heads, kv_heads, 1)
        launch(it, config, q, norm, step=step)
        plain = it.empty()
        launch(it, config, plain, norm)
        assert torch.equal(gated, silu_mul(plain, paired=True)) and torch.equal(total, it.x + residual)
        assert ring.count_nonzero() > 0.9 * m * kv_heads * 2 * dim
        print(f"ends {m} x {n} x {k}", flush=True)


def main() -> None:
    chosen = sys.argv[1:] or [*FEW, "ends", *WAYS]
    for name in chosen:
        if name == "ends":
            ends()
        for module, m, n, k, format, dtype, ordered in FEW.get(name, []):
            it = product(format, m, n, k, dtype, ordered=ordered, bias=True, device="cuda")
            check_on_gpu(module, it)
            print(f"{name} {m} x {n} x {k} {format}", flush=True)
        for m, n, k, cut in WAYS.get(name, []):
            it = product(W4, m, n, k, bias=True, device="cuda")
            y = it.empty()
            config = sm90_packed_gemm.config_for(LinearProblem(m, n, k, W4), *cut)
            multiply(sm90_packed_gemm, it.x, it.packed, y, it.bias, config)
            assert it.error(y) < TOLERANCE[HALF], (m, n, k, cut)
            print(f"{name} {m} x {n} x {k} {cut}: {it.error(y):.1e}", flush=True)


if __name__ == "__main__":
    main()
