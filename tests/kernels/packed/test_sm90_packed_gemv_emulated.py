"""sm90_packed_gemv and _skinny_f16 on the CPU: widths, codes, groups, types, act-order, ragged ends, clusters.

The two kernels share the formats out between them; each takes all with ANYBIT_EXHAUSTIVE=1 in the environment.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import emulate
from anybit.device import Device
from anybit.kernels.block.rope import RopeStoreArgs
from anybit.kernels.block.rope_pages import RopePagesArgs
from anybit.kernels.gemm_kernel import GemmKernel
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_problem, packed_tiles
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.kernels.packed.sm90_skinny_f16 import sm90_packed_skinny_f16
from anybit.ops import pages
from anybit.ops.elementwise import _rms_norm_cpu, _rotate_store_cpu, _silu_mul_cpu
from anybit.scheme import ActivationFormat, WeightFormat
from cases import in_turn, random_weight
from cases_packed import FOREIGN, TOLERANCE, check_emulated, operands, product, scheme_of, unpack

HOPPER = replace(Device.named("sm_90a"), sms=2)
BOTH = pytest.mark.parametrize("module", [sm90_packed_gemv, sm90_packed_skinny_f16], ids=["digits", "mid"])
HALVES = (torch.float16, torch.bfloat16)


def run(
    module: GemmKernel[Any], format: WeightFormat, m: int, n: int, k: int, dtype: torch.dtype = torch.float16, *,
    ordered: bool = False, bias: bool = False, seed: int = 0,
    make: Callable[[LinearProblem], Any] | None = None, **changes: Any,
) -> None:  # fmt: skip
    check_emulated(
        module, product(format, m, n, k, dtype, ordered=ordered, bias=bias, seed=seed), make, seed, **changes
    )


@BOTH
@pytest.mark.parametrize("bits", range(1, 9))
def test_gemv_multiplies_all_widths(module: GemmKernel[Any], bits: int) -> None:
    run(module, WeightFormat(bits, ("sym", "asym", "bipolar")[bits % 3], 128), 3, 64, 384, HALVES[bits % 2], seed=bits)


@BOTH
@pytest.mark.parametrize("code", ["sym", "asym", "bipolar"])
@pytest.mark.parametrize("group", [32, 64, 256, None])
def test_codes_and_groups(module: GemmKernel[Any], code: str, group: int | None) -> None:
    widths = {"sym": (4, 3), "asym": (3, 8), "bipolar": (8, 4)}[code]
    for bits in in_turn(*widths, at=(group or 0) // 64 + (module is sm90_packed_gemv)):
        i = widths.index(bits)
        run(module, WeightFormat(bits, code, group), 2 + i, 64, 512, HALVES[i], seed=i, bias=True)


@pytest.mark.parametrize("bits", range(2, 9))
def test_sparse_weights(bits: int) -> None:
    """2:4, in the tiles of sm90_packed_gemm: every width, codes with and without zeros, groups, ragged rows."""
    cases = (("sym", 128, 64, 384), ("asym", 32, 20, 300), ("asym", None, 100, 132), ("sym", 64, 72, 264))
    for i in in_turn(bits % 4, (bits + 1 + bits // 4) % 4, at=0):
        code, group, n, k = cases[i]
        format, m = WeightFormat(bits, code, group, True), 1 + (i + bits) % 4  # type: ignore[arg-type]
        run(sm90_packed_gemv, format, m, n, k, HALVES[i % 2], seed=bits, bias=i > 1)
    assert "dense weights" in str(sm90_packed_skinny_f16.why_not(LinearProblem(1, 64, 128, format, device=HOPPER)))


@BOTH
@pytest.mark.parametrize("format", FOREIGN, ids=scheme_of)
def test_formats_of_other_tools(module: GemmKernel[Any], format: WeightFormat) -> None:
    place = FOREIGN.index(format)
    for m, n, k in in_turn((3, 40, 328), (1, 64, 512), (2, 20, 132), at=place + (module is sm90_packed_gemv)):
        run(module, format, m, n, k, HALVES[(place + m) % 2], bias=m == 3, ordered=m == 1)


@BOTH
def test_activation_order(module: GemmKernel[Any]) -> None:
    run(module, WeightFormat(4, "asym", 64), 2, 64, 320, ordered=True)
    run(module, WeightFormat(3, "sym", 256), 1, 64, 300, torch.bfloat16, ordered=True)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 20, 130), (3, 72, 37), (2, 100, 264), (4, 330, 128)])
@BOTH
def test_gemv_takes_ragged_shapes(module: GemmKernel[Any], m: int, n: int, k: int) -> None:
    run(module, WeightFormat(4, "sym", 128), m, n, k, bias=True)


def test_rings_of_digits() -> None:
    """Pipelines that wrap around many times, activations converted again, idle warps without columns."""
    format = WeightFormat(4, "sym", 128)

    def small(p: LinearProblem) -> sm90_packed_gemv.Config:
        return sm90_packed_gemv.fitted(p, 2, 2, 8, 1, trigger=1)

    run(sm90_packed_gemv, format, 4, 192, 1024, make=small, seed=1)
    run(sm90_packed_gemv, format, 1, 192, 1024, make=lambda p: sm90_packed_gemv.fitted(p, 3, 1, 20, 2, 2), seed=2)
    run(sm90_packed_gemv, format, 2, 64, 128, make=lambda p: sm90_packed_gemv.fitted(p, 4, 2, 20))


@pytest.mark.parametrize("cluster", [2, 4])
def test_clusters_of_digits(cluster: int) -> None:
    """Blocks that split K: uneven shares, some blocks without columns, activations at hand or not, several tokens."""
    for m, n, k, bits, x_stages in ((1, 320, 1408, 2, 8), (4, 100, 1100, 4, 1), (2, 72, 130, 3, 4)):

        def make(p: LinearProblem, x_stages: int = x_stages) -> sm90_packed_gemv.Config:
            return sm90_packed_gemv.fitted(p, 3, 2, 10, x_stages, cluster=cluster)

        run(sm90_packed_gemv, WeightFormat(bits, "sym", 128), m, n, k, make=make, seed=k, bias=True)
    run(sm90_packed_gemv, WeightFormat(4, "e2m1", 32), 3, 64, 640, make=make)


@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_shapes_of_blocks(cluster: int) -> None:
    """Warps along rows and along columns, blocks that share columns, token tiles."""
    format = WeightFormat(4, "sym", 128)
    for i, (row_warps, k_warps, units) in enumerate(((1, 3, 2), (2, 2, 2), (3, 1, 4))):

        def make(
            p: LinearProblem, shape: tuple[int, int, int] = (row_warps, k_warps, units)
        ) -> sm90_packed_skinny_f16.Config:
            return sm90_packed_skinny_f16.fitted(p, *shape, 10, 1 + cluster, cluster)

        run(sm90_packed_skinny_f16, format, (5, 16, 27)[i], 320, 1152, make=make, seed=i, bias=True)


def test_numbers_that_are_not_finite() -> None:
    """NaN and infinity give NaN (or infinity), never numbers; zeros give zeros."""
    case = product(WeightFormat(4, "sym", 128), 3, 64, 256)
    case.x[0, 3], case.x[1, 200], case.x[2] = torch.nan, torch.inf, 0.0
    problem = packed_problem.problem_of(case.packed, 3, torch.float16, torch.float16, HOPPER)
    y = case.empty()
    params = packed_problem.arguments(operands(case.packed, case.x, y), problem)
    config = sm90_packed_gemv.default(problem)
    emulate.run(sm90_packed_gemv.kernel(config), params, sm90_packed_gemv.grid(problem, config), dependent=("x", "y"))
    assert not y[:2].isfinite().any() and not y[2].any()


class Fused:
    """A product whose activations are normed, RMSNorm(x + residual), on the emulator."""

    def __init__(
        self, format: WeightFormat, m: int, n: int, k: int, dtype: torch.dtype, warps: int, residual: bool = True
    ) -> None:
        self.case = case = product(format, m, n, k, dtype, bias=True, seed=k + n)
        self.gamma = (torch.rand(k) + 0.5).to(dtype)
        self.other = torch.randn(m, k).to(dtype) if residual else None
        self.total = torch.zeros(m, k, dtype=dtype) if residual else None
        self.problem = packed_problem.problem_of(case.packed, m, dtype, dtype, HOPPER)
        self.config = sm90_packed_gemv.fitted(self.problem, warps, 2, 20, -(-k // 128 // warps))
        assert sm90_packed_gemv.norm_why_not(self.problem, self.config) is None

    def run(self, y: torch.Tensor, step: RopeStoreArgs | RopePagesArgs | None = None, silu: bool = False) -> None:
        """Launch it, by RoPE's epilogue if there is a step."""
        given = operands(self.case.packed, self.case.x, y, self.case.bias)
        norm = sm90_packed_gemv.norm_arguments(given, self.problem, self.gamma, 1e-5, self.other, self.total)
        params = norm if step is None else sm90_packed_gemv.rotary_arguments(norm, step)
        dependent = {"x", "y", "residual", "residual_sum", "ring", "keys", "values"} & set(vars(params))
        if self.other is None:
            dependent -= {"residual", "residual_sum"}
        one = sm90_packed_gemv.norm_launch(self.problem, self.config, params, silu)
        emulate.launched(one, seed=len(self.gamma), dependent=dependent)

    @property
    def expected(self) -> torch.Tensor:
        """The product in float64."""
        x = self.case.x if self.other is None else self.case.x + self.other
        assert self.total is None or torch.equal(self.total, x)
        assert self.case.bias is not None
        return _rms_norm_cpu(x, self.gamma, 1e-5).double() @ unpack(self.case.packed).T + self.case.bias.double()


