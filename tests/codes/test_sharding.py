"""A shard of a layer's inputs has the same weights, wherever it is split."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anybit.codes.packing import QuantizedWeight
from anybit.codes.rtn import quantize_weight
from anybit.codes.sharding import shard_format, shard_groups, shard_ordered, shard_words
from anybit.device import Device
from anybit.errors import LayerError
from anybit.kernels.packed.packed_tiles import is_ordered
from anybit.ops import packed
from anybit.scheme import Code, Scheme, WeightFormat
from cases import random_weight, seeds

FORMATS = ("w4a16g128", "w3a16g64asym", "w8a8", "w1a16g32", "w5a16", "w2a16g256asym", "w4a16g128s24")
FOREIGN = ("w4a16g32min", "w2a16g16min", "w4a16g16e2m1", "w4a16g64nf4")


def shard(weight: QuantizedWeight, start: int, inputs: int) -> QuantizedWeight:
    """Inputs ``start`` to ``start + inputs`` of a layer as a layer; it dequantizes to the same bits as the whole."""
    fmt = weight.format
    n, kept = weight.shape[0], 2 if fmt.sparse else 1
    words = shard_words(weight.words, fmt.bits, start // kept, inputs // kept).contiguous()
    indices = None if weight.indices is None else shard_words(weight.indices, 2, start // kept, inputs // kept)
    if weight.group_index is not None and fmt.group is not None:
        index = weight.group_index[start : start + inputs]
        values = (weight.scale, weight.zero, weight.minimum)
        (scale, zero, minimum), index, fmt = shard_ordered(values, index, fmt)
        return QuantizedWeight(words, scale, zero, (n, inputs), fmt, index, indices, minimum)
    scale = shard_groups(weight.scale, fmt, start, inputs)
    zero = None if weight.zero is None else shard_groups(weight.zero, fmt, start, inputs)
    minimum = None if weight.minimum is None else shard_groups(weight.minimum, fmt, start, inputs)
    fmt = shard_format(fmt, start, inputs)
    return QuantizedWeight(words, scale, zero, (n, inputs), fmt, None, indices, minimum=minimum)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMATS + FOREIGN), st.integers(1, 6), st.integers(0, 8), st.integers(1, 8), seeds)
def test_a_shard_dequantizes_to_its_columns(scheme: str, n: int, begin: int, length: int, seed: int) -> None:
    fmt = Scheme.parse(scheme).weights
    generator = torch.Generator().manual_seed(seed)
    start, inputs = 32 * begin, 32 * length
    if scheme in FOREIGN:
        weight = random_weight(n, start + inputs + 64, fmt, seed)
    else:
        weight = quantize_weight(torch.randn(n, start + inputs + 64, generator=generator), fmt, search=False)
    part = shard(weight, start, inputs)
    assert torch.equal(part.dequantize(), weight.dequantize()[:, start : start + inputs])


def test_groups_stay_where_the_cut_meets_them_and_shrink_where_it_does_not() -> None:
    fmt = WeightFormat(4, "sym", 128)
    assert shard_format(fmt, 256, 64) == fmt
    assert shard_format(fmt, 192, 192).group == 64
    assert shard_format(fmt, 96, 32).group == 32
    assert shard_format(WeightFormat(4), 7, 3).group is None


@pytest.mark.parametrize("start", [1, 16, 40])
def test_a_cut_that_no_group_meets_is_refused(start: int) -> None:
    with pytest.raises(LayerError, match=r"cuts a group of 128.*another tensor-parallel size"):
        shard_format(WeightFormat(4, "sym", 128), start, 64)


def test_a_cut_through_a_sparse_four_is_refused() -> None:
    with pytest.raises(LayerError, match="multiples of 4 inputs"):
        shard_format(WeightFormat(4, "sym", None, sparse=True), 6, 4)


@pytest.mark.parametrize("code", ["asym", "min"])
def test_a_shard_of_an_activation_order_keeps_the_groups_that_it_uses(code: Code) -> None:
    plain = random_weight(8, 512, WeightFormat(4, code, 128))
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    index = (order // 128).to(torch.int32)
    weight = replace(plain, group_index=index)
    for start in (0, 256):
        part = shard(weight, start, 256)
        assert part.format.group == 64
        assert torch.equal(part.dequantize(), weight.dequantize()[:, start : start + 256])
    with pytest.raises(LayerError, match="activation order uses 4 groups"):
        shard(weight, 0, 64)


@pytest.mark.parametrize("scheme", ["w4a16g128", "w3a16g128asym", "w4a16g128s24", "w4a8g128s24"])
@pytest.mark.parametrize(("start", "inputs"), [(0, 192), (192, 192), (128, 256), (32, 64), (64, 100)])
def test_a_shard_of_a_layer_in_natural_order_has_no_activation_order(scheme: str, start: int, inputs: int) -> None:
    """Though its index is stored: 2:4 sparse weights run in natural order alone."""
    parsed = Scheme.parse(scheme)
    plain = random_weight(64, 384, parsed.weights)
    part = shard(plain.with_group_index(), start, inputs)
    assert torch.equal(part.dequantize(), plain.dequantize()[:, start : start + inputs])
    assert packed.why_not(part, parsed.activations, Device.named("sm_90a")) is None
    assert not is_ordered(part)
