"""packed_rows.cuh on the CPU: rows dequantized from tiles, bit for bit."""

import pytest
import torch

import emulate
from anybit.kernels.packed import packed_tiles
from anybit.kernels.packed.rows import packed_rows
from anybit.scheme import Scheme, WeightFormat
from cases import random_weight
from cases_packed import act_order, scheme_of

FORMATS = [
    Scheme.parse(word).weights
    for word in (
        "w8a16", "w4a16g128", "w3a16g64asym", "w6a16asym", "w5a16bipolar", "w8a16g64min", "w4a16g16e2m1", "w4a16g64nf4",
        "w4a16g32iq4", "w8a16e4m3", "w1a16g32bipolar",
    )
]  # fmt: skip


@pytest.mark.parametrize("format", FORMATS, ids=scheme_of)
def test_packed_rows_decodes_weights(format: WeightFormat) -> None:
    i = FORMATS.index(format)
    n, k, dtype = 70 + i, (200, 256, 520)[i % 3], (torch.float16, torch.bfloat16)[i % 2]
    weight = random_weight(n, k, format, i).with_scales(torch.float16)
    if format.group == 64:
        weight = act_order(weight, torch.Generator().manual_seed(i))
    packed = packed_tiles.prepare(weight)
    ids = torch.tensor([0, n - 1, 9, 9, 63, 64, n, -1])
    y = torch.zeros(len(ids), k, dtype=dtype)
    emulate.run(
        packed_rows.kernel(packed_rows.config_of(format, dtype)),
        packed_rows.arguments(packed, ids, y),
        packed_rows.grid(packed, len(ids)),
    )
    assert torch.equal(y[:-2], weight.rows(ids[:-2]).dequantize(torch.float32).to(dtype))
    assert y[-2:].isnan().all()
