"""Elementwise kernels on the emulator: norms, SiLU, rotary embedding with and without a cache write."""

from dataclasses import replace

import pytest
import torch

import emulate
from anybit import jit
from anybit.kernels.block import norm_act, rope, rope_pages
from anybit.ops import elementwise as ops
from anybit.ops import pages

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(got, wanted, dtype):
    torch.testing.assert_close(got.float(), wanted.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "k"), [(torch.float16, 1288), (torch.bfloat16, 130)])
@pytest.mark.parametrize("residual", [True, False])
def test_add_rms_norm_is_that_of_torch(dtype, k, residual):
    x, other = torch.randn(2, 2, k).to(dtype)
    gamma = torch.randn(k).to(dtype)
    y, total = torch.zeros(2, 2, k, dtype=dtype)
    problem, add = norm_act.Problem(2, k, dtype, k % 8 == 0), (other, total) if residual else (None, None)
    one = norm_act.add_rms_norm(problem, x, k, add[0], gamma, 1e-5, y, add[1])
    emulate.launched(one, seed=k, dependent=("x", "residual") if residual else ("x",))
    close(y, ops._rms_norm_cpu(x + other if residual else x, gamma, 1e-5), dtype)
    if residual:
        assert torch.equal(total, x + other)


@pytest.mark.parametrize(
    ("dtype", "k", "paired"), [(torch.float16, 1288, False), (torch.bfloat16, 77, False), (torch.float16, 1048, True)]
)
def test_silu_mul_is_that_of_torch(dtype, k, paired):
    x, y = torch.randn(2, 2 * k).to(dtype), torch.zeros(2, k, dtype=dtype)
    problem = norm_act.Problem(2, k, dtype, k % 8 == 0)
    emulate.launched(norm_act.silu_mul(problem, x, 2 * k, y, paired), seed=k, dependent=("x",))
    close(y, ops._silu_mul_cpu(x, paired), dtype)
    if paired:  # rows of a projection in paired order give the same
        inverse = torch.empty(2 * k, dtype=torch.long).scatter_(0, norm_act.paired_rows(k), torch.arange(2 * k))
        assert torch.equal(ops._silu_mul_cpu(x, paired), ops._silu_mul_cpu(x[:, inverse]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_silu_of_extremes(dtype):
    """Values whose exponential overflows, underflows or is NaN: equal to torch, within quantization error."""
    large = torch.finfo(dtype).max
    few = [0.0, 6e-8, 5, 17, 86, 90, 128, 3e4, large, float("inf")]
    gate = torch.tensor([*few, *(-x for x in few), float("nan")] * 8).to(dtype)  # 168 values
    x, y = torch.stack((gate, torch.ones_like(gate))).reshape(1, -1), torch.zeros(1, gate.numel(), dtype=dtype)
    problem = norm_act.Problem(1, gate.numel(), dtype, True)
    emulate.launched(norm_act.silu_mul(problem, x, x.shape[1], y), seed=1, dependent=("x",))
    wanted = torch.nn.functional.silu(gate.float()).to(dtype)
    torch.testing.assert_close(y[0].float(), wanted.float(), rtol=TOLERANCE[dtype], atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "dim", "norms"),
    [(torch.float16, 64, False), (torch.bfloat16, 128, True), (torch.float16, 96, True), (torch.bfloat16, 80, False)],
)
@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("paired", [False, True])
def test_rotary_embedding(dtype, dim, norms, stores, paired):
    check_rotary_embedding(dtype, dim, norms, stores, paired)


@pytest.mark.parametrize("dim", [16, 100, 2])
def test_rotary_embedding_of_odd_heads(dim):
    check_rotary_embedding(torch.float16, dim, norms=dim > 16)


@pytest.mark.parametrize("paired", [False, True])
def test_rotary_embedding_of_several_heads_a_warp(paired, monkeypatch):
    monkeypatch.setattr(rope, "_MANY", 1)
    check_rotary_embedding(torch.float16, 96, norms=True, paired=paired, heads=10)


def check_rotary_embedding(dtype, dim, norms, stores=False, paired=False, heads=3):
    kv_heads, tokens, batch, ring = 2, 2, 2, 32
    rows = batch * tokens
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(rows, dim) * 6
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    gammas = [torch.randn(dim).to(dtype) for _ in range(2)] if norms and not paired else [None, None]
    q = torch.zeros(rows, heads, dim, dtype=dtype)
    k = None if stores else torch.zeros(rows, kv_heads, dim, dtype=dtype)
    residual, wanted = torch.zeros(2, 3, kv_heads, 2, ring * dim, dtype=dtype)
    lengths, sequences = torch.tensor([40, 0, 33], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    given = qkv[:, rope.paired_channels(heads, kv_heads, dim)].contiguous() if paired else qkv
    problem = rope.Problem(rows, heads, kv_heads, dim, dtype, paired, stores)
    config = rope.default(problem)
    params = rope.Params(
        given, cosine, sine, *gammas, q, k, residual, lengths, sequences,
        qkv.stride(0), heads, kv_heads, tokens, ring, 1e-6,
    )  # fmt: skip
    emulate.run(rope.kernel(config), params, rope.grid(problem, config), seed=dim, dependent=("qkv",))
    wide = [x if x is None else x.float() for x in (qkv, cosine, sine, *gammas)]
    expected_q, expected_k = ops._rotate_cpu(*wide[:3], heads, kv_heads, *wide[3:], 1e-6, False)
    close(q, expected_q, dtype)
    if not stores:
        close(k, expected_k, dtype)
        return
    ops._rotate_store_cpu(*wide[:3], wanted, lengths, sequences, heads, kv_heads, tokens, *wide[3:], 1e-6, False)
    close(residual, wanted, dtype)
    again, same = ops._rotate_cpu(given.float(), *wide[1:3], heads, kv_heads, *wide[3:], 1e-6, paired)
    assert torch.equal(again, expected_q) and torch.equal(same, expected_k)


@pytest.mark.parametrize("ordered", [None, False, True])  # without a ring; with one, by number or by name
def test_rotary_embedding_in_parts(ordered, monkeypatch):
    """With more tokens than a grid has blocks along y, several launches equal one."""
    heads, kv_heads, dim, tokens, batch, ring = 2, 1, 32, 1 if ordered is None else 2, 5, 32
    rows = batch * tokens
    qkv, (cosine, sine) = torch.randn(rows, 4 * dim).half(), torch.rand(2, rows, dim).half()
    lengths = torch.tensor([40, 2, 33, 7, 64], dtype=torch.int32)
    sequences = torch.tensor([4, 2, 0, 1, 3], dtype=torch.int32) if ordered else None
    grids, made = [], []
    for most in (65535, 3):
        monkeypatch.setattr(rope, "MOST_TOKENS", most)
        q, k = torch.zeros(rows, heads, dim).half(), torch.zeros(rows, kv_heads, dim).half()
        cache = torch.zeros(batch, kv_heads, 2, ring * dim).half()
        stored = (None,) * 3 if ordered is None else (cache, lengths, sequences)
        tensors = (qkv, cosine, sine, None, None, q, k if ordered is None else None, *stored)
        slots = [None if one is None else jit.Slot(str(place)) for place, one in enumerate(tensors)]
        problem = rope.Problem(rows, heads, kv_heads, dim, torch.float16, stores=ordered is not None)
        params = rope.Params(*slots, qkv.stride(0), heads, kv_heads, tokens, ring, 0.0)
        for one in rope.launches(problem, params):
            given = {
                name: tensors[int(at.name)].flatten().view(torch.uint8)[at.offset :]
                for name, at in vars(one.params).items()
                if isinstance(at, jit.Slot)
            }
            emulate.run(one.kernel, replace(one.params, **given), one.grid)
            grids.append(one.grid)
        made.append((q, k, cache))
    assert [grid[1] for grid in grids] == [rows, *((3, 2) if ordered is None else (2, 2, 2, 2, 2))]
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("dtype", "dim", "norms", "paired"),
    [(torch.float16, 64, False, True), (torch.bfloat16, 128, True, False), (torch.float16, 256, True, True)],
)
def test_rotary_embedding_into_pages(dtype, dim, norms, paired):
    heads, kv_heads, tokens, page = 3, 2, 5, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(40, dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
    gammas = [torch.rand(dim).to(dtype) + 0.5 for _ in range(2)] if norms else [None, None]
    positions, slots = torch.tensor([39, 0, 7, 8, 1]), torch.tensor([33, -1, 15, 16])  # the last token has none
    got, wanted = torch.zeros(2, 3, kv_heads, page, 2 * dim, dtype=dtype)  # a page as vLLM has it
    given = qkv[:, rope.paired_channels(heads, kv_heads, dim)].contiguous() if paired else qkv
    q = torch.full((tokens, heads, dim), torch.nan, dtype=dtype)
    problem = rope_pages.Problem(tokens, heads, kv_heads, dim, dtype, paired)
    config = rope_pages.default(problem)

    def step(cache):
        keys, values = cache.transpose(1, 2).split(dim, dim=-1)
        return rope_pages.RopePagesArgs(table, positions, keys, values, slots, heads, kv_heads)

    params = rope_pages.arguments(step(got), given, q, *gammas, 1e-6)
    emulate.run(rope_pages.kernel(config), params, rope_pages.grid(problem, config), seed=dim, dependent=("qkv",))
    expected = pages._rotate_cpu(step(wanted), given, *gammas, 1e-6, paired)
    close(q, expected, dtype)
    close(got, wanted, dtype)
    assert int((got != 0).any(-1).sum()) == 2 * 3 * kv_heads / 2  # three tokens of each head
