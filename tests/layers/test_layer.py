"""QuantLinear in programs: copied, pickled, loaded, called by threads, under autocast, given invalid input."""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch._dynamo

from anybit.codes.packing import QuantizedWeight
from anybit.errors import LayerError
from anybit.layers.embedding import QuantEmbedding, TiedHead
from anybit.layers.linear import QuantLinear, use_backend
from anybit.scheme import Scheme
from cases import random_weight


def layer_of(scheme: str, n: int = 24, k: int = 256) -> QuantLinear:
    return QuantLinear.from_weight(random_weight(n, k, Scheme.parse(scheme).weights), scheme)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("scheme", ["w4a16g128", "w3a8asym", "w2a16g64"])
def test_copies_are_layers_of_their_own(scheme: str, prepared: bool) -> None:
    layer, x = layer_of(scheme), torch.randn(3, 256)
    y = layer_of(scheme)(x)
    if prepared:
        layer.prepare()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = QuantLinear(256, 24, scheme, bias=False)
    loaded.load_state_dict(layer.state_dict())
    onto_meta = QuantLinear(256, 24, scheme, bias=False, device="meta")
    onto_meta.load_state_dict(layer.state_dict(), assign=True)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]
    copies += [loaded, onto_meta]
    for each in copies:
        assert torch.equal(each(x), y)
    words = layer.quantized_weight().words
    copies[0].weight_packed = torch.nn.Parameter(words.flip(0), requires_grad=False)  # only that one's
    assert torch.equal(layer(x), y) and not torch.equal(copies[0](x), y)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": lambda w: w.mul_(2), "*=": lambda w: w.__imul__(2), "[]": lambda w: w.__setitem__(0, 1),
    "data": lambda w: w.data.mul_(2), "data =": lambda w: setattr(w, "data", w * 2), "view": lambda w: w.t()[0].zero_(),
    "detach": lambda w: w.detach().zero_(), "chunks": lambda w: w.chunk(2)[1].fill_(3),
    "out": lambda w: torch.add(w, 1, out=w), "inplace": lambda w: torch.nn.functional.relu(w, inplace=True),
    "init": torch.nn.init.zeros_, "foreach": lambda w: torch._foreach_mul_([w], 2),
    "train": lambda w: w.requires_grad_(), "train =": lambda w: setattr(w, "requires_grad", True),
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_that_would_change_nothing_raise(write: Callable[[torch.Tensor], object], mode: type) -> None:
    layer, table, x = layer_of("w4a16g128asym"), QuantEmbedding(24, 256, "w4a16g128"), torch.randn(2, 256)
    with mode():
        layer(x), table.prepare()
        wanted = layer(x)
        for weight in (layer.weight, layer.weight_scale, table.weight, TiedHead(table).weight):
            with pytest.raises(LayerError, match=r"the layer's codes would not change: .*load_weight"):
                write(weight)
        assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_weight_is_read_and_copied_as_any_other(prepared: bool) -> None:
    layer = layer_of("w4a16g128")
    weight = (layer.prepare() if prepared else layer).weight
    plain = layer.dequantize()
    assert (weight.shape, weight.dtype, weight.device) == (plain.shape, plain.dtype, plain.device)
    for copied in (weight.clone(), weight * 1, copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert type(copied) is torch.Tensor and torch.equal(copied, plain)
        copied.mul_(2)
    x = torch.randn(3, 256, requires_grad=True)
    (x @ weight.t()).sum().backward()
    assert torch.allclose(x.grad, plain.sum(0), atol=1e-5) and (weight.numpy() == plain.numpy()).all()
    linear = torch.nn.Linear(256, 24, bias=False)
    linear.weight = torch.nn.Parameter(weight)  # the user's own, to train
    linear(torch.randn(3, 256)).sum().backward()
    torch.optim.SGD(linear.parameters(), 0.1).step()
    assert not torch.equal(linear.weight, plain) and torch.equal(layer.weight, plain)
    again = pickle.loads(pickle.dumps(linear))
    assert type(again.weight) is torch.nn.Parameter and torch.equal(again.weight, linear.weight)
    assert type(linear.state_dict()["weight"]) is torch.Tensor


def test_a_weight_is_not_assigned() -> None:
    layer, table = layer_of("w4a16g128"), QuantEmbedding(24, 256, "w4a16g128")
    for module in (layer, table, TiedHead(table)):
        for value in (torch.zeros(24, 256), torch.nn.Parameter(torch.zeros(24, 256))):
            with pytest.raises(LayerError, match=r"weight is a copy to read, .*load_weight"):
                module.weight = value


@pytest.mark.parametrize("scheme", ["w4a16g128", "w3a8asym", "w2a16g64s24", "w3a16g32min"])
def test_a_prepared_layer_has_no_placeholders(scheme: str) -> None:
    """DistributedDataParallel and accelerate take any parameter on the meta device for one that is missing."""
    layer = layer_of(scheme)
    state, x = layer.state_dict(), torch.randn(2, 256)
    saved = {name: tensor.clone() for name, tensor in state.items()}
    wanted = layer(x)
    assert [name for name, _ in layer.named_parameters()] == ["weight_shape"]
    for name, tensor in saved.items():
        assert torch.equal(getattr(layer, name), tensor)
    assert layer.weight_g_idx is None and layer.runs_on is not None
    layer.weight_scale = torch.nn.Parameter(saved["weight_scale"] * 2, requires_grad=False)
    if scheme != "w3a16g32min":  # its values are scale * code + minimum
        torch.testing.assert_close(layer(x), wanted * 2)
    assert torch.equal(layer.state_dict()["weight_scale"], saved["weight_scale"] * 2)
    layer.unprepare()
    assert {name for name, _ in layer.named_parameters()} == saved.keys()


@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256), (256,), (2, 3, 256)])
@pytest.mark.parametrize("scheme", ["w4a16g128", "w2a2"])
def test_any_leading_dimensions(scheme: str, shape: tuple[int, ...]) -> None:
    layer, x = layer_of(scheme), torch.randn(shape)
    y = layer(x)
    assert y.shape == (*shape[:-1], 24)
    assert torch.equal(y.reshape(-1, 24), layer(x.reshape(-1, 256)))


