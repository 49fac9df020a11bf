"""Embeddings on hardware: rows dequantized from tiles, a tied head multiplies by them, in graphs, too."""

import pytest
import torch

from anybit.layers.embedding import QuantEmbedding, TiedHead
from anybit.scheme import Scheme
from cases import random_weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["w8a16", "w4a16g128", "w3a16g64asym", "w6a16asym", "w4a16g32min", "w4a16g32e2m1"])
def test_packed_rows_decodes_weights(scheme: str, dtype: torch.dtype) -> None:
    parsed = Scheme.parse(scheme)
    weight = random_weight(1003, 520, parsed.weights).with_scales(dtype)
    layer = QuantEmbedding.of_weight(weight.to("cuda"), parsed)
    expected = layer.dequantize(torch.float32).to(dtype)
    head, x = TiedHead(layer), torch.randn(3, 520, device="cuda", dtype=dtype)
    error = (head(x).double() - x.double() @ expected.double().T).norm() / (x.double() @ expected.double().T).norm()
    assert layer.runs_on == "packed" and error < (2e-3 if dtype == torch.float16 else 1.2e-2)
    ids = torch.tensor([[0, 1002, 5], [64, 63, 5]], device="cuda")
    assert torch.equal(layer(ids), expected[ids]) and torch.equal(layer(ids.int()), expected[ids])
    graph, again = torch.cuda.CUDAGraph(), ids.clone()
    with torch.cuda.graph(graph):
        rows = layer(again)
    again.copy_(ids.flip(0))
    graph.replay()
    assert torch.equal(rows, expected[ids.flip(0)])
    assert layer(torch.tensor([1003], device="cuda")).isnan().all()
