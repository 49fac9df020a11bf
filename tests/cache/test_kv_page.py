"""The KV cache's page: every format packs and unpacks to the same values, at the layout's positions."""

import itertools

import pytest
import torch

from anybit.errors import LayerError
from anybit.kernels.attention.kv_page import PageLayout, decode, encode, pack_tiles, quantize
from anybit.scheme import KVFormat


def layouts(head_dims=(64, 96, 128, 256), pages=(64, 128, 256)):
    found = []
    for kb, vb, axis, group, dim, page in itertools.product(
        (2, 4, 8, 16), (2, 4, 8, 16), ("channel", "token"), (32, 64, 128), head_dims, pages
    ):
        try:
            found.append(PageLayout(KVFormat(kb, vb, axis, group), dim, page))
        except LayerError:
            continue
    return found


def test_every_layout_is_made_of_whole_vectors():
    for layout in layouts():
        assert layout.key_bytes % 16 == 0 and layout.value_bytes % 16 == 0, layout
        assert layout.page % layout.block == 0 and layout.block % layout.chunk == 0, layout
        assert (layout.codes(True) // 4) % 128 == 0 and (layout.codes(False) // 4) % 128 == 0, layout


@pytest.mark.parametrize("layout", layouts()[::9], ids=lambda x: f"{x.format}-d{x.head_dim}-p{x.page}")
def test_values_come_back_within_half_a_step(layout):
    generator = torch.Generator().manual_seed(layout.head_dim)
    k = torch.randn(2, 2 * layout.page, layout.head_dim, generator=generator).half() * 3 + 1
    v = torch.randn(2, 2 * layout.page, layout.head_dim, generator=generator).half()
    blocks = encode(layout, k, v)
    assert blocks.shape == (2, 2 * layout.blocks, layout.block_bytes)
    k2, v2 = decode(layout, blocks, torch.float16)
    for got, x, bits, axis in (
        (k2, k, layout.format.key_bits, layout.format.key_axis),
        (v2, v, layout.format.value_bits, "token"),
    ):
        if bits == 16:
            assert torch.equal(got, x)
            continue
        codes = by_group(x, layout, bits, axis)
        torch.testing.assert_close(got.float(), codes, rtol=1e-3, atol=2e-3)


def by_group(x, layout, bits, axis):
    """Quantize and dequantize without any packing."""
    if axis == "channel":
        grouped = x.reshape(x.shape[0], -1, layout.chunk, layout.head_dim)
        codes, scale, zero = quantize(grouped, bits, 2)
    else:
        grouped = x.reshape(*x.shape[:2], -1, layout.channel_group)
        codes, scale, zero = quantize(grouped, bits, 3)
    return (codes.float() * scale.float() + zero.float()).reshape(x.shape)


def test_a_key_code_lies_where_the_tensor_cores_read_it():
    codes = torch.zeros(128, 128, dtype=torch.uint8)
    token, channel = 16 * 5 + 8 + 3, 16 * 2 + 4 * 1 + 2 + 1  # tile 5, h 1, g 3; depth tile 2, t 1, p 1, odd
    codes[token, channel] = 9
    words = pack_tiles(codes, 4, True, 128)
    lane, word = 4 * 3 + 1, 2 * 8 + 5
    expected = 9 << (16 + 4 * 3)
    assert int(words[(word // 4 * 32 + lane) * 4 + word % 4]) & 0xFFFFFFFF == expected
    assert int((words != 0).sum()) == 1


def test_quantization_is_exact_at_the_ends_and_for_constants():
    x = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    codes, scale, zero = quantize(x, 2, 1)
    assert torch.equal(codes.float() * scale.float() + zero.float(), x)
    assert scale[1] == 0 and codes[1].eq(0).all()


@pytest.mark.parametrize(
    ("format", "dim", "page", "words"),
    [
        ("kv4", 80, 128, "head_dim"),
        ("kv4", 128, 96, "64, 128 or 256"),
        ("kv4g128", 128, 64, "never span pages"),
        ("kv4", 96, 128, "do not divide"),
    ],
)
def test_page_layout_refuses_what_cannot_be(format, dim, page, words):
    with pytest.raises(LayerError, match=words):
        PageLayout(KVFormat.parse(format), dim, page)


def test_page_layout_counts_bits_per_element():
    assert PageLayout(KVFormat.parse("kv4g128"), 128).bits_per_element == pytest.approx(4.25, abs=0.04)
    assert PageLayout(KVFormat.parse("kv2g128"), 128).bits_per_element == pytest.approx(2.25, abs=0.04)
    assert PageLayout(KVFormat.parse("kv16"), 128).bits_per_element == 16


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_floats_of_4_bits(head_dim: int):
    layout = PageLayout(KVFormat.parse("kvfp4"), head_dim, 128)
    assert str(layout.format) == "kvfp4" and layout.bits_per_element < 4.6
    k, v = (torch.randn(3, 2 * layout.block, head_dim, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    blocks = encode(layout, k, v)
    for got, want in zip(decode(layout, blocks), (k, v), strict=True):
        assert (got - want).abs().mean() / want.abs().mean() < 0.12
    again = encode(layout, *decode(layout, blocks))
    for got, want in zip(decode(layout, again), decode(layout, blocks), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_made_in_float16_are_as_good_as_in_float32(bits: int):
    """One in hundreds differs by one from float32's, where both are almost equally far from the value."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).half() * 3
    codes, scale, zero = quantize(x, bits, 1)
    exact, same_scale, same_zero = quantize(x.float(), bits, 1)
    assert torch.equal(scale, same_scale) and torch.equal(zero, same_zero)
    apart = (codes.int() - exact.int()).abs()
    assert apart.max() <= 1 and apart.float().mean() < (0.05 if bits == 8 else 0.01)
    worst = ((x.float() - zero.float()) / scale.float() - codes.float()).abs().max()
    assert worst < (0.65 if bits == 8 else 0.52)


def test_runs_whose_scale_float16_cannot_hold_well_are_coded_in_float32():
    x = torch.linspace(0, 1, 64).half()[None] * torch.tensor([[1e-4], [1e-6]]).half()
    codes, _, _ = quantize(x, 4, 1)
    exact, _, _ = quantize(x.float(), 4, 1)
    assert torch.equal(codes, exact)
    wide = torch.tensor([[-65504.0, 0.0, 65504.0, 30000.0]]).half()  # the range overflows float16
    assert torch.equal(quantize(wide, 4, 1)[0], quantize(wide.float(), 4, 1)[0])
