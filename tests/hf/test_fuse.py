"""Fused models give the outputs of unfused ones, and can be unfused completely."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.modules import module as every
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import anybit
from anybit import AnyBitCache, QuantLinear
from anybit.codes.rtn import quantize_weight
from anybit.errors import LayerError
from anybit.hf import fuse as fusing
from anybit.kernels.block.rope import RopeStoreArgs, paired_channels
from anybit.ops.elementwise import rotate_store
from anybit.scheme import Scheme
from cases_models import layers_of

SIZES = {
    "hidden_size": 128, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip


def quantized(config, scheme, folder, spread=0.05):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, spread)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=anybit.AnyBitConfig(scheme))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig, MixtralConfig]
)
@pytest.mark.parametrize("scheme", ["w4a16g32", "w3a8asym", "w4a16g32asyms24"])
def test_fused_model_says_the_same(config_class, scheme, tmp_path):
    extra = {} if config_class is Qwen2Config else {"head_dim": 64}
    if config_class is Qwen3MoeConfig:
        extra |= {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "mlp_only_layers": [1]}
        extra |= {"norm_topk_prob": scheme == "w4a16g32"}
    model = quantized(config_class(**SIZES, **extra), scheme, tmp_path)
    ids = torch.randint(0, 128, (2, 9))
    generate = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    logits, tokens, state = model(ids).logits, model.generate(ids, **generate), model.state_dict()
    anybit.fuse(model)
    assert torch.allclose(model(ids).logits, logits, atol=1e-6)
    assert torch.equal(model.generate(ids, **generate), tokens)
    assert torch.equal(model.generate(ids, **generate, cache_implementation="static"), tokens)
    with pytest.raises(LayerError, match="unfuse"):
        model.state_dict()
    with pytest.raises(LayerError, match="unfuse"):
        model.load_state_dict(state)
    assert anybit.fuse(model) is model  # a second time changes nothing
    for records in ("output_hidden_states", "output_attentions", "output_router_logits"):
        with pytest.raises(LayerError, match=f"{records.removeprefix('output_')} to record: call anybit.unfuse"):
            model(ids, **{records: True})
    anybit.unfuse(model)
    assert len(model(ids, output_hidden_states=True).hidden_states) == 3
    assert same(model.state_dict(), state)
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_fused_layers_look_as_far_back_as_the_model_does(config_class, tmp_path):
    """Over packed pages, without a mask: Mistral has its window only in its configuration."""
    window = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}
    model = quantized(config_class(**SIZES, head_dim=64, **window), "w4a16g32", tmp_path, spread=0.2)
    model.set_attn_implementation("anybit")
    ids = torch.randint(0, 128, (1, 60))

    def logits():
        cache = AnyBitCache("kv16", config=model.config)
        parts = [model(part, past_key_values=cache).logits for part in ids.split((50, 1, 2, 7), 1)]
        return torch.cat(parts, 1)

    with torch.no_grad():
        wanted = logits()
        anybit.fuse(model)
        torch.testing.assert_close(logits(), wanted, rtol=1e-2, atol=1e-2)


def other_order(model):
    k_proj = model.model.layers[1].self_attn.k_proj
    weight = k_proj.quantized_weight()
    order = torch.arange(weight.shape[1]).flip(0) // 32
    k_proj.load_weight(replace(weight, group_index=order.to(torch.int32)))


def other_inputs(model):
    model.model.layers[1].self_attn.k_proj.hadamard = True


def other_code(model):
    """Custom model code copies transformers' class names, with different behaviour."""
    kind = type(model.model.layers[0])
    model.model.layers[1].__class__ = type(kind.__name__, (kind,), {"__module__": "transformers_modules.m.modeling"})


def other_layer(model):
    model.model.layers[0].self_attn.q_proj = torch.nn.Linear(128, 128, bias=False)


@pytest.mark.parametrize(
    ("scheme", "change", "says"),
    [
        ("w4a16g32", other_order, "layer 1 cannot be fused: layers with different activation orders"),
        ("w1a16", other_inputs, r"only one of self_attn.q_proj and self_attn.k_proj rotates its inputs"),
        ("w4a16g32", other_code, r"layer 1 cannot be fused: its LlamaDecoderLayer is not transformers' own"),
        ("w4a16g32", other_layer, r"layer 0 cannot be fused.*q_proj is a Linear"),
    ],
)
def test_what_cannot_be_fused_stays_as_it_was(scheme, change, says, tmp_path):
    model = quantized(LlamaConfig(**SIZES, head_dim=64), scheme, tmp_path)
    change(model)
    ids = torch.randint(0, 128, (2, 9))
    logits, state = model(ids).logits, model.state_dict()
    with pytest.raises(LayerError, match=says):
        anybit.fuse(model)
    assert torch.equal(model(ids).logits, logits) and same(model.state_dict(), state)
    anybit.accelerate(model)  # serves it as it is
    assert torch.equal(model(ids).logits, logits)


