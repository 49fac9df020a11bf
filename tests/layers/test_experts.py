"""Experts joined into one op (by the reference here): results, what is saved, and what separates them again."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from anybit.codes.packing import QuantizedWeight
from anybit.errors import LayerError
from anybit.hf.graph import weights_of
from anybit.layers.experts import Experts, Gate
from anybit.layers.linear import QuantLinear
from anybit.scheme import Scheme
from cases import random_weight

EXPERTS, HIDDEN, INNER = 5, 64, 40


def weight_of(scheme: str, n: int, k: int, seed: int) -> QuantizedWeight:
    return random_weight(n, k, Scheme.parse(scheme).weights, seed)


def quantized(
    scheme: str | list[str] = "w4a16g32", down: str | None = None, gate: Gate | None = None, bias: bool = False
) -> Experts:
    """Experts of one scheme, or of several in turn; down: the scheme of all downs."""
    made = Experts(EXPERTS, HIDDEN, INNER, gate=gate, bias=bias, device="meta")
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    torch.manual_seed(0)
    for number, expert in enumerate(made):
        for place, (name, shape) in enumerate(shapes.items()):
            kind = scheme if isinstance(scheme, str) else scheme[number % len(scheme)]
            kind = down or kind if name == "down_proj" else kind
            own = torch.randn(shape[0]) if bias else None
            expert[name] = QuantLinear.from_weight(weight_of(kind, *shape, 3 * number + place), kind, own)
    return made


def tokens(count: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, EXPERTS, (count, 2), generator=generator)
    ids[1], ids[2], ids[3, 0] = 3, -1, EXPERTS
    x = torch.randn(count, HIDDEN, generator=generator) / 8
    return x, ids, torch.rand(count, 2, generator=generator)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize(
    ("scheme", "down"),
    [
        ("w4a16g32", "w8a16asym"),
        ("w3a16g32asym", None),
        ("w4a8", None),
        (["w4a16g32", "w2a16g32asym"], None),
        (["w4a16g32", "w2a16g32asym", "w8a16"], "w3a16g32"),
    ],
)
def test_joined_experts_compute_and_save_the_same(scheme: str | list[str], down: str | None, gate: str) -> None:
    alone, joined = (quantized(scheme, down, Gate(gate), bias=True) for _ in range(2))
    assert joined.prepare(together=True)._joined is not None
    expected = alone(*tokens())
    near = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(joined(*tokens()), expected, rtol=1e-4, atol=near)
    assert not {name for name, _ in joined.named_parameters()} & {
        "0.gate_proj.weight_packed",
        "1.down_proj.weight_scale",
    }
    saved = joined.state_dict()
    for name, tensor in alone.separate().state_dict().items():
        assert torch.equal(saved[name], tensor), name
    again = copy.deepcopy(joined)
    assert again._joined is not None and not again._joined.changed
    torch.testing.assert_close(again(*tokens()), joined(*tokens()))


def test_autocast_leaves_the_dtype() -> None:
    joined, alone = quantized(bias=True).prepare(together=True), quantized(bias=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = joined(*tokens()), alone(*tokens())
    assert y.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
    assert not torch.equal(y, alone(*tokens()))


@pytest.mark.parametrize(("scheme", "nodes"), [("w4a16g32", 1), (["w4a16g32", "w2a16"], 2)])
def test_a_graph_has_a_node_for_each_scheme(scheme: str | list[str], nodes: int) -> None:
    experts = quantized(scheme, bias=True).prepare(together=True)
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        found.extend(str(node.target) for node in graph.graph.nodes if "anybit" in str(node.target))
        return graph.forward

    with torch.no_grad():
        y = torch.compile(experts, backend=backend, fullgraph=True)(*tokens())
        torch.testing.assert_close(y, experts(*tokens()))
    assert found == ["anybit.experts"] * nodes


def _another(experts: Experts, scheme: str = "w4a16g32", bias: Tensor | None = None, ordered: bool = False) -> None:
    weight = weight_of(scheme, INNER, HIDDEN, 99)
    layer = QuantLinear.from_weight(weight.with_group_index() if ordered else weight, scheme, bias)
    experts[3]["up_proj"] = layer


def _up(experts: Experts) -> QuantLinear:
    return experts[3]["up_proj"]


def _wrapped(experts: Experts) -> None:
    experts[3]["up_proj"] = nn.Sequential(_up(experts), nn.Tanh())


def _hooked(experts: Experts) -> None:
    _up(experts).register_forward_hook(lambda layer, x, y: 2 * y)


def _loaded(experts: Experts) -> None:
    state = experts.state_dict()
    experts.load_state_dict({name: 2 * one if name.endswith("scale") else one for name, one in state.items()})


def _replaced(name: str, value: Callable[[QuantLinear], object]) -> Callable[[Experts], None]:
    return lambda experts: setattr(_up(experts), name, value(_up(experts)))


CHANGES: dict[str, Callable[[Experts], object]] = {
    "another": _another,
    "another expert": lambda experts: experts.__setitem__(3, quantized(bias=True)[2]),
    "fewer": lambda experts: experts.__delitem__(0),
    "more": lambda experts: experts.insert(0, quantized(bias=True)[2]),
    "wrapped": _wrapped,
    "new scale": _replaced("weight_scale", lambda up: nn.Parameter(up.weight_scale * 2, requires_grad=False)),
    "hooked": _hooked,
    "patched": _replaced("forward", lambda up: lambda x: 2 * QuantLinear.forward(up, x)),
    "new bias": _replaced("bias", lambda up: nn.Parameter(torch.ones(INNER), requires_grad=False)),
    "written bias": lambda experts: _up(experts).bias.add_(1),
    "loaded": _loaded,
    "cast": lambda experts: experts.bfloat16(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_a_layer_separates_all(change: Callable[[Experts], None]) -> None:
    joined, alone = quantized(bias=True).prepare(together=True), quantized(bias=True)
    before = joined(*tokens())
    for experts in (joined, alone):
        change(experts)
    y = joined(*tokens())
    assert joined._joined is None and not torch.equal(y, before)
    torch.testing.assert_close(y, alone(*tokens()))


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in ("hooked", "written bias", "more")])
def test_compiled_code_learns_what_changed(name: str) -> None:
    torch._dynamo.reset()
    joined, alone = quantized(bias=True).prepare(together=True), quantized(bias=True)
    x, ids, weights = tokens()
    given = x, ids.clamp(2, 3), weights  # of two experts: each layer of a separate one takes a second to compile
    with torch.no_grad():
        compiled = torch.compile(joined, backend="eager")
        before = compiled(*given)
        for experts in (joined, alone):
            CHANGES[name](experts)
        y = compiled(*given)
        assert not torch.equal(y, before)
        torch.testing.assert_close(y, alone(*given))


def test_a_layer_called_alone_has_its_own_weight_again() -> None:
    joined, alone, x = quantized().prepare(together=True), quantized(), tokens()[0]
    torch.testing.assert_close(joined[2]["gate_proj"](x), alone[2]["gate_proj"](x))
    torch.testing.assert_close(joined(*tokens()), alone(*tokens()))
    assert joined._joined is None
    assert joined.prepare(together=True)._joined is not None


def test_compiling_separates_what_changed_before() -> None:
    experts, (x, ids, weights) = quantized().prepare(together=True), tokens()
    _another(experts)
    with torch.no_grad():  # of no expert: one by one, each layer would be compiled
        torch.compile(experts, backend="eager")(x, torch.full_like(ids, -1), weights)
    assert experts._joined is None


def test_biases_trained_after_joining_get_gradients() -> None:
    experts = quantized(bias=True).prepare(together=True)
    bias = experts[3]["up_proj"].bias.requires_grad_()
    experts(*tokens()).sum().backward()
    assert bias.grad is not None


def test_routing_weights_of_all_experts_are_refused() -> None:
    x, ids, _ = tokens()
    with pytest.raises(LayerError, match=r"shape of top_k_index, \(7, 2\), and is \(7, 5\)"):
        quantized()(x, ids, torch.rand(7, EXPERTS))


def test_gradients_of_no_expert_and_by_torch_func() -> None:
    joined, alone = quantized(["w4a16g32", "w2a16"]).prepare(together=True), quantized(["w4a16g32", "w2a16"])
    x, ids, weights = tokens()
    chosen = x.clone().requires_grad_()
    joined(chosen, torch.full_like(ids, -1), weights).sum().backward()
    assert chosen.grad is not None and not chosen.grad.any()
    found = [torch.func.grad(lambda x, e=e: e(x, ids, weights).square().sum())(x) for e in (joined, alone)]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5 * float(found[1].abs().max()))
    assert joined._joined is not None


def test_gradients_of_inputs_and_routing_weights() -> None:
    found = []
    for experts in (quantized(bias=True).prepare(together=True), quantized(bias=True)):
        x, ids, weights = tokens()
        x.requires_grad_(), weights.requires_grad_()
        experts(x, ids, weights).square().sum().backward()
        assert x.grad is not None and weights.grad is not None
        found.append((x.grad, weights.grad))
    for of_joined, of_alone in zip(*found, strict=True):
        torch.testing.assert_close(of_joined, of_alone, rtol=1e-3, atol=1e-5 * float(of_alone.abs().max()))


def _trained(experts: Experts) -> None:
    for layer in experts._layers():
        layer.bias.requires_grad_()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            partial(_another, scheme="w8a16", bias=torch.ones(INNER)),
            "gate_proj and up_proj of expert 3 have two schemes",
        ),
        (_another, "some layers have a bias"),
        (_wrapped, "not all of their layers are quantized"),
        (partial(_another, ordered=True), "activation order"),
        (_trained, "biases are trained"),
        (_hooked, "layers have hooks"),
    ],
)
def test_what_cannot_be_joined_is_said(change: Callable[[Experts], None], told: str) -> None:
    experts = quantized(bias=True)
    change(experts)
    with pytest.raises(LayerError, match=f"experts cannot be prepared together: .*{told}"):
        experts.prepare(together=True)
    assert experts.prepare()._joined is None and experts[0]["up_proj"].runs_on is not None


@pytest.mark.parametrize(
    ("gate", "told"), [(Gate("gelu"), "gate 'gelu' is unknown"), (Gate("swigluoai", 1.0, 3.0), "alpha 1.0 and limit")]
)
def test_gates_that_the_op_lacks_are_said(gate: Gate, told: str) -> None:
    with pytest.raises(LayerError, match=told):
        quantized(gate=gate).prepare(together=True)


def test_graphs_look_at_one_expert_of_an_op_and_see_changes_of_all() -> None:
    """What ``generate`` compares to forget its graphs."""
    model, alone = nn.ModuleList([quantized(bias=True).prepare(together=True)]), quantized(bias=True)
    before = list(weights_of(model))
    assert before == list(weights_of(model)) and len(before) < len(list(weights_of(alone))) / EXPERTS
    changes: list[Callable[[Experts], object]] = [
        lambda experts: setattr(experts[3], "up_proj", nn.Linear(HIDDEN, INNER)),
        lambda experts: experts[4]["down_proj"].bias.zero_(),
        lambda experts: experts.separate(),
    ]
    for change in changes:
        with torch.no_grad():
            change(model[0])  # type: ignore[arg-type]
        assert list(weights_of(model)) != before
        model[0] = quantized(bias=True).prepare(together=True)
        before = list(weights_of(model))
