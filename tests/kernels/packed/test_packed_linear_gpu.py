"""QuantLinear on the packed kernels against the reference: every kind of scheme, few tokens and many."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from anybit.codes.rtn import quantize_weight
from anybit.layers.linear import QuantLinear
from anybit.ops import plans
from anybit.scheme import CODES, Scheme
from cases import random_weight
from cases_launches import multiplied
from cases_packed import FOREIGN, scheme_of

SCHEMES = ["w4a16g128", "w2a16g64asym", "w3a16bipolar", "w8a16", "w4a8", "w4a8g128", "w8a8", "w4a8fp", "w2a8fpg128",
           *map(scheme_of, FOREIGN)]  # fmt: skip
SPARSE = ["w4a16g128s24", "w2a16g64asyms24", "w3a16asyms24", "w8a16g32s24", "w4a8s24", "w7a8g128asyms24"]


@pytest.mark.parametrize(
    ("scheme", "k", "dtype"),
    [
        *itertools.product(SCHEMES, (576,), (torch.float16, torch.bfloat16)),
        *itertools.product(SCHEMES, (1003,), (torch.float16,)),
        *itertools.product(SCHEMES, (33,), (torch.bfloat16,)),
        *itertools.product(SPARSE, (576, 1004), (torch.float16, torch.bfloat16)),
    ],
)
def test_like_the_reference(scheme, k, dtype):
    parsed = Scheme.parse(scheme)
    n = 200
    if parsed.weights.code in CODES and parsed.weights.group != 16:
        weight = quantize_weight((torch.randn(n, k) * 0.05).to(dtype), parsed.weights)
    else:
        weight = random_weight(n, k, parsed.weights).with_scales(dtype)
    bias = torch.randn(n).to(dtype)
    layer = QuantLinear.from_weight(weight, parsed, bias)
    reference = {m: layer(x.to(dtype)) for m, x in ((m, _input(m, k)) for m in (1, 7, 33, 300))}
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.to("cuda")
    layer.backend = "packed"
    for m, expected in reference.items():
        actual = layer(_input(m, k).to("cuda", dtype)).float().cpu()
        error = (actual - expected.float()).norm() / expected.float().norm()
        assert error < (2e-3 if dtype == torch.float16 else 1.2e-2), f"{m} tokens: relative error {error:.2e}"
    again = layer.state_dict()
    assert all(torch.equal(again[name].cpu(), state[name]) for name in state)


def _input(m, k):
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m))


@pytest.mark.parametrize("scheme", ["w4a16g128", "w3a16g64asym", "w4a8", "w4a8fp"])
def test_plans_give_what_kernels_give(scheme):
    """Also on another stream and in a graph, where addresses differ."""
    parsed, n, k = Scheme.parse(scheme), 1024, 2048
    weight = quantize_weight((torch.randn(n, k) * 0.05).half(), parsed.weights).to("cuda")
    layer = QuantLinear.from_weight(weight, parsed, torch.randn(n, device="cuda").half()).prepare()
    prepared, other = layer._prepared, torch.cuda.Stream()
    with torch.no_grad():
        for m in (1, 4, 16, 64, 200):
            xs = torch.randn(4, m, k, device="cuda").half()
            expected = [multiplied(x, prepared, layer.bias) for x in xs]
            got = [layer(x) for x in xs]
            key = plans.key_of((prepared.spec_text, False), (xs[0], layer.bias), prepared.tensors)
            assert plans.PLANS.get(key) is not None
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                got += [layer(x) for x in xs]
            torch.cuda.current_stream().wait_stream(other)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = [layer(x) for x in xs]
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(got + captured, expected * 3, strict=True))


@pytest.mark.parametrize("scheme", ["w4a16g128", "w4a8"])
def test_gradients_reach_the_input(scheme):
    parsed = Scheme.parse(scheme)
    weight = quantize_weight((torch.randn(200, 576) * 0.05).half(), parsed.weights)
    layer = QuantLinear.from_weight(weight, parsed).to("cuda")
    x = _input(7, 576).to("cuda", torch.float16).requires_grad_()
    y = layer(x)
    assert torch.equal(y.detach(), layer(x.detach()))
    gradient = _input(7, 200).to("cuda", torch.float16)
    y.backward(gradient)
    torch.testing.assert_close(x.grad.float(), gradient.float() @ layer.dequantize(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("backend", ["packed", "bitwise"])
@pytest.mark.parametrize("m", [1, 5, 40, 300])
def test_operands_that_lie_otherwise_give_the_same(m, backend):
    """A strided bias, overlapping rows, padded rows, gathered rows, columns: kernels only see addresses."""
    scheme, n, k = "w4a8", 200, 576
    weight = quantize_weight((torch.randn(n, k) * 0.05).half(), Scheme.parse(scheme).weights).to("cuda")
    both = torch.randn(n, 2, device="cuda").half()
    strided, dense = (
        QuantLinear.from_weight(weight, scheme, bias, backend) for bias in (both[:, 0], both[:, 0].contiguous())
    )
    x = _input(m, k).to("cuda", torch.float16)
    wide = torch.zeros(m, k + 11, device="cuda", dtype=torch.float16)
    wide[:, 3 : k + 3] = x
    for other in (x, wide[:, 3 : k + 3], x.t().contiguous().t()):
        assert torch.equal(strided(other), dense(x))
    row = x[:1].expand(m, k)
    assert torch.equal(strided(row), dense(row.contiguous()))


def test_first_calls_from_two_threads():
    """Two layers of different widths, first called concurrently: each runs its own plan."""
    widths, k = [64 * i for i in range(1, 25)], 512
    x = _input(2, k).to("cuda", torch.float16)
    for backend in ("packed", "bitwise"):
        layers = [
            QuantLinear.from_weight(random_weight(n, k, Scheme.parse("w2a4").weights).to("cuda"), "w2a4", None, backend)
            for n in widths
        ]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda layer: layer(x), [*layers, *reversed(layers)]))
        torch.cuda.synchronize()
        for layer, one, other in zip(layers, found, reversed(found), strict=False):
            assert torch.equal(one, layer(x)) and torch.equal(other, layer(x))