def test_layers_whose_inputs_are_rotated_alike_are_joined(tmp_path):
    model = quantized(LlamaConfig(**{**SIZES, "intermediate_size": 128}, head_dim=64), "w4a8", tmp_path)
    for layer in layers_of(model).values():
        layer.hadamard = True
    ids = torch.randint(0, 128, (2, 9))
    logits = model(ids).logits
    assert torch.allclose(anybit.fuse(model)(ids).logits, logits, atol=1e-6)
    anybit.unfuse(model)
    assert all(layer.hadamard for layer in layers_of(model).values())
    assert torch.equal(model(ids).logits, logits)


def test_a_fused_model_is_dequantized_as_if_it_were_not(tmp_path):
    model = quantized(LlamaConfig(**SIZES, head_dim=64), "w4a16g32", tmp_path)
    ids = torch.randint(0, 128, (1, 9))
    logits = model(ids).logits
    plain = anybit.fuse(model).dequantize()
    assert not layers_of(plain)
    assert torch.allclose(plain(ids).logits, logits, atol=1e-6)


def test_models_that_are_not_fused_are_unfused_all_the_same():
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = AutoModelForCausalLM.from_config(GPT2Config(**sizes))
    anybit.accelerate(model)
    assert anybit.unfuse(model) is model and "generate" not in model.__dict__


