"""Backend selection, what the bit-plane backend keeps of a weight, and fallbacks: all without a GPU."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anybit
from anybit import ops
from anybit.choose.builtin import builtin
from anybit.choose.families import tiles_of
from anybit.codes.hadamard import transform
from anybit.device import Device
from anybit.errors import KernelError, LayerError
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.layers.embedding import QuantEmbedding
from anybit.layers.linear import QuantLinear, use_backend
from anybit.ops import backend, packed
from anybit.ops.backend import LinearSpec
from anybit.ops.bitwise import Bitwise, why_not
from anybit.ops.checks import dense_bias
from anybit.scheme import CODES, ActivationFormat, Scheme, WeightFormat
from cases import BITS, random_weight, seeds


@settings(max_examples=30)
@given(st.sampled_from(BITS), st.sampled_from(CODES), st.integers(1, 40), st.integers(1, 1100), seeds)
def test_planes_restore_the_packed_weight(bits: int, code: str, n: int, k: int, seed: int) -> None:
    weight = random_weight(n, k, WeightFormat(bits, code), seed)
    spec = LinearSpec("bitwise", n, k, weight.format, Scheme.parse("w4a4").activations)
    again = Bitwise().restore(Bitwise().prepare(weight, spec.activations), spec)
    assert torch.equal(again.words, weight.words)
    assert torch.equal(again.scale, weight.scale)
    assert (again.zero is None) == (weight.zero is None)
    assert weight.zero is None or torch.equal(again.zero, weight.zero)


def reason_of(refuses: Any, scheme: str, arch: str) -> str | None:
    parsed = Scheme.parse(scheme)
    found: str | None = refuses(random_weight(64, 512, parsed.weights), parsed.activations, Device.named(arch))
    return found


@pytest.mark.parametrize(
    ("scheme", "arch", "words"),
    [
        ("w2a2", "sm_90a", None),
        ("w8a8", "sm_86", None),
        ("w2a2", "sm_100a", "no 1-bit tensor cores: from sm_100 on they are emulated on the integer units"),
        ("w4a4g64", "sm_80", "bit planes need one scale a row, and these weights have groups of 64"),
        ("w4a8fp", "sm_90a", "8-bit float activations have no bit planes"),
    ],
)
def test_where_planes_run(scheme: str, arch: str, words: str | None) -> None:
    reason = reason_of(partial(why_not, 64, 512), scheme, arch)
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize(
    ("scheme", "arch", "words"),
    [
        *(("w4a16g128", arch, None) for arch in ("sm_90a", "sm_100a")),
        ("w3a16g64asym", "sm_80", None),
        ("w4a8", "sm_89", None),
        ("w8a8", "sm_120a", None),
        ("w4a8fp", "sm_90a", None),
        ("w4a8fp", "sm_89", "it multiplies integers or 16-bit floats, and the activations are 8-bit floats"),
        ("w4a4-xasym", "sm_120a", "int8 products take symmetric activations of 2 bits or more"),
    ],
)
def test_where_tiles_run(scheme: str, arch: str, words: str | None) -> None:
    reason, parsed = reason_of(packed.why_not, scheme, arch), Scheme.parse(scheme)
    assert reason is None if words is None else words in str(reason)
    for m in (1, 3, 9, 70, 5000) if reason is None else ():
        product = LinearProblem(m, 64, 512, parsed.weights, parsed.activations, device=Device.named(arch))
        assert builtin(product, tiles_of(parsed.activations)).why_not(product) is None


def documented(weights: WeightFormat, x: ActivationFormat, arch: str) -> bool:
    """The entry in the table of docs/hardware.md."""
    if not x.quantized:
        return True
    if not x.integer:
        return arch == "sm_90a" and weights.bits <= (5 if weights.code == "sym" else 4)
    if x.code == "sym" and x.bits > 1:
        return arch != "sm_90a" or weights.group is None or weights.bits < 8 or weights.code == "sym"
    return weights.group is None and arch not in ("sm_100a", "sm_120a")


@settings(max_examples=75)
@given(
    st.sampled_from(BITS),
    st.sampled_from(CODES),
    st.sampled_from([None, 32, 128, 256]),
    st.sampled_from(["16", "8fp", *(f"{b}-x{c}" for b in BITS for c in ("asym", "bipolar")), *map(str, BITS)]),
    st.sampled_from(["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]),
)
def test_what_the_page_on_schemes_says_runs(bits: int, code: str, group: int | None, x: str, arch: str) -> None:
    weights, activations = WeightFormat(bits, code, group), Scheme.parse(f"w4a{x}").activations
    for m in (1, 5, 300):
        product = LinearProblem(m, 64, 512, weights, activations, device=Device.named(arch))
        if documented(weights, activations, arch):
            assert builtin(product).why_not(product) is None
        elif m == 300:  # a kernel only for few tokens is no backend for a layer
            with pytest.raises(KernelError):
                builtin(product)


@pytest.mark.parametrize("scheme", ["w4a16g32", "w4a8", "w4a8g32", "w4a8fp"])
def test_a_layer_may_have_any_number_of_inputs(scheme: str) -> None:
    parsed = Scheme.parse(scheme)
    for k, arch in ((33, "sm_90a"), (96, "sm_80"), (100, "sm_90a"), (104, "sm_90a"), (112, "sm_80")):
        product = LinearProblem(300, 64, k, parsed.weights, parsed.activations, device=Device.named(arch))
        if arch == "sm_90a" or scheme != "w4a8fp":
            assert builtin(product).why_not(product) is None
        else:
            with pytest.raises(KernelError):
                builtin(product)


def test_costs_order_the_backends() -> None:
    for scheme in ("w1a2", "w2a3", "w2a4", "w3a3", "w8a8"):
        parsed = Scheme.parse(scheme)
        weight = random_weight(8, 64, parsed.weights)
        costs = {name: one.cost(weight, parsed.activations) for name, one in ops.backends.items()}
        assert min(costs, key=costs.__getitem__) == ("packed" if scheme in ("w3a3", "w8a8") else "bitwise"), scheme


def test_falls_back_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reference-packed", "reference-decoded"):  # as on a GPU, where the reference must be named
        monkeypatch.setattr(ops.backends[name], "unasked", ())
    parsed = Scheme.parse("w3a5-xasym")
    weight = random_weight(8, 64, parsed.weights)
    with pytest.raises(KernelError, match="no backend runs a 8 x 64 layer in w3a5-xasym on cpu"):
        ops.choose(weight, parsed.activations)
    monkeypatch.setattr(backend, "_told", set())
    ops.allow_fallback()
    try:
        with pytest.warns(UserWarning, match="falling back to reference-packed"):
            assert ops.choose(weight, parsed.activations) == "reference-packed"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ops.choose(weight, parsed.activations) == "reference-packed"
    finally:
        ops.allow_fallback(False)


@pytest.mark.parametrize("lacks", ["a GPU", "memory"])
def test_a_backend_that_cannot_run_a_layer_changes_none(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [QuantLinear.from_weight(random_weight(8, 32, WeightFormat(4)), "w4a16") for _ in range(2)]
    model, prepare = use_backend(torch.nn.Sequential(*layers), "reference-packed"), ops.prepare

    def once(*args: Any) -> ops.Prepared:
        if layers[0]._prepared is not None:
            raise torch.OutOfMemoryError("no memory")
        return prepare(*args)

    monkeypatch.setattr(ops, "prepare", once if lacks == "memory" else prepare)
    with pytest.raises((KernelError, torch.OutOfMemoryError), match=r"need a CUDA device|no memory"):
        use_backend(model, "packed" if lacks == "a GPU" else "reference-decoded")
    assert all(layer.backend == "reference-packed" for layer in layers)
    monkeypatch.undo()
    assert layers[0](torch.ones(1, 32)).shape == (1, 8)


def test_layers_of_impossible_shapes_are_refused() -> None:
    with pytest.raises(LayerError, match="whole numbers of at least 1, not 0 and 8"):
        QuantLinear(0, 8, "w4a16")
    with pytest.raises(LayerError, match="out_features must be whole numbers of at least 1, not '4' and 3"):
        QuantLinear("4", 3, "w4a16")  # type: ignore[arg-type]
    with pytest.raises(LayerError, match=r"bias has shape \(3,\), and the layer has 8 outputs"):
        QuantLinear.from_weight(random_weight(8, 32, WeightFormat(4)), "w4a16", torch.zeros(3))


@pytest.mark.parametrize(("scheme", "hadamard"), [("w4a16", False), ("w4a16", True), ("w4a8", False)])
def test_gradients_reach_the_input(scheme: str, hadamard: bool) -> None:
    """With 24 inputs, whose rotation is not its own inverse; the Jacobian is that of the layer without rounding."""
    k = 24
    layer = QuantLinear(k, 8, scheme, bias=False, hadamard=hadamard)
    layer.load_weight(random_weight(8, k, WeightFormat(4)))
    x, upstream = torch.randn(3, k, requires_grad=True), torch.randn(3, 8)
    with warnings.catch_warnings(action="error"):
        layer(x).backward(upstream)
    plain = QuantLinear(k, 8, "w4a16", bias=False, hadamard=hadamard)
    plain.load_weight(layer.quantized_weight())
    with torch.no_grad():
        jacobian = plain(torch.eye(k))  # row i: y of the i-th unit vector
    torch.testing.assert_close(x.grad, upstream @ jacobian.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 0, 24), (2, 3, 24)])
def test_gradients_reach_a_bias_that_asks_for_them(shape: tuple[int, ...]) -> None:
    layer = QuantLinear.from_weight(random_weight(8, 24, WeightFormat(4)), "w4a16", torch.randn(8))
    layer.bias.requires_grad_()
    upstream = torch.randn(*shape[:-1], 8)
    for asked in (False, True):
        layer.bias.grad = None
        layer(torch.randn(*shape, requires_grad=asked)).backward(upstream)
        torch.testing.assert_close(layer.bias.grad, upstream.reshape(-1, 8).sum(0))


@pytest.mark.parametrize("wrong", [-1, -8, 8])
def test_rows_that_are_not_there_are_an_error(wrong: int) -> None:
    embedding = QuantEmbedding.of_weight(random_weight(8, 32, WeightFormat(4)), "w4a16")
    assert embedding(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 32)
    with pytest.raises(IndexError, match=f"index {wrong} is out of"):
        embedding(torch.tensor([[0, wrong]]))


def test_a_rotation_made_in_inference_mode_serves_gradients_later() -> None:
    with torch.inference_mode():
        ops.hadamard(torch.randn(1, 44))
        transform(torch.randn(1, 44))
    x = torch.randn(1, 44, requires_grad=True)
    transform(x).sum().backward()
    assert x.grad is not None


def test_a_strided_bias_is_added_value_by_value() -> None:
    weight, bias, x = random_weight(8, 32, WeightFormat(4)), torch.randn(8, 2)[:, 0], torch.randn(3, 32)
    assert bias.stride() == (2,)
    layer = QuantLinear.from_weight(weight, "w4a16", bias)
    assert torch.equal(layer(x), QuantLinear.from_weight(weight, "w4a16", bias.clone())(x))
    for dtype in (torch.float32, torch.float16):  # as for kernels, which only see the address
        given = dense_bias(bias, dtype)
        assert given is not None and given.is_contiguous() and torch.equal(given, bias.to(dtype))


@pytest.mark.parametrize("scheme", ["w4a16", "w4a8"])
def test_derivatives_of_torch_func_are_those_of_the_weight(scheme: str) -> None:
    layer = QuantLinear.from_weight(random_weight(8, 24, WeightFormat(4)), scheme, torch.randn(8))
    whole, x, moved = layer.effective_weight(), torch.randn(3, 24), torch.randn(3, 24)
    y, tangent = torch.func.jvp(layer, (x,), (moved,))
    assert torch.equal(y, layer(x))
    torch.testing.assert_close(tangent, moved @ whole.T)
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        y = layer(torch.autograd.forward_ad.make_dual(x, moved))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(y).tangent, tangent)
    for jacobian in (torch.func.jacfwd, torch.func.jacrev):
        torch.testing.assert_close(jacobian(layer)(x[0]), whole)
    each = torch.func.vmap(torch.func.grad(lambda one: layer(one).sum()))(x)
    torch.testing.assert_close(each, whole.sum(0).expand(3, -1))

    def of_bias(bias: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"bias": bias}, (x,))

    step = torch.randn(8)
    torch.testing.assert_close(torch.func.jvp(of_bias, (layer.bias.data,), (step,))[1], step.expand(3, -1))
    torch.testing.assert_close(
        torch.func.grad(lambda bias: of_bias(bias).sum())(layer.bias.data), torch.full((8,), 3.0)
    )
    torch.testing.assert_close(torch.func.jacfwd(of_bias)(layer.bias.data), torch.eye(8).expand(3, -1, -1))


def test_forward_mode_is_never_lost_silently() -> None:
    layer = QuantLinear.from_weight(random_weight(8, 24, WeightFormat(4)), "w4a16").prepare()
    x, moved = torch.randn(3, 24), torch.randn(3, 24)
    prepared = ops.prepare(layer.quantized_weight(), layer.scheme.activations)
    for lost in (
        lambda x: anybit.matmul(x, prepared),
        lambda x: layer.norm_linear(x, None, torch.ones(24), 1e-5)[0],
        lambda x: layer.silu_linear(torch.cat((x, x), -1)),
    ):
        with pytest.raises(LayerError, match="forward-mode derivatives of x would be lost here: call a QuantLinear"):
            torch.func.jvp(lost, (x,), (moved,))
        with torch.autograd.forward_ad.dual_level():
            lost(x)  # which has none
    compiled = torch.compile(lambda x, moved: torch.func.jvp(layer, (x,), (moved,))[1], backend="eager")
    torch.testing.assert_close(compiled(x, moved), moved @ layer.effective_weight().T)


@pytest.mark.parametrize("text", ["w8a8", "w8a7", "w7a8asym", "w7a8bipolar", "w4a8", "w4a8asym", "w8a8s24", "w4a8s24"])
def test_sums_of_integers_never_overflow(text: str) -> None:
    """Up to the largest K that a kernel accepts; a wider layer is refused when created, with a solution."""
    scheme = Scheme.parse(text)
    weights, activations = scheme.weights, scheme.activations
    top, doubled = 2**weights.bits - 1, 1 + (weights.code == "bipolar")
    # Unsigned codes; half of them for 2:4 weights, in the high bits of signed bytes.
    largest = 128 / 2 if weights.sparse else top * doubled
    most = 2 ** (activations.bits - 1) - 1
    taken = 0
    for k in range(1 << 14, 1 << 22, 1 << 12):
        problem = LinearProblem(1, 64, k, weights, activations)
        grouped = replace(problem, weights=replace(weights, group=128))
        reasons = [kernel.why_not(problem) for kernel in (sm90_packed_gemm, sm90_packed_skinny)]
        if any(reason is None for reason in reasons):
            assert k * largest * most < 2**31
        if reasons[0] is not None:
            assert "in groups (such as g128)" in reasons[0]
            assert sm90_packed_gemm.why_not(grouped) is None
            break
        taken = k
    assert taken * largest * most > 2**29, "little of what would fit is taken"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("text", ["w4a16g64s24", "w4a16s24", "w4a8g64s24", "w4a8g64"])
def test_a_group_index_in_natural_order_is_no_activation_order(text: str, arch: str) -> None:
    """Layers get one beside others with activation order: 2:4 sparse ones were refused on a GPU."""
    scheme = Scheme.parse(text)
    plain = random_weight(64, 256, scheme.weights)
    weight, device = plain.with_group_index(), Device.named(arch)
    assert packed.why_not(weight, scheme.activations, device) is None
    tiles = packed.PackedTiles()
    spec = LinearSpec("packed", 64, 256, scheme.weights, scheme.activations)
    tensors = tiles.prepare(weight, scheme.activations)
    assert torch.equal(tensors[0], tiles.prepare(plain, scheme.activations)[0])
    assert torch.equal(tiles.restore(tensors, spec).group_index, weight.group_index)
    if scheme.weights.sparse and scheme.weights.group:
        order = replace(weight, group_index=weight.group_index.flip(0).contiguous())
        assert "activation order" in str(packed.why_not(order, scheme.activations, device))
