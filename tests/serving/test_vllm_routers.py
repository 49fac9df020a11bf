"""Which routers of vLLM's own mixtures anybit's op takes, in this process; no engine runs.

vLLM routes otherwise on a CPU, and packs routers' weights there: here both are as on a GPU.
"""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm makes an environment that has it")

import vllm
from transformers import AutoConfig
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import GateLinear
from vllm.model_executor.layers.fused_moe.router import router_factory
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import initialize_model

from anybit.hf.loading import load_model
from anybit.quantization.methods.registry import quantize_folder
from anybit.vllm import fusion, routing
from cases_vllm_experts import KINDS, save_mixture

pytestmark = [
    pytest.mark.usefixtures("loading"),
    pytest.mark.skipif(vllm.__version__.startswith("0.26"), reason="built from other arguments before 0.32"),
]
SIZES = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts_per_tok": 2, "vocab_size": 64, "num_experts": 6, "moe_intermediate_size": 64, "intermediate_size": 64,
}  # fmt: skip
ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM",
    "phimoe": "PhiMoEForCausalLM", "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM", "deepseek_v2": "DeepseekV2ForCausalLM",
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = UnquantizedLinearMethod.process_weights_after_loading

    def process(self: UnquantizedLinearMethod, layer: torch.nn.Module) -> None:
        if isinstance(layer, GateLinear):
            layer.cpu_linear = torch.nn.functional.linear
        else:
            plain(self, layer)

    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", process)
    if hasattr(router_factory, "current_platform"):
        monkeypatch.setattr(router_factory, "current_platform", SimpleNamespace(is_cpu=lambda: False))


def configured(folder: Path) -> Any:
    settings = {"enforce_eager": True, "max_model_len": 64, "skip_tokenizer_init": True, "dtype": "float32"}
    return EngineArgs(model=str(folder), **settings).create_engine_config()


@pytest.mark.parametrize(
    ("kind", "words", "reason"),
    [
        ("qwen3_moe", {}, None),
        ("mixtral", {}, None),
        ("qwen2_moe", {}, "shared experts run beside the routed ones"),
        ("phimoe", {}, "anybit has no kernel for a CustomRoutingRouter of its own"),
        ("olmoe", {}, None),
        ("granitemoe", {}, None),
        ("deepseek_v2", LATENT, "shared experts run beside the routed ones"),
    ],
)
def test_routers_of_models_are_taken_or_left_for_a_reason(
    kind: str, words: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    given = AutoConfig.for_model(kind, **SIZES | KINDS.get(kind, {}) | words)
    given.architectures = [ARCHITECTURES[kind]]
    given.quantization_config = {"quant_method": "anybit", "scheme": "w4a16g32"}
    given.save_pretrained(tmp_path)
    config = configured(tmp_path)
    with set_current_vllm_config(config), torch.device("meta"):
        model = initialize_model(config)
    for gate in (module for module in model.modules() if isinstance(module, GateLinear)):
        gate.quant_method.process_weights_after_loading(gate)
    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    assert len(runners) == 2
    assert {routing.why_not(runner, config) for runner in runners} == {reason}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_a_loaded_block_answers_as_anybit_does(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a folder that vLLM's loader reads, its runner with anybit's router and experts."""
    quantize_folder(save_mixture(kind, tmp_path / "source"), tmp_path / "q", "w4a16g32")
    config = configured(tmp_path / "q")
    with set_current_vllm_config(config), caplog.at_level(logging.INFO, "vllm.anybit"):
        model = get_model(vllm_config=config)
    assert "choose the experts" not in caplog.text
    theirs = load_model(tmp_path / "q", dtype=torch.float32).model
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    graphs: list[torch.fx.GraphModule] = []

    def compiled(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graph.graph.eliminate_dead_code()
        graph.recompile()
        graphs.append(graph)
        return graph

    for layer, own in zip(model.model.layers, theirs.model.layers, strict=True):
        block = layer.mlp if kind == "qwen3_moe" else layer.block_sparse_moe
        with torch.inference_mode(), set_forward_context(None, config):
            found, expected = torch.compile(block, fullgraph=True, backend=compiled)(x), own.mlp(x[None])
        torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
        calls = [str(node.target) for node in graphs[-1].graph.nodes if node.op == "call_function"]
        assert [name for name in calls if "anybit" in name] == ["anybit.router", "anybit.experts"]
        assert not any("linear" in name for name in calls)  # the model's own product, which nothing reads


@pytest.mark.parametrize("part", ["none", "rows", "logits"])
def test_a_block_that_changes_what_its_experts_get_keeps_its_router(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = torch.nn.Linear(8, 4, bias=False), torch.nn.Module()
            self.experts.gate = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (logits, _), rows = self.gate(x), x.clone() if part == "rows" else x
            return self.experts(rows, router_logits=logits * 2 if part == "logits" else logits)

    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: (x @ self.weight.T, None))
    fusion.watch()
    block = Block()
    assert routing._gate_of(block.experts) is (block.gate if part == "none" else None)
