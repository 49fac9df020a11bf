"""Bit planes: the layout matches bitplane_layout.cuh, and prepared weights have the terms that zeros need."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from anybit.errors import KernelError
from anybit.kernels.bitplane import bitplane_layout
from anybit.scheme import CODES, WeightFormat
from cases import BITS, random_codes, random_weight, seeds


@given(st.integers(1, 20), st.integers(1, 2100), st.sampled_from(BITS), seeds)
def test_round_trip_and_size(rows: int, k: int, bits: int, seed: int) -> None:
    codes = random_codes((rows, k), bits, seed)
    packed = bitplane_layout.pack(codes, bits)
    assert packed.numel() == bitplane_layout.size(rows, k, bits)
    assert torch.equal(bitplane_layout.unpack(packed, rows, k), codes)


@given(st.integers(0, 12), st.integers(0, 2099), st.integers(0, 2))
def test_one_bit_lies_where_the_layout_says(row: int, k: int, plane: int) -> None:
    codes = torch.zeros(13, 2100, dtype=torch.uint8)
    codes[row, k] = 1 << plane
    chunk, piece = k // 1024, k % 1024 // 128
    byte = ((chunk * 3 + plane) * 16 + row) * 128 + ((piece ^ (row & 7)) << 4) + k % 128 // 8
    flat = bitplane_layout.pack(codes, 3).flatten()
    assert flat.nonzero().flatten().tolist() == [byte]
    assert flat[byte] == 1 << (k % 8)


@pytest.mark.parametrize("code", CODES)
def test_prepare_keeps_the_correction(code: str) -> None:
    weight = random_weight(11, 300, WeightFormat(3, code))
    prepared = bitplane_layout.prepare(weight)
    doubled = 2 if code == "bipolar" else 1
    expected = doubled * -weight.centered(torch.float64).sum(1)
    assert torch.equal(prepared.correction.double(), expected)
    assert torch.equal(bitplane_layout.unpack(prepared.planes, 11, 300), weight.codes())
    assert (prepared.zero is None) == (code != "asym")


@pytest.mark.parametrize("code", CODES)
def test_memory_beside_the_planes_does_not_grow_with_the_layer(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(205, 1100, WeightFormat(3, code))
    whole = bitplane_layout.prepare(weight)
    monkeypatch.setattr(bitplane_layout, "_ROWS_ELEMENTS", 24 * 2048)
    with _Largest() as largest:
        parts = bitplane_layout.prepare(weight)
    for name in ("planes", "scale", "correction"):
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name
    assert largest.bytes <= max(4 * 24 * 2048, whole.planes.numel())


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor created by any operation."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.numel() * result.element_size())
        return result


def test_refuses_groups() -> None:
    with pytest.raises(KernelError, match="these weights have groups of 128"):
        bitplane_layout.prepare(random_weight(8, 256, WeightFormat(4, group=128)))