def test_unfusing_leaves_the_hooks_of_others(tmp_path):
    model = quantized(LlamaConfig(**SIZES, head_dim=64), "w4a16g32", tmp_path)
    called = []
    model.register_state_dict_pre_hook(lambda *_: called.append(True))
    anybit.unfuse(anybit.fuse(model))
    model.state_dict()
    assert called


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
def test_rotary_tables_hold_the_models_own_values(config_class, tmp_path):
    model = quantized(config_class(**SIZES, head_dim=64), "w4a16g32", tmp_path)
    plain, x = model.model.rotary_emb, torch.zeros(1, dtype=torch.float16)
    positions = torch.tensor([[3, 9], [60, 0]])
    anybit.fuse(model)
    fused = model.model.rotary_emb
    assert fused.positions == 64 and not fused.in_tables  # outside of graphs, positions are not limited
    fused.in_tables = True
    for got, wanted in zip(fused(x, positions), plain(x, positions), strict=True):
        assert torch.equal(got, wanted)
    anybit.unfuse(model)
    assert model.model.rotary_emb is plain


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_product_that_turns_and_stores_says_the_same_in_two_steps(tokens):
    """Without a kernel for both: the projection of q, k and v in their own order, rotated, against the paired one."""
    torch.manual_seed(0)
    heads, kv_heads, dim, k, slots = 2, 1, 64, 128, 32
    plain = quantize_weight(torch.randn((heads + 2 * kv_heads) * dim, k), Scheme.parse("w4a16g32").weights)
    paired = QuantLinear.from_weight(plain.rows(paired_channels(heads, kv_heads, dim)), "w4a16g32")
    x, residual, gamma = torch.randn(1, tokens, k), torch.randn(1, tokens, k), torch.rand(k)
    angles = torch.rand(tokens, dim // 2).repeat(1, 2)
    rings = torch.zeros(2, 1, kv_heads, 2, slots * dim)
    lengths = torch.tensor([40], dtype=torch.int32)
    where = (lengths, None, heads, kv_heads, tokens)
    q, total = paired.norm_linear_rope(
        x, residual, gamma, 1e-5, RopeStoreArgs(angles.cos(), angles.sin(), rings[0], *where)
    )
    qkv, same = QuantLinear.from_weight(plain, "w4a16g32").norm_linear(x, residual, gamma, 1e-5)
    wanted = rotate_store(qkv.view(tokens, -1), RopeStoreArgs(angles.cos(), angles.sin(), rings[1], *where))
    assert torch.equal(total, same)
    assert torch.allclose(q, wanted, atol=1e-5) and torch.allclose(rings[0], rings[1], atol=1e-5)
    assert rings[0].count_nonzero() == tokens * kv_heads * 2 * dim


@pytest.mark.parametrize("at", [1, 3, 4])
def test_fusing_that_runs_out_of_memory_leaves_the_model_as_it_was(at, tmp_path, monkeypatch):
    model = quantized(LlamaConfig(**SIZES, head_dim=64), "w4a16g32", tmp_path)
    ids, joined, calls = torch.randint(0, 128, (1, 5)), fusing._joined, []
    expected = model(ids).logits

    def short_of_memory(*arguments):
        calls.append(arguments)
        if len(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return joined(*arguments)

    monkeypatch.setattr(fusing, "_joined", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        anybit.fuse(model)
    assert torch.equal(model(ids).logits, expected)
    monkeypatch.setattr(fusing, "_joined", joined)
    anybit.fuse(model)
    assert torch.allclose(model(ids).logits, expected, atol=1e-6)


HOOKS = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook",
)  # fmt: skip


def hook(*_):
    return None


def answer(x):
    return x


@pytest.mark.parametrize("register", [*HOOKS, "forward"])
@pytest.mark.parametrize(
    "part", ["model.layers.1", "model.layers.1.self_attn", "model.layers.0.mlp.act_fn", "model.norm"]
)
def test_fuse_refuses_hooks(register, part, tmp_path):
    model = quantized(LlamaConfig(**SIZES), "w4a16g32", tmp_path)
    ids = torch.randint(0, 128, (1, 5))
    model(ids, output_hidden_states=True)  # transformers leaves its own hooks behind
    logits, called, module = model(ids).logits, [], model.get_submodule(part)
    if register == "forward":
        module.forward = lambda *a, **k: called.append(1) or type(module).forward(module, *a, **k)
    else:
        handle = getattr(module, register)(lambda *_: called.append(1))
    with pytest.raises(LayerError, match=r"cannot be fused: .* would no longer be called: remove them first"):
        anybit.fuse(model)
    anybit.accelerate(model)  # leaves the layers as they are
    model(ids).logits.sum().backward()
    assert called
    anybit.unfuse(model)
    if register == "forward":
        del module.forward
    else:
        handle.remove()
    assert torch.allclose(anybit.fuse(model)(ids).logits, logits, atol=1e-6)


def test_what_is_attached_to_a_fused_layer_is_refused_at_once(tmp_path):
    """Its parts are not called: hooks, other modules and other forwards would have no effect."""
    model = quantized(Qwen3Config(**SIZES, head_dim=64), "w4a16g32", tmp_path)
    ids = torch.randint(0, 128, (1, 5))
    before = dict(model.model.layers[0].named_modules(prefix="before"))
    logits, kinds = model(ids).logits, {name: type(module) for name, module in before.items()}
    anybit.fuse(model)
    for each, held in ((model, before), (copy.deepcopy(model), {})):
        parts = {**held, **dict(each.model.layers.named_modules()), "tables": each.model.rotary_emb.rotary}
        parts[""] = each.model.norm  # the list of layers itself takes hooks
        assert {"0.mlp", "1.self_attn.q_norm", "1.self_attn.o_proj", "0.gate_up", *held} <= set(parts)
        for module in parts.values():
            for register in HOOKS:
                with pytest.raises(LayerError, match=r"hooks of \w+ in a fused layer .*anybit.unfuse"):
                    getattr(module, register)(hook)
            with pytest.raises(LayerError, match=r"would not use another forward of \w+: call anybit.unfuse"):
                module.forward = answer
        for name in ("mlp", "self_attn", "input_layernorm"):
            with pytest.raises(LayerError, match=f"would not use another {name} of"):
                setattr(each.model.layers[1], name, torch.nn.Identity())
        with pytest.raises(LayerError, match="would not use another gate_proj of Qwen3MLP"):
            each.model.layers[1].mlp.gate_proj = torch.nn.Identity()
        assert torch.allclose(each(ids).logits, logits, atol=1e-6)
        anybit.unfuse(each)
    assert {name: type(module) for name, module in model.model.layers[0].named_modules(prefix="before")} == kinds
    called = []
    before["before.mlp"].register_forward_hook(lambda *_: called.append(1))
    assert torch.equal(model(ids).logits, logits) and called


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_fuse_refuses_global_hooks(kind, tmp_path):
    model = quantized(LlamaConfig(**SIZES), "w4a16g32", tmp_path)
    ids = torch.randint(0, 128, (1, 5))
    fused = anybit.fuse(copy.deepcopy(model))
    logits = fused(ids).logits
    handle = getattr(every, f"register_module_{kind}")(hook)
    try:
        with pytest.raises(LayerError, match=r"global module hooks would not see the parts .*anybit.unfuse\(model\)"):
            fused(ids)
        with pytest.raises(LayerError, match="cannot be fused: global module hooks would no longer be called"):
            anybit.fuse(model)
    finally:
        handle.remove()
    assert torch.equal(fused(ids).logits, logits)


GRADIENTS = {
    "input_layernorm": lambda model, ids: model(ids).logits,
    "model.norm": lambda model, ids: model.model(ids).last_hidden_state,
    "embed_tokens": lambda model, ids: model(ids, return_dict=False)[0],
    "bias": lambda model, ids: model(ids).logits,
    "inputs": lambda model, ids: model(inputs_embeds=torch.randn(1, 5, 128, requires_grad=True)).logits,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_fused_model_refuses_gradients(name, tmp_path):
    """In a fused model they raise; without it, or before what is fused, they flow."""
    model = quantized(Qwen2Config(**SIZES), "w4a16g32", tmp_path)
    ids = torch.randint(0, 128, (1, 5))
    for key, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(name in key)
    anybit.fuse(model)
    with torch.no_grad():
        assert not GRADIENTS[name](model, ids).requires_grad
    y = GRADIENTS[name](model, ids)
    with pytest.raises(LayerError, match=r"a fused model .* has no gradients: call anybit.unfuse\(model\) to train"):
        y.sum().backward()
    anybit.unfuse(model)
    GRADIENTS[name](model, ids).sum().backward()
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert bool(wanted) == (name != "inputs") and all(parameter.grad is not None for parameter in wanted)
    anybit.fuse(model)
    for key, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(key == "lm_head.weight")
    model(ids).logits.sum().backward()  # the head is not fused
    assert model.lm_head.weight.grad.count_nonzero()
