"""Codes, dense words and planes: lossless for every width and length, and compressed-tensors' own layout."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import BITS, random_codes, random_weight, seeds, weight_formats

from anybit.codes import packing
from anybit.codes.packing import QuantizedWeight
from anybit.errors import LayerError
from anybit.scheme import WeightFormat

lengths = st.integers(1, 150)


@pytest.mark.parametrize("bits", BITS)
@given(length=lengths, rows=st.integers(1, 5), seed=seeds)
@settings(max_examples=25)
def test_words_are_the_bits_one_after_another(bits: int, length: int, rows: int, seed: int) -> None:
    codes = random_codes((rows, length), bits, seed)
    stream = sum(int(code) << (i * bits) for i, code in enumerate(codes[0]))
    words = packing.pack_words(codes, bits)
    assert words.dtype == torch.int32
    wanted = [stream >> (32 * i) & 0xFFFFFFFF for i in range(-(-length * bits // 32))]
    assert [int(word) & 0xFFFFFFFF for word in words[0]] == wanted
    assert torch.equal(packing.unpack_words(words, bits, length), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [1, 7, 32, 33, 64, 95, 128, 576])
def test_words_are_compressed_tensors(bits: int, length: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = random_codes((5, length), bits, seed=bits)
    signed = codes.to(torch.int8).sub(2 ** (bits - 1))
    words = packing.pack_words(codes, bits)
    assert torch.equal(words, helpers.pack_to_int32(signed, bits))
    # clone: its 4-bit path views single-column words as bytes, which needs their canonical strides
    assert torch.equal(
        helpers.unpack_from_int32(words.clone(memory_format=torch.contiguous_format), bits, codes.shape), signed
    )


@given(format=weight_formats, n=st.integers(1, 6), quads=st.integers(1, 90), seed=seeds)
@settings(max_examples=80)
def test_weights_are_what_their_codes_say(format: WeightFormat, n: int, quads: int, seed: int) -> None:
    k = 4 * quads
    weight = random_weight(n, k, WeightFormat(format.bits, format.code, format.group), seed)
    codes, zeros, groups = weight.codes(), weight.zeros(), weight.groups()
    if format.sparse:
        mask = torch.rand(n, quads, 4, generator=torch.Generator().manual_seed(seed)).argsort(-1).view(n, k) < 2
        zero = weight.zero if format.code == "asym" else None
        weight = QuantizedWeight.from_sparse_codes(codes, mask, weight.scale, zero, format)
        codes = torch.where(mask, codes, zeros.to(torch.uint8)[:, groups])
        assert torch.equal(weight.codes(), codes)
    values = packing.table_of(format.code)[codes.long()] if format.tabled else codes
    expected = (values.double() - zeros.double()[:, groups]) * weight.scale.double()[:, groups]
    if weight.minimum is not None:
        expected += weight.minimum.double()[:, groups]
    assert torch.equal(weight.dequantize(torch.float64), expected)
    assert torch.allclose(weight.dequantize(), expected.float(), rtol=1e-6, atol=1e-6 if format.code == "min" else 0)
    halves = packing.unstack(weight, [n // 2, n - n // 2])
    assert torch.equal(packing.stack(halves).dequantize(), weight.dequantize())


def test_tables_are_those_of_their_formats() -> None:
    e4m3 = packing.table_of("e4m3")
    assert e4m3[0x7E] == 448 and e4m3[0x01] == 2**-9 and int(e4m3.isnan().sum()) == 2
    assert packing.table_of("e2m1").tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_scales_that_another_dtype_cannot_hold_are_refused() -> None:
    plain = random_weight(2, 32, WeightFormat(4, "min", 32))
    assert plain.with_scales(torch.float16).minimum.dtype == torch.float16  # type: ignore[union-attr]
    for factor in (2.0**-40, 2.0**40):
        extreme = replace(plain, scale=plain.scale * factor)
        assert extreme.with_scales(torch.bfloat16).scale.dtype == torch.bfloat16
        with pytest.raises(LayerError, match="do not fit float16: load the model in bfloat16"):
            extreme.with_scales(torch.float16)


def test_act_order_groups() -> None:
    format = WeightFormat(4, "asym", 32)
    plain = random_weight(4, 96, format)
    index = torch.arange(96, dtype=torch.int32).view(3, 32).T.reshape(-1) // 32
    weight = QuantizedWeight(plain.words, plain.scale, plain.zero, plain.shape, format, index)
    expected = (plain.codes() - plain.zeros()[:, index.long()]) * plain.scale[:, index.long()]
    assert torch.equal(weight.dequantize(), expected)


def test_bits_per_weight_counts_everything() -> None:
    weight = random_weight(64, 256, WeightFormat(4, "asym", 128))
    assert weight.bits_per_weight == 4 + (32 + 4) / 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": torch.ones(4, 1)}, r"scale of a 4 x 96 layer .* must have shape \(4, 3\), not \(4, 1\)"),
        ({"words": torch.zeros(4, 5, dtype=torch.int32)}, r"words .* \(4, 12\), not \(4, 5\)"),
        ({"zero": None}, r"zero .* \(4, 3\), not None"),
        ({"group_index": torch.zeros(3, dtype=torch.int32)}, r"group_index .* \(96,\), not \(3,\)"),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, torch.Tensor | None], message: str) -> None:
    weight = random_weight(4, 96, WeightFormat(4, "asym", 32))
    fields = {"words": weight.words, "scale": weight.scale, "zero": weight.zero, **change}
    with pytest.raises(LayerError, match=message):
        QuantizedWeight(**fields, shape=(4, 96), format=weight.format)  # type: ignore[arg-type]


def test_wrong_words_are_named() -> None:
    with pytest.raises(LayerError, match="96 codes of 3 bits are 9 int32 words a row, not 8"):
        packing.unpack_words(torch.zeros(2, 8, dtype=torch.int32), 3, 96)
    with pytest.raises(LayerError, match="1 to 8 bits, not 9"):
        packing.pack_words(torch.zeros(2, 8, dtype=torch.uint8), 9)
