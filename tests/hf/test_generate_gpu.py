"""A Llama of SmolLM2's widths with integer activations: the GPU generates what the reference backend does."""

from pathlib import Path

import pytest
import torch
import transformers

from anybit import AnyBitConfig, QuantLinear, use_backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model on disk: hidden 576 and FFN 1536 as SmolLM2-135M, two layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).half().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("scheme", "backend"), [("w4a4", "bitwise"), ("w2a4", "packed"), ("w8a8", "packed"), ("w2a2", "bitwise")]
)
def test_gpu_generates_what_the_reference_does(folder: Path, scheme: str, backend: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=AnyBitConfig(scheme, backend=backend), dtype=torch.float16, device_map="cuda"
    )
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert len(layers) == 14
    prompt = torch.randint(0, 512, (2, 21), generator=torch.Generator().manual_seed(1)).cuda()
    seen: dict[QuantLinear, tuple[torch.Tensor, torch.Tensor]] = {}
    hooks = [layer.register_forward_hook(lambda m, x, y: seen.__setitem__(m, (x[0], y))) for layer in layers]
    with torch.inference_mode():
        logits = model(prompt).logits.float()
        generated = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert generated.shape == (2, 33)
    assert {layer._prepared.spec.backend for layer in layers if layer._prepared} == {backend}
    for hook in hooks:
        hook.remove()
    # Sums are exact on both: on equal inputs a layer differs only where a scaled result rounds to another float16.
    use_backend(model, "reference-packed")
    with torch.inference_mode():
        for layer, (x, y) in seen.items():
            torch.testing.assert_close(y, layer(x), rtol=1e-3, atol=1e-3)
        expected = model(prompt).logits.float()
    # Such differences flip codes of later layers, so whole models are compared loosely.
    assert float((logits - expected).abs().mean()) < 0.1 * float(expected.std())
