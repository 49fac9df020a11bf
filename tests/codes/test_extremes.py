"""The largest and smallest values of each dtype: what a format cannot represent is refused, all else stays finite."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from anybit.cache.attention import decode, prefill
from anybit.cache.kvcache import KVCache
from anybit.codes.rtn import quantize_weight
from anybit.errors import LayerError, SchemeError
from anybit.scheme import CODES, WeightFormat

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
WIDTH = 64
NOISE = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NOISE /= NOISE.abs().max()
SIGNS = NOISE.sign()
SPIKE = torch.eye(WIDTH, dtype=torch.float64)[5]


def formats() -> Iterator[WeightFormat]:
    for bits, code, group, sparse in itertools.product(range(1, 9), CODES, (None, 32), (False, True)):
        try:
            yield WeightFormat(bits, code, group, sparse)
        except SchemeError:  # bipolar codes are never sparse
            continue


def rows(dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows of extreme weights."""
    kind = torch.finfo(dtype)
    found = {
        "max": kind.max * SIGNS.abs(),
        "min": -kind.max * SIGNS.abs(),
        "both": kind.max * SIGNS,
        "up to max": kind.max * NOISE,
        "spike": kind.max * SPIKE,
        "one": NOISE,
        "subnormal": kind.smallest_normal * NOISE / 2,
        "smallest": kind.smallest_normal * kind.eps * SIGNS,
        "zeros": 0 * NOISE,
    }
    return {name: row.to(dtype) for name, row in found.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_every_format_stay_finite(dtype: torch.dtype) -> None:
    for format in formats():
        weights = rows(dtype)
        if (format.bits, format.code) == (1, "bipolar"):  # the scale is twice the mean magnitude
            for name in ("max", "min", "both"):
                with pytest.raises(LayerError, match="their w1 scale overflows"):
                    quantize_weight(weights.pop(name)[None], format)
        weight = torch.stack(list(weights.values()))
        made = quantize_weight(weight, format)
        found = made.dequantize(dtype)
        assert made.scale.isfinite().all() and found.isfinite().all(), format
        largest = weight.double().abs().amax(1)
        error = (found.double() - weight.double()).abs()
        error = error if format.sparse is False else error * made.mask()
        for i, name in enumerate(weights):
            if format.code == "bipolar" and name in ("spike", "zeros") and format.bits < 4:
                continue  # no code is zero, and most of these weights are
            # Half a step of the widest range, twice that where the scale may not be rounded up, and narrow codes clip.
            allowed = {1: 1.01, 2: 0.7, 3: 0.3}.get(format.bits, 2.1 / 2 ** (format.bits - 1)) * largest[i]
            # A subnormal scale is rounded to a multiple of the smallest value.
            allowed += 2 ** (format.bits - 1) * float(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
            assert error[i].max() <= allowed, (format, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(dtype: torch.dtype, value: float) -> None:
    weight = NOISE.to(dtype).repeat(3, 1)
    weight[1, 4] = value
    for format in formats():
        with pytest.raises(LayerError, match="1 values that are NaN or infinite"):
            quantize_weight(weight, format)


def test_doubles_that_are_no_floats_are_refused() -> None:
    with pytest.raises(LayerError, match="values up to 1e\\+200, more than float32 holds"):
        quantize_weight(1e200 * NOISE.abs().sign()[None], WeightFormat(4))


def test_extremes_change_no_ordinary_group() -> None:
    """Groups are fitted independently, in their own units."""
    ordinary = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    mixed = torch.cat((ordinary, torch.stack([row.float() for row in rows(torch.float32).values()])))
    for format in (WeightFormat(4, "asym", 32), WeightFormat(3, "sym"), WeightFormat(2, "bipolar", 32)):
        alone, among = quantize_weight(ordinary, format), quantize_weight(mixed, format)
        assert torch.equal(alone.words, among.words[:4]) and torch.equal(alone.scale, among.scale[:4])


KV = ["kv16", "kv8", "kv4", "kv2", "kv8t", "kv4t", "kv2t", "k4v2g32t", "k16v4", "k4v16"]
ROTATED = ["kv8rot", "kv4rot", "kv2rot", "k4v4g32rot"]


def attended(format: str, dtype: torch.dtype, kv: Tensor, q: Tensor) -> Tensor:
    """Attention over kv [100, 64] as keys and values: of a decode step, and of a continued prompt."""
    cache = KVCache(format, layers=1, kv_heads=1, head_dim=WIDTH, sequences=1, capacity=128, page=64, dtype=dtype)
    cache.add()
    for part in (kv[None, :99, None], kv[None, 99:, None]):
        cache.extend([0], part.shape[1])
        cache.write(0, [0], part, part)
    step, _ = decode(q[None, None, None], cache, 0, [0])
    cache.extend([0], 2)
    return torch.cat((step[0, 0], prefill(q.expand(2, 1, WIDTH), kv[:2, None], kv[:2, None], cache, 0, 0)[:, 0]))


def tokens(dtype: torch.dtype) -> dict[str, Tensor]:
    """Keys and values [100, 64]. Pages hold scales and zeros in float16, which limits bfloat16's range, too."""
    noise = torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(2))
    kind, most = torch.finfo(dtype), 65504.0
    found = {
        "max": torch.full_like(noise, most),
        "min": torch.full_like(noise, -most),
        "signs": most * noise.sign(),
        "6000": torch.full_like(noise, 6000.0),
        "spike": torch.where(torch.arange(WIDTH) == 5, most, noise),
        "subnormal": kind.smallest_normal / 4 * noise,
        "smallest": torch.full_like(noise, kind.smallest_normal * kind.eps),
        "zeros": torch.zeros_like(noise),
    }
    return {name: x.to(dtype) for name, x in found.items()}


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("format", [*KV, *ROTATED])
def test_keys_and_values_stay_finite(format: str, dtype: torch.dtype) -> None:
    for name, kv in tokens(dtype).items():
        for q in (NOISE.to(dtype), kv[0]):
            assert attended(format, dtype, kv, q).isfinite().all(), name


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("format", [*KV, *ROTATED])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_keys_and_values_that_are_not_finite_are_seen(format: str, dtype: torch.dtype, value: float) -> None:
    """Never garbage: a head with one such value gives NaN, packed or not."""
    for token in (3, 98):
        kv = torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)
        kv[token, 3] = value
        assert not attended(format, dtype, kv, NOISE.to(dtype))[0].isfinite().all()


def test_rotated_values_beyond_float16_become_its_largest() -> None:
    """6,000 in all of 128 channels is 67,882 in one rotated channel: off by a thirtieth, not infinite."""
    cache = KVCache("kv4rot", layers=1, kv_heads=1, head_dim=128, sequences=1, capacity=128, page=64)
    cache.add()
    cache.extend([0], 100)
    kv = torch.full((1, 100, 1, 128), 6000.0).half()
    cache.write(0, [0], kv, kv)
    assert cache.read(0, 0)[0].max() == 65504
    cache.extend([0], 1)
    for x in cache.read_before(0, 0, 1):
        torch.testing.assert_close(x, kv[0].transpose(0, 1).float(), rtol=0.04, atol=0)
