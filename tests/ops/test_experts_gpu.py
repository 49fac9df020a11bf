"""The op ``experts`` on a GPU at any number of tokens: against the reference, in CUDA graphs, and bit by bit."""

import pytest
import torch
from torch import Tensor

from anybit.ops.experts import experts
from anybit.ops.prepared_experts import ExpertPart
from anybit.scheme import Scheme
from cases_experts import Mixture, error, on_gpu, run
from cases_packed import TOLERANCE

COUNT, TOP = 8, 2


def mixture_of(scheme: str, tokens: int, gate: str = "silu", bias: bool = True, inner: int = 264) -> Mixture:
    """Experts whose rows are padded to tiles: 2 * 264 of gate_up."""
    dtype = (torch.float16, torch.bfloat16)[tokens % 2]
    parsed = Scheme.parse(scheme)
    return Mixture(
        parsed.weights, COUNT, 512, inner, tokens, dtype, bias=bias, gate=gate, seed=tokens,
        activations=parsed.activations,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 5, 17, 64, 300, 1501])
@pytest.mark.parametrize("scheme", ["w4a16g128", "w3a16g64asym", "w4a16g32e2m1", "w4a16g128s24", "w4a8", "w4a4"])
def test_tokens(scheme: str, tokens: int) -> None:
    mixture = mixture_of(scheme, tokens)
    prepared, (ids, weights) = on_gpu(mixture), mixture.routing(TOP)
    ids[::5, 1], ids[1::7, 0] = -1, COUNT
    y = run(mixture, prepared, ids.int() if tokens % 2 else ids, weights)
    steps = 1.6e-2 if mixture.activations.quantized else 0  # between the products, some values round the other way
    assert error(y, mixture.expected(ids, weights)) < max(2 * TOLERANCE[mixture.dtype], steps)
    assert torch.equal(y, run(mixture, prepared, ids.int() if tokens % 2 else ids, weights))


@pytest.mark.parametrize("tokens", [8, 300])
@pytest.mark.parametrize("gate", ["gelu_tanh", "swigluoai"])
def test_gates(gate: str, tokens: int) -> None:
    mixture = mixture_of("w4a16g128", tokens, gate)
    ids, weights = mixture.routing(TOP)
    y = run(mixture, on_gpu(mixture), ids, weights)
    assert error(y, mixture.expected(ids, weights)) < 2 * TOLERANCE[mixture.dtype]


@pytest.mark.parametrize("tokens", [5, 300])
def test_a_graph_reads_ids_at_each_replay(tokens: int) -> None:
    mixture = mixture_of("w4a16g128", tokens, bias=False)
    prepared, x = on_gpu(mixture), mixture.x.cuda()
    ids, weights = (one.cuda() for one in mixture.routing(TOP))
    source = ids.clone()

    def step() -> Tensor:
        torch.add(source, 0, out=ids)
        return experts(x, ids, weights, prepared)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for seed in range(4):
        chosen, _ = mixture.routing(TOP, seed)
        chosen[seed] = -1
        source.copy_(chosen)
        graph.replay()
        assert error(y.cpu(), mixture.expected(chosen, weights.cpu())) < 2 * TOLERANCE[mixture.dtype]
        assert not y[seed].any()


@pytest.mark.parametrize("scheme", ["w4a16g128", "w3a16asym", "w2a16g32min", "w4a16g128s24"])
def test_parts_are_the_layers_own_weights(scheme: str) -> None:
    mixture = mixture_of(scheme, 1)
    prepared = on_gpu(mixture)
    rows = mixture.gate_up.shape[0] // COUNT
    for expert in (0, 3, COUNT - 1):
        down = ExpertPart.of(prepared, expert, 2).restore()
        assert torch.equal(down.words.cpu(), mixture.down.words.view(COUNT, mixture.hidden, -1)[expert])
        eights = mixture.gate_up.scale.view(COUNT, rows // 16, 2, 8, -1)[expert]
        for place in (0, 1):
            part = ExpertPart.of(prepared, expert, place).restore()
            assert torch.equal(part.scale.cpu(), eights[:, place].flatten(0, 1))
