"""The formats, shapes and random layers of all tests."""

import itertools
import os
from typing import TypeVar

import torch
from hypothesis import strategies as st

from anybit.codes.packing import QuantizedWeight
from anybit.codes.reference import quantize_activations
from anybit.kernels.bitplane import bitplane_layout
from anybit.kernels.block import quantize_activations as activation_kernel
from anybit.kernels.block.quantize_activations import Packed, Target
from anybit.scheme import (
    CODES,
    GROUPS,
    KV_BITS,
    KV_GROUPS,
    TABLES,
    WEIGHT_CODES,
    ActivationFormat,
    KVFormat,
    Scheme,
    WeightFormat,
)

T = TypeVar("T")

EXHAUSTIVE = os.environ.get("ANYBIT_EXHAUSTIVE") == "1"
"""Whether tests of kernels sweep everything (each format and config is compiled) or a sample."""

SEEDS = range(1 + EXHAUSTIVE)
"""Seeds by which emulated threads take turns; races are found in any order."""

BITS = range(1, 9)
PAIRS = list(itertools.product(BITS, BITS))
"""All (weight bits, activation bits)."""

weight_formats = st.builds(
    lambda bits, code, group, sparse: WeightFormat(
        TABLES.get(code, bits), code, group, sparse and code in ("sym", "asym")
    ),
    st.sampled_from(BITS),
    st.sampled_from(WEIGHT_CODES),
    st.sampled_from([None, *GROUPS]),
    st.booleans(),
)
dense_formats = weight_formats.map(lambda f: WeightFormat(f.bits, f.code, f.group))
activation_formats = st.one_of(
    st.just(ActivationFormat()),
    st.just(ActivationFormat(8, "float")),
    st.builds(ActivationFormat, st.sampled_from(BITS), st.sampled_from(CODES)),
)
kv_formats = st.builds(
    KVFormat,
    st.sampled_from(KV_BITS),
    st.sampled_from(KV_BITS),
    st.sampled_from(["channel", "token"]),
    st.sampled_from(KV_GROUPS),
    st.booleans(),
)
schemes = st.builds(Scheme, weight_formats, activation_formats, st.one_of(st.none(), kv_formats))
seeds = st.integers(0, 2**31 - 1)


def in_turn(*choices: T, at: int) -> tuple[T, ...]:
    """All choices if exhaustive, else one of them."""
    return choices if EXHAUSTIVE else (choices[at % len(choices)],)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_codes(shape: tuple[int, ...], bits: int, seed: int = 0) -> torch.Tensor:
    """Uniform unsigned codes, uint8."""
    return torch.randint(0, 2**bits, shape, generator=generator(seed), dtype=torch.uint8)


def random_weight(n: int, k: int, format: WeightFormat, seed: int = 0) -> QuantizedWeight:
    """A layer with uniform codes, scales around 1/16, and uniform zeros, minima, 2:4 masks if the format has them."""
    codes, groups = random_codes((n, k), format.bits, seed), format.groups(k)
    if format.code == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    scale = (torch.rand(n, groups, generator=generator(seed + 1)) + 0.5) / 16
    zero = random_codes((n, groups), format.bits, seed + 2) if format.code == "asym" else None
    minimum = torch.randn(n, groups, generator=generator(seed + 3)) / 4 if format.code == "min" else None
    if format.sparse:
        mask = torch.rand(n, k // 4, 4, generator=generator(seed + 4)).argsort(-1) < 2
        return QuantizedWeight.from_sparse_codes(codes, mask.view(n, k), scale, zero, format)
    return QuantizedWeight.from_codes(codes, scale, zero, format, minimum=minimum)


def quantized(x: torch.Tensor, format: ActivationFormat, target: Target = Target.planes) -> Packed:
    """The codes of x [m, k] by quantize-and-pack on its GPU, in the built-in config."""
    problem = activation_kernel.problem_of(x, format, target)
    packed = Packed(*x.shape, format, target, x.device)
    activation_kernel.launch(problem, activation_kernel.default(problem), packed, x)
    return packed


def assert_codes_equal(packed: Packed, x: torch.Tensor, format: ActivationFormat, mean: float = 1e-6) -> None:
    """Codes are the reference's of x [m, k], bit for bit, where it is finite; columns past k are zeros.

    mean: relative error of scales that are means, which sum in another order.
    """
    (m, k), expected, codes = x.shape, quantize_activations(x.cpu(), format), packed.codes.cpu()
    known, scale = ~expected.scale.isnan(), packed.scale.cpu()  # rows that are finite
    assert torch.equal(scale.isnan(), ~known)
    mean *= format.bits == 1 and format.code == "bipolar"
    torch.testing.assert_close(scale[known], expected.scale[known], rtol=mean, atol=0)
    if packed.target is Target.planes:
        whole = bitplane_layout.unpack(codes, m, bitplane_layout.chunks(k) * bitplane_layout.CHUNK)
        offset = 0
    else:
        whole, offset = codes, 2 ** (format.bits - 1)
    assert not whole[:, k:].view(torch.uint8).any()
    got = whole[:, :k]
    if format.code == "float":
        assert torch.equal(got[known].view(torch.uint8), expected.codes[known].view(torch.uint8))
        return
    wanted = expected.codes.int() - offset
    assert packed.sum is not None
    assert torch.equal(got[known].int(), wanted[known])
    assert torch.equal(packed.sum.cpu()[known], wanted[known].sum(1, dtype=torch.int32))
    if packed.zero is not None:
        assert torch.equal(packed.zero.cpu()[known], expected.zero[known].int() - offset)


def assert_codes_near(
    codes: torch.Tensor, scale: torch.Tensor, expected: torch.Tensor, format: ActivationFormat,
    zero: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Codes [m, k] with scales [m] (and zeros [m]) stand for ``expected``, within half a step and two roundings."""
    own, rounding = quantize_activations(expected, format), 4 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(scale, own.scale, rtol=rounding, atol=0)
    values = (codes.float() - (own.zero if zero is None else zero)[:, None]) * scale[:, None]
    bound = (0.5 + 2**-6) * scale[:, None] + rounding * expected.float().abs().amax(-1, True)
    assert bool(((values - expected.float()).abs() <= bound).all())
