"""Weights changed while vLLM runs, as by ``reload_weights`` or a trainer's updates; no engine runs.

Outputs are those of the new weights, and buffers keep their addresses, which CUDA graphs hold.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make vllm makes an environment that has it")

from vllm.model_executor.layers.linear import QKVParallelLinear  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding  # noqa: E402
from vllm.model_executor.model_loader.reload import layerwise  # noqa: E402

import cases_vllm  # noqa: E402
from anybit.layers.linear import QuantLinear  # noqa: E402
from anybit.scheme import Scheme  # noqa: E402
from anybit.vllm.fusion import SiluMul  # noqa: E402

pytestmark = pytest.mark.usefixtures("vllm_config")
HEADS, KEYS, DIM, TOKENS = 8, 2, 32, 150
HIDDEN = HEADS * DIM
SIZES = {"q": HEADS * DIM, "k": KEYS * DIM, "v": KEYS * DIM}
NAMES = [f"m.{name}_proj" for name in SIZES]


class Model(nn.Module):
    """Attention's first product and a head. stored: from a quantized checkpoint; words: its configuration."""

    def __init__(self, scheme: str, stored: bool, tied: bool = False, **words: Any) -> None:
        super().__init__()
        config = cases_vllm.configured(scheme, [*NAMES, "lm_head"] if stored else None, **words)
        given: dict[str, Any] = {"params_dtype": torch.float32, "quant_config": config}
        self.embedding = VocabParallelEmbedding(TOKENS, HIDDEN, prefix="embed", **given) if tied else nn.Identity()
        self.qkv = QKVParallelLinear(HIDDEN, DIM, HEADS, KEYS, bias=True, prefix="m.qkv_proj", **given)
        self.head = ParallelLMHead(TOKENS, HIDDEN, prefix="lm_head", **given)
        if tied:
            self.head = self.head.tie_weights(self.embedding)
        layerwise.record_metadata_for_reloading(self)

    def take(self, parts: dict[Any, dict[str, Tensor]], head: dict[str, Tensor], bias: Tensor) -> "Model":
        """Pass all tensors to the loaders, as vLLM's models do."""
        source = self.embedding if isinstance(self.embedding, VocabParallelEmbedding) else self.head
        for layer, shard, tensors in [*((self.qkv, shard, one) for shard, one in parts.items()), (source, None, head)]:
            cases_vllm.hand(layer, tensors, shard)
        for shard, one in zip(SIZES, bias.split([*SIZES.values()]), strict=True):
            cases_vllm.hand(self.qkv, {"bias": one}, shard)
        return self

    def ready(self) -> "Model":
        """Finish loading as vLLM does."""
        for layer in (self.embedding, self.qkv, self.head):
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)
        return self

    def answers(self, x: Tensor) -> Tensor:
        return torch.cat((self.qkv(x)[0], self.head.quant_method.apply(self.head, x)), -1)


@contextmanager
def reloading(model: Model) -> Iterator[None]:
    layerwise.initialize_layerwise_reload(model)
    yield
    layerwise.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))


def codes(scheme: str, seed: int, head: str | None = None) -> tuple[Any, ...]:
    def of(n: int, scheme: str = scheme) -> dict[str, Tensor]:
        layer: QuantLinear = cases_vllm.layer_of(scheme, n, HIDDEN, seed)
        return dict(layer.state_dict())

    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(sum(SIZES.values()), generator=generator)
    return {shard: of(n) for shard, n in SIZES.items()}, of(TOKENS, head or scheme), bias


def floats(seed: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)

    def of(n: int) -> dict[str, Tensor]:
        return {"weight": torch.randn(n, HIDDEN, generator=generator)}

    bias = torch.randn(sum(SIZES.values()), generator=generator)
    return {shard: of(n) for shard, n in SIZES.items()}, of(TOKENS), bias


def check(model: Model, fresh: Model, old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
    x = torch.randn(3, HIDDEN)
    model.take(*old).ready()
    before, places = model.answers(x), {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    for values in (new, old, new):
        with reloading(model):
            model.take(*values)
        assert torch.equal(model.answers(x), before) == (values is old)
        assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == places
    assert torch.equal(model.answers(x), fresh.take(*new).ready().answers(x))


@pytest.mark.parametrize("scheme", ["w4a16g128", "w3a16g64asym", "w4a8", "w4a16g128s24", "w4a16g32min", "w5a16"])
def test_reload_replaces_codes_in_place(rank: Any, scheme: str) -> None:
    check(Model(scheme, True), Model(scheme, True), codes(scheme, 1), codes(scheme, 2))


@pytest.mark.parametrize("tied", [False, True])
def test_reload_quantizes_floats_again(rank: Any, tied: bool) -> None:
    words: dict[str, Any] = {"kept": ["lm_head"], "overrides": {"lm_head": Scheme.parse("w8a16")}}
    model, fresh = (Model("w4a16g32", False, tied, **words) for _ in range(2))
    check(model, fresh, floats(1), floats(2))


def test_reload_replaces_parts_of_other_formats(rank: Any) -> None:
    words = {"overrides": {"m.v_proj": Scheme.parse("w8a16g32asym")}}
    old, new = (codes("w4a16g32", seed) for seed in (1, 2))
    for seed, (parts, *_) in enumerate((old, new)):
        parts["v"] = dict(cases_vllm.layer_of("w8a16g32asym", SIZES["v"], HIDDEN, seed).state_dict())
    check(Model("w4a16g32", True, **words), Model("w4a16g32", True, **words), old, new)


def test_a_sleep_that_gives_back_buffers_alone_loses_no_rotation(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sleep at level 2 discards what was created while loading, except buffers."""
    signs = torch.ones(12, 12)  # on a GPU; a CPU needs none
    monkeypatch.setattr("anybit.ops.prepare_rotation", lambda *_: signs)
    model = Model("w4a8", True, hadamard=NAMES).take(*codes("w4a8", 1)).ready()
    assert any(buffer is signs for _, buffer in model.named_buffers())


class Online(cases_vllm.Mlp):
    """An MLP that is quantized while loading; its first product ends with SiLU."""

    def __init__(self) -> None:
        super().__init__(cases_vllm.configured("w4a16g32", None), bias=True)
        layerwise.record_metadata_for_reloading(self)

    def take(self, seed: int) -> "Online":
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        for shard in (0, 1):
            cases_vllm.hand(self.gate_up_proj, {"weight": random(128, 64), "bias": random(128)}, shard)
        cases_vllm.hand(self.down_proj, {"weight": random(64, 128)})
        return self

    def ready(self) -> "Online":
        for layer in (self.gate_up_proj, self.down_proj):
            layer.quant_method.process_weights_after_loading(layer)
        return self


def test_reload_interleaves_gate_and_up_again(rank: Any) -> None:
    model, x = Online(), torch.randn(3, 64)
    model.take(1).ready()
    places = [one.data_ptr() for one in (*model.buffers(), *model.parameters())]
    assert isinstance(model.act_fn, SiluMul) and model.act_fn.paired
    with reloading(model):
        model.take(2)
    assert torch.equal(model(x), Online().take(2).ready()(x))
    assert [one.data_ptr() for one in (*model.buffers(), *model.parameters())] == places