@pytest.mark.parametrize(
    ("m", "n", "k", "warps", "format"),
    [
        (1, 192, 1024, 3, WeightFormat(4, "sym", 128)),
        (2, 64, 256, 4, WeightFormat(3, "sym", 128)),
        (2, 130, 768, 2, WeightFormat(8, "sym", 128)),
        (1, 64, 200, 2, WeightFormat(4, "sym", 128)),
        (2, 64, 328, 2, WeightFormat(4, "sym", 128)),
        (2, 64, 328, 2, WeightFormat(4, "e2m1", 32)),
    ],
    ids=str,
)
def test_norms_its_activations(m: int, n: int, k: int, warps: int, format: WeightFormat) -> None:
    """A product with fused RMSNorm of x + residual, for one and two tokens, with idle warps."""
    for dtype in in_turn(*HALVES, at=k // 64):
        for residual in (True, False):
            fused = Fused(format, m, n, k, dtype, warps, residual)
            y = fused.case.empty()
            fused.run(y)
            error = replace(fused.case, expected=fused.expected).error(y)
            assert error < TOLERANCE[dtype], f"m={m} n={n} k={k} {dtype} {fused.config}: error {error:.2e}"


@pytest.mark.parametrize("dtype", HALVES)
def test_ends_with_silu(dtype: torch.dtype) -> None:
    """silu(gate) * up with rows interleaved in eights, and an incomplete last tile."""
    for m, n, k, warps, bits in in_turn((1, 208, 512, 3, 4), (2, 64, 256, 4, 3), at=HALVES.index(dtype)):
        fused = Fused(WeightFormat(bits, "sym", 128), m, n, k, dtype, warps, residual=False)
        y = torch.full((m, n // 2), torch.nan, dtype=dtype)
        fused.run(y, silu=True)
        expected = _silu_mul_cpu(fused.expected.to(dtype), paired=True)
        torch.testing.assert_close(y.float(), expected.float(), rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("m", "tokens", "dtype"), [(1, 1, torch.float16), (2, 1, torch.bfloat16), (2, 2, torch.float16)]
)
@pytest.mark.parametrize(("dim", "warps"), [(64, 3), (32, 1)])
def test_turns_and_stores(m: int, tokens: int, dtype: torch.dtype, dim: int, warps: int) -> None:
    """Queries are rotated, keys and values stored in the ring, for sequences in any order."""
    heads, kv_heads, k, slots = 3, 2, 256, 32
    fused = Fused(WeightFormat(4, "sym", 128), m, (heads + 2 * kv_heads) * dim, k, dtype, warps)
    q = torch.full((m, heads * dim), torch.nan, dtype=dtype)
    ring, wanted = torch.zeros(2, 3, kv_heads, 2, slots * dim, dtype=dtype)
    angles = torch.rand(m, dim // 2).repeat(1, 2) * 6
    lengths, order = torch.tensor([40, 7, 33], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    cosine, sine, sequences = angles.cos().to(dtype), angles.sin().to(dtype), order[: m // tokens]
    step = RopeStoreArgs(cosine, sine, ring, lengths, sequences, heads, kv_heads, tokens)
    fused.run(q, step)
    qkv = fused.expected.to(dtype).float()
    expected = _rotate_store_cpu(
        qkv, cosine.float(), sine.float(), wanted, lengths, sequences, heads, kv_heads, tokens, None, None, 0.0, True
    )
    atol = 0.02 * float(qkv.abs().max())
    torch.testing.assert_close(q.view(m, heads, dim).float(), expected.float(), rtol=0.02, atol=atol)
    torch.testing.assert_close(ring.float(), wanted.float(), rtol=0.02, atol=atol)


@pytest.mark.parametrize(("m", "dtype", "dim"), [(1, torch.float16, 64), (2, torch.bfloat16, 32)])
def test_turns_and_stores_in_pages(m: int, dtype: torch.dtype, dim: int) -> None:
    """Keys and values go to the pages of their slots; a token without a slot only has its queries rotated."""
    heads, kv_heads, k, page = 3, 2, 256, 16
    fused = Fused(WeightFormat(4, "sym", 128), m, (heads + 2 * kv_heads) * dim, k, dtype, 1)
    q = torch.full((m, heads * dim), torch.nan, dtype=dtype)
    got, wanted = torch.zeros(2, 3, kv_heads, page, 2 * dim, dtype=dtype)
    angles = torch.rand(40, dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
    positions, slots = torch.tensor([39, 7])[:m], torch.tensor([37, -1])[:m]

    def step(cache: torch.Tensor) -> RopePagesArgs:
        keys, values = cache.transpose(1, 2).split(dim, dim=-1)
        return RopePagesArgs(table, positions, keys, values, slots, heads, kv_heads)

    fused.run(q, step(got))
    qkv = fused.expected.to(dtype)
    expected = pages._rotate_cpu(step(wanted), qkv, None, None, 0.0, True)
    atol = 0.02 * float(qkv.abs().max())
    torch.testing.assert_close(q.view(m, heads, dim).float(), expected.float(), rtol=0.02, atol=atol)
    torch.testing.assert_close(got.float(), wanted.float(), rtol=0.02, atol=atol)


def test_norm_says_what_it_refuses() -> None:
    packed = packed_tiles.prepare(random_weight(64, 256, WeightFormat(4, "sym", 128)))
    problem = packed_problem.problem_of(packed, 1, torch.float16, torch.float16, HOPPER)
    assert sm90_packed_gemv.norm_why_not(problem, sm90_packed_gemv.norm_default(problem)) is None
    assert "tokens" in str(sm90_packed_gemv.norm_why_not(replace(problem, m=3)))
    assert "no activation order" in str(sm90_packed_gemv.norm_why_not(replace(problem, act_order=True)))
    one = sm90_packed_gemv.fitted(problem, 1, 2, 20, 1)
    assert "whole rows" in str(sm90_packed_gemv.norm_why_not(problem, one))
    two = sm90_packed_gemv.fitted(problem, 2, 2, 20, cluster=2)
    assert "split K" in str(sm90_packed_gemv.norm_why_not(problem, two))
    assert sm90_packed_gemv.norm_default(problem, two).cluster_k == 1


@BOTH
def test_gemv_says_what_it_refuses(module: GemmKernel[Any]) -> None:
    packed = packed_tiles.prepare(random_weight(64, 128, WeightFormat(4, "sym", 128)))
    problem = packed_problem.problem_of(packed, 1, torch.float16, torch.float16, HOPPER)
    assert "sm_90" in str(module.why_not(replace(problem, device=Device.named("sm_80"))))
    assert "tokens" in str(module.why_not(replace(problem, m=33)))
    assert "float16 or bfloat16" in str(module.why_not(replace(problem, activations=ActivationFormat(8, "sym"))))
    config = module.default(problem)
    assert "another problem" in str(module.why_not(problem, replace(config, bits=3)))
    assert "shared memory" in str(module.why_not(problem, replace(config, stages=4000)))
    assert all(module.why_not(problem, c) is None for c in module.configs(problem))
