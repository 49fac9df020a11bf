"""QuantLinear on a GPU with integer activations: the reference's results, and errors before anything is launched."""

import pytest
import torch

from anybit.errors import KernelError, LayerError
from anybit.layers.linear import QuantLinear
from anybit.scheme import Scheme
from cases import EXHAUSTIVE, random_weight

SCHEMES = ["w4a4", "w1a2", "w3a5asym-xasym"]
if EXHAUSTIVE:
    SCHEMES += ["w2a4", "w8a8", "w1a1", "w2a2bipolar-xbipolar", "w4a8asym"]

SHAPES = [(576, 576, False), (37, 1031, True)]


def layer_of(scheme: str, n: int, k: int, bias: bool = False) -> tuple[QuantLinear, QuantLinear]:
    """The same layer on the GPU and, on the reference backend, on the CPU."""
    parsed = Scheme.parse(scheme)
    weight = random_weight(n, k, parsed.weights)
    term = torch.randn(n, generator=torch.Generator().manual_seed(3)).half() if bias else None
    on_gpu = QuantLinear.from_weight(weight.to("cuda"), scheme, None if term is None else term.cuda(), "bitwise")
    return on_gpu, QuantLinear.from_weight(weight, scheme, term)


def chosen(scheme: str, n: int, k: int) -> QuantLinear:
    """A layer on the GPU, with the backend that anybit chooses."""
    return QuantLinear.from_weight(random_weight(n, k, Scheme.parse(scheme).weights).to("cuda"), scheme)


def activations(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).half()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_equals_the_reference(scheme: str) -> None:
    for n, k, bias in SHAPES:
        on_gpu, on_cpu = layer_of(scheme, n, k, bias)
        for shape in ((1, 1, k), (2, 5, k), (70, k), (0, k)):
            x = activations(*shape)
            y = on_gpu(x.cuda())
            assert y.shape == (*shape[:-1], n) and y.dtype == x.dtype
            torch.testing.assert_close(y.cpu(), on_cpu(x), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("scheme", ["w3a4asym", "w1a2", "w8a8"])
def test_restores_what_it_was_given(scheme: str) -> None:
    on_gpu, on_cpu = layer_of(scheme, 40, 1100)
    before = {name: tensor.clone() for name, tensor in on_cpu.state_dict().items()}
    on_gpu.prepare()
    for name, tensor in on_gpu.state_dict().items():
        assert torch.equal(tensor.cpu(), before[name]), name


def test_strided_and_bfloat16() -> None:
    on_gpu, on_cpu = layer_of("w4a4", 64, 512)
    wide = activations(6, 1024).cuda()  # slice on the device: copying a slice makes it dense
    columns = activations(512, 6).cuda()
    for x in (wide[:, :512], wide[:, 256:768], wide[:, 3:515], wide[::2, :512], columns.t(), wide.bfloat16()[:, 8:520]):
        assert not x.is_contiguous()
        y = on_gpu(x)
        torch.testing.assert_close(y.cpu(), on_cpu(x.cpu()), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("scheme", ["w4a16g128", "w3a16g64asym", "w4a8", "w2a2"])
def test_the_first_call_may_be_on_any_stream(scheme: str) -> None:
    scheme_weights, x = Scheme.parse(scheme).weights, activations(3, 4096).cuda()
    weight = random_weight(2048, 4096, scheme_weights).to("cuda")
    expected = QuantLinear.from_weight(weight, scheme)(x)
    torch.cuda.synchronize()
    for _ in range(8):  # prepared on one stream, and called at once on another
        layer, streams, found = QuantLinear.from_weight(weight, scheme), [torch.cuda.Stream() for _ in range(2)], []
        torch.cuda.synchronize()  # stored tensors are ready; the kernels' layout is not
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(layer(x))
        torch.cuda.synchronize()
        assert all(torch.equal(y, expected) for y in found)


@pytest.mark.parametrize("scheme", ["w4a16g128", "w2a2"])
def test_a_capture_wants_layers_that_are_prepared(scheme: str) -> None:
    layer, x = chosen(scheme, 64, 512), activations(3, 512).cuda()
    with pytest.raises(LayerError, match="in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(x)
    layer.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    assert torch.equal(y, layer(x))


@pytest.mark.parametrize("m", [1, 5, 80])
@pytest.mark.parametrize("scheme", ["w4a16g128", "w4a8", "w2a2"])
def test_a_bias_of_another_type(scheme: str, m: int) -> None:
    weight, bias = random_weight(64, 512, Scheme.parse(scheme).weights).to("cuda"), torch.randn(64, device="cuda")
    x = activations(m, 512).cuda().bfloat16()
    wide = QuantLinear.from_weight(weight, scheme, bias)(x)
    torch.testing.assert_close(wide, QuantLinear.from_weight(weight, scheme, bias.bfloat16())(x), rtol=2e-2, atol=2e-2)
    with pytest.raises(KernelError, match=r"the bias has shape \(63,\)"):
        layer = QuantLinear.from_weight(weight, scheme)
        layer.bias = torch.nn.Parameter(bias[:63], requires_grad=False)
        layer(x)


@pytest.mark.parametrize("scheme", ["w4a16g128", "w4a8", "w2a2"])
def test_results_beyond_two_to_the_31(scheme: str) -> None:
    on_gpu = chosen(scheme, 4096, 64)
    generator = torch.Generator("cuda").manual_seed(7)
    x = torch.randn(2**31 // 4096 + 8, 64, device="cuda", dtype=torch.float16, generator=generator)
    y = on_gpu(x)
    assert y.numel() > 2**31
    # Few tokens run another kernel. Results are 2.4 on average; rounding weights times scales changes them by 0.005.
    for rows in (slice(0, 8), slice(-8, None)):
        torch.testing.assert_close(y[rows], on_gpu(x[rows].contiguous()), rtol=2e-3, atol=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("scheme", ["w4a16g128", "w3a16g64asym", "w4a8", "w4a8fpg128", "w2a2"])
@pytest.mark.parametrize("m", [1, 5, 40])
def test_layers_on_another_gpu_than_the_current_one(scheme, m):
    torch.cuda.set_device(0)
    weight = random_weight(256, 512, Scheme.parse(scheme).weights)
    here, there = (QuantLinear.from_weight(weight.to(f"cuda:{i}"), scheme).prepare() for i in (0, 1))
    x = torch.randn(m, 512, dtype=torch.float16)
    assert torch.equal(here(x.cuda(0)).cpu(), there(x.cuda(1)).cpu())
