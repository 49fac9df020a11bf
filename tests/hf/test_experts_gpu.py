"""A mixture of experts on a GPU: equal to the CPU's reference in eager mode, compiled, and as one CUDA graph."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import anybit
from anybit import AnyBitConfig, QuantLinear
from anybit.layers.experts import Experts

TOKENS = (1, 5, 300)


@pytest.fixture(scope="module", params=[{}, {"*.experts.[0-7].*": "w2a16g64asym"}], ids=["one scheme", "two"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A random Qwen3-MoE in w4a16g128, half of its experts in another scheme, quantized and saved on the CPU."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=4,
        norm_topk_prob=True, max_position_embeddings=1024, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    plain, path = (tmp_path_factory.mktemp(name) for name in ("plain", "quantized"))
    model = transformers.Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 1.0 if "embed" in name else 0.08)
    model.half().save_pretrained(plain)
    load(
        plain, "cpu", torch.float16, quantization_config=AnyBitConfig("w4a16g128", overrides=request.param)
    ).save_pretrained(path)
    return path


def load(path: Path, device: str, dtype: torch.dtype, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device, **options)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, Tensor]:
    """Logits of the reference in float32, by the number of tokens."""
    model = load(folder, "cpu", torch.float32)
    with torch.inference_mode():
        return {count: model(prompt(count)).logits[0] for count in TOKENS}


@pytest.fixture
def model(folder: Path) -> Iterator[Any]:
    torch._dynamo.reset()
    yield load(folder, "cuda", torch.float16)


def prompt(count: int, rows: int = 1) -> Tensor:
    return torch.randint(2, 512, (rows, count), generator=torch.Generator().manual_seed(count))


def near(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits are alike on average: a near tie of the router may go either way."""
    return float((logits.float().cpu() - expected).abs().mean()) < 0.02 * float(expected.std())


def joined(model: Any) -> bool:
    return all(module._joined is not None for module in model.modules() if isinstance(module, Experts))


@pytest.mark.parametrize("count", TOKENS)
def test_logits(model: Any, expected: dict[int, Tensor], count: int) -> None:
    assert joined(model)
    with torch.inference_mode():
        assert near(model(prompt(count).cuda()).logits[0], expected[count])


def test_layers_share_the_weights_and_save_them(folder: Path, tmp_path: Path) -> None:
    gc.collect()
    before_loading = torch.cuda.memory_allocated()
    model = load(folder, "cuda", torch.float16)
    allocated = torch.cuda.memory_allocated()
    assert allocated - before_loading < 1.1 * model.get_memory_footprint() + 2**20
    model.save_pretrained(tmp_path)
    gc.collect()
    assert torch.cuda.memory_allocated() <= allocated + 2**16
    again, before = load(tmp_path, "cpu", torch.float16).state_dict(), load(folder, "cpu", torch.float16).state_dict()
    assert again.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(again[name], tensor), name
    assert joined(model)
    layer = model.model.layers[1].mlp.experts[3]["up_proj"]
    assert isinstance(layer, QuantLinear)
    with torch.inference_mode():
        y = model(prompt(5).cuda()).logits
        layer(torch.zeros(1, 256, dtype=torch.float16, device="cuda"))  # which separates all, until the next call
        model.model.layers[0].mlp.experts.separate()
        torch.testing.assert_close(model(prompt(5).cuda()).logits, y)
    assert joined(model)


@pytest.mark.parametrize("count", TOKENS)
def test_compiled(model: Any, expected: dict[int, Tensor], count: int) -> None:
    for layer in model.model.layers:
        layer.mlp.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert near(model(prompt(count).cuda()).logits[0], expected[count])


@pytest.mark.parametrize("rows", [1, 5, 30])
def test_generate_is_one_graph(model: Any, folder: Path, rows: int) -> None:
    anybit.accelerate(model)
    ids = prompt(9, rows).cuda()
    with torch.inference_mode():
        found = model.generate(ids, max_new_tokens=8, do_sample=False, cache_implementation="static")
    decoder = model._anybit_decoder
    assert any(graph.graph is not None for graph in [*decoder.graphs.values(), *decoder.greedy.values()])
    reference = load(folder, "cpu", torch.float32)
    with torch.inference_mode():
        logits = reference(found.cpu()).logits[:, 8:-1]
    chosen = logits.gather(-1, found.cpu()[:, 9:, None])[..., 0]
    assert float((logits.amax(-1) - chosen).mean()) < 0.03 * float(logits.std())


def test_gradients_reach_the_input(model: Any) -> None:
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(20, 256, dtype=torch.float16, device="cuda", requires_grad=True)
    ids, weights = torch.randint(0, 16, (20, 4), device="cuda"), torch.rand(20, 4, device="cuda")
    experts(x, ids, weights).float().square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and x.grad.any() and joined(model)