@pytest.mark.parametrize("scheme", ["w4a16g128", "w8a8"])
def test_autocast_reaches_the_layer_and_ends_there(scheme: str) -> None:
    layer, x = layer_of(scheme), torch.randn(3, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert torch.equal(y, layer(x.bfloat16())) and y.dtype == torch.bfloat16
    with torch.autocast("cpu", enabled=False):
        assert layer(x).dtype == torch.float32


def test_an_activation_order_does_not_outlive_its_weight() -> None:
    weight, x = random_weight(8, 256, Scheme.parse("w4a16g128").weights), torch.randn(2, 256)
    layer = QuantLinear(256, 8, "w4a16g128", bias=False, group_index=True)
    layer.load_weight(weight)
    assert torch.equal(layer(x), QuantLinear.from_weight(weight, "w4a16g128")(x))
    assert "weight_g_idx" not in layer.state_dict()


def test_tensors_of_another_type_are_named() -> None:
    weight = random_weight(8, 256, Scheme.parse("w4a16g128asym").weights)
    assert weight.zero is not None
    for name, value, words in (
        ("words", weight.words.long(), "words of a layer must be int32, not int64"),
        ("scale", weight.scale.int(), "scale of a layer must be floating-point, not int32"),
        ("zero", weight.zero.int(), "zero of a layer must be uint8, not int32"),
        ("group_index", torch.arange(256) // 128, "group_index of a layer must be int32, not int64"),
        ("scale", weight.scale.to("meta"), "scale of a layer is on meta, and its words are on cpu"),
    ):
        with pytest.raises(LayerError, match=words):
            replace(weight, **{name: value})
    with pytest.raises(LayerError, match="the bias is int32, and must be floating-point"):
        QuantLinear.from_weight(weight, "w4a16g128asym", torch.zeros(8, dtype=torch.int32))


@pytest.mark.parametrize(("add", "words"), [(1, "groups 1 to 2"), (-1, "groups -1 to 0")])
def test_groups_that_are_not_there_are_named(add: int, words: str) -> None:
    weight = random_weight(8, 256, Scheme.parse("w4a16g128").weights)
    groups = (torch.arange(256) // 128 + add).int()
    layer = QuantLinear.from_weight(replace(weight, group_index=groups), "w4a16g128")
    with pytest.raises(LayerError, match=f"{words}, and the layer has 0 to 1"):
        layer(torch.randn(1, 256))
    with pytest.raises(LayerError, match=words):
        layer.prepare()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda weight: QuantLinear.from_weight(torch.zeros(8, 64), "w4a16"), "must be a QuantizedWeight, not Tensor"),
        (lambda weight: QuantLinear.from_weight(weight, "w4a16", [0.0] * 8), "a torch.Tensor of 8 floats, not list"),
        (lambda weight: QuantLinear.from_weight(weight, "w4a16")([1.0]), r"x must be a torch.Tensor .* 64\], not list"),
        (lambda weight: use_backend("abc", "reference-packed"), "model must be a torch.nn.Module, not str"),
    ],
)
def test_what_is_no_tensor_is_named(call: Callable[[QuantizedWeight], object], words: str) -> None:
    with pytest.raises(LayerError, match=words):
        call(random_weight(8, 64, Scheme.parse("w4a16").weights))


def test_tensors_of_another_layer_are_not_loaded() -> None:
    """Words and a scale per row have the same shapes for 62 and 64 inputs of 4 bits."""
    layer, x = layer_of("w4a16", 8, 64), torch.randn(2, 64)
    y, other = layer(x), layer_of("w4a16", 8, 62)
    for state in (other.state_dict(), {**layer.state_dict(), "weight_shape": torch.tensor([64, 8])}):
        with pytest.raises(RuntimeError, match=r"weight_shape says \[\d+, \d+\], and the layer is \[8, 64\] \(outputs"):
            layer.load_state_dict(state)
    assert torch.equal(layer(x), y)


@pytest.mark.parametrize("scheme", ["w4a16g32", "w3a8asym"])
def test_a_layer_prepares_itself_outside_of_a_graph(scheme: str) -> None:
    x, graphs = torch.randn(2, 256), []

    def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    wanted = layer_of(scheme)(x)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call prepare\(\), or the layer, before"):
        torch.compile(layer_of(scheme), backend=keep, fullgraph=True)(x)
    torch._dynamo.reset()
    compiled = torch.compile(layer_of(scheme), backend=keep)
    assert torch.equal(compiled(x), wanted)
    assert graphs == [["anybit.linear"]]  # without the unpacking of words
    assert torch.equal(torch.compile(layer_of(scheme).prepare(), backend=keep, fullgraph=True)(x), wanted)
