"""Decode steps of vLLM's FlashAttention on anybit's kernel: its batches and arguments. The op is a fake."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm makes an environment that has it")

from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.granite import GraniteAttention
from vllm.model_executor.models.mistral import MistralAttention
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from anybit.cache.attention import attend
from anybit.errors import KernelError, OptionError
from anybit.ops import pages
from anybit.ops.compile_ahead import CompiledAhead
from anybit.ops.kv import Masks
from anybit.scheme import Scheme
from anybit.vllm import decode, kv_cache, rotary, warmup
from anybit.vllm.config import AnyBitConfig

pytestmark = pytest.mark.usefixtures("vllm_config")
HEADS, KV_HEADS, DIM, PAGE, CAPACITY = 4, 2, 64, 16, 96


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine's configuration, of a model quantized by anybit."""
    kv_cache.install()
    for name in ("flash_attn_supports_sinks", "flash_attn_supports_quant_query_input"):  # not available on a CPU
        monkeypatch.setattr(f"{FlashAttentionImpl.__module__}.{name}", lambda *_: True, raising=False)
    found = get_current_vllm_config()
    model = SimpleNamespace(dtype=torch.float16, max_model_len=CAPACITY, is_mm_prefix_lm=False)
    monkeypatch.setattr(found, "model_config", model)
    monkeypatch.setattr(found, "quant_config", AnyBitConfig("w4a16g128"))
    return found


def layer_of(prefix: str = "m.0.attn", **words: Any) -> Any:
    """An attention layer as vLLM creates it on a GPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        given = {"attn_backend": FlashAttentionBackend, **words}
        return Attention(HEADS, DIM, DIM**-0.5, num_kv_heads=KV_HEADS, prefix=prefix, **given)
    finally:
        torch.set_default_dtype(before)


def batch_of(lengths: list[int], queries: int = 1, **words: Any) -> Any:
    """A step's metadata, with both vLLM versions' names, and shuffled pages."""
    pages = -(-CAPACITY // PAGE)
    table = torch.randperm(len(lengths) * pages, generator=torch.Generator().manual_seed(0)).view(-1, pages)
    given = {
        "num_actual_tokens": len(lengths) * queries, "max_query_len": queries, "max_seq_len": max(lengths),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32), "block_table": table.int(), "causal": True,
    }  # fmt: skip
    return SimpleNamespace(**{**given, **words})


def built(metadata: Any, layers: list[Any], monkeypatch: pytest.MonkeyPatch, prefix: int = 0, most: int = 64) -> Any:
    """Metadata of a step from a builder of these layers."""
    builder: Any = decode.DecodeBuilder.__new__(decode.DecodeBuilder)
    builder.most, builder.scheduled = most, True
    builder.windows = {layer.impl.sliding_window for layer in layers}
    monkeypatch.setattr(
        FlashAttentionMetadataBuilder, "build", lambda self, common, m, fast: setattr(m, "fast", fast) or m
    )
    return builder.build(prefix, metadata)


def reference(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, masks: Masks, *, out: Tensor,
    capacity: int, overlaps: bool,
) -> None:  # fmt: skip
    """The op's reference."""
    for i, length in enumerate(lengths.tolist()[: len(q)]):
        pages = table[i].tolist()
        k, v = (x[pages].flatten(0, 1)[:length].transpose(0, 1).float() for x in (keys, values))
        out[i] = attend(q[i : i + 1].float(), k, v, masks)[0][0].to(out.dtype) if length else 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Which attention ran, and with which arguments."""
    found: list[tuple[str, dict[str, Any]]] = []

    def ours(*args: Any, **kw: Any) -> None:
        found.append(("anybit", kw))
        reference(*args, **kw)

    monkeypatch.setattr(decode.kv_plain, "decode", ours)
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda self, *given: found.append(("vLLM", {})) or given[6])
    return found


def attended(layer: Any, metadata: Any, tokens: int, **words: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A forward pass of a layer: (queries, its cache, output)."""
    torch.manual_seed(1)
    pages = 64 if metadata is None else metadata.block_table.numel()
    cache = torch.randn(pages, KV_HEADS, PAGE, 2 * DIM, dtype=torch.float16)
    q, out = torch.randn(tokens, HEADS, DIM, dtype=torch.float16), torch.full((tokens, HEADS, DIM), 7.0).half()
    assert layer.impl.forward(layer, q, q, q, cache, metadata, out, **words) is out
    return q, cache, out


@pytest.mark.parametrize(
    ("words", "masks"),
    [
        ({}, Masks(DIM**-0.5)),
        ({"per_layer_sliding_window": 20}, Masks(DIM**-0.5, window=20)),
        ({"logits_soft_cap": 5.0}, Masks(DIM**-0.5, softcap=5.0)),
        ({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, Masks(DIM**-0.5, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    ],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_a_decode_step_is_attended_over_vllms_pages(
    words: dict[str, Any], masks: Masks, config: Any, calls: Any, monkeypatch: pytest.MonkeyPatch
):
    layer = layer_of(**words)
    assert layer.attn_backend is decode.DecodeBackend and layer.attn_backend.get_name() == "FLASH_ATTN"
    assert type(layer.impl) is decode.DecodeImpl and isinstance(layer.impl, FlashAttentionImpl)
    metadata = built(batch_of([5, 96, 17, 0]), [layer], monkeypatch)  # the last row is padding
    q, cache, out = attended(layer, metadata, 6)  # more rows than requests, as without a graph
    assert [who for who, _ in calls] == ["anybit"]
    assert calls[0][1]["capacity"] == CAPACITY and calls[0][1]["overlaps"] is False
    for i, length in enumerate([5, 96, 17]):
        tokens = cache[metadata.block_table[i]].transpose(0, 1).flatten(1, 2)[:, :length].float()
        expected = attend(q[i : i + 1].float(), *tokens.split(DIM, -1), masks)[0][0]
        torch.testing.assert_close(out[i].float(), expected, atol=2e-3, rtol=0)
    assert not out[3].any() and (out[4:] == 7).all()


def test_tokens_that_anybit_stores_may_be_waited_for_inside_the_kernel(
    config: Any, calls: Any, monkeypatch: pytest.MonkeyPatch
):
    layer = layer_of()
    monkeypatch.setattr(rotary, "_take_frequencies_of_a_cpu", lambda _: None)
    rotary.replace_forward(SimpleNamespace(attn=layer, rotary_emb=None), rotary.Heads(HEADS, KV_HEADS, DIM, True))
    attended(layer, built(batch_of([9]), [layer], monkeypatch), 1)
    assert calls[0][1]["overlaps"] is True


def test_the_stride_of_one_kv_head_is_a_heads():
    """To torch, a rank's only head may have any stride, and kernels refuse one that is not a multiple of eight."""
    cache = torch.zeros(3 * PAGE * 2 * DIM).half().as_strided((3, 1, PAGE, 2 * DIM), (PAGE * 2 * DIM, 1, 2 * DIM, 1))
    keys, values = rotary.pages_of(SimpleNamespace(head_size=DIM), cache)
    assert keys.shape == (3, PAGE, 1, DIM) and values.data_ptr() == cache.data_ptr() + 2 * DIM
    positions = torch.zeros(1, dtype=torch.int64)
    step = pages.RopePagesArgs(torch.zeros(9, DIM).half(), positions, keys, values, positions, HEADS, 1)
    pages.check_step(step, torch.Size((1, (HEADS + 2) * DIM)), torch.float16)


@pytest.mark.parametrize(
    ("changed", "prefix"),
    [
        ({"queries": 2}, 0),
        ({}, 16),
        ({"use_cascade": True}, 0),
        ({"causal": False}, 0),
        ({"causal": torch.ones(2, dtype=torch.int32)}, 0),
        ({"mm_prefix_range_tensor": torch.zeros(2, 1, 2)}, 0),
        ({"mm_prefix_query_range_tensor": torch.zeros(2, 2)}, 0),
        ({"rswa_prefix_lens": torch.zeros(2)}, 0),
        ({"sliding_window": (9, 0)}, 0),
        ({"num_actual_tokens": 3}, 0),
        ({"num_actual_tokens": 0}, 0),
    ],
)
def test_decode_leaves_other_batches_to_flash_attention(
    changed: dict[str, Any], prefix: int, config: Any, calls: Any, monkeypatch: pytest.MonkeyPatch
):
    layer = layer_of()
    attended(layer, built(batch_of([5, 20], **changed), [layer], monkeypatch, prefix), 4)
    attended(layer, None, 4)  # vLLM profiles memory
    attended(layer, batch_of([5, 20]), 2)  # from another builder
    attended(layer, built(batch_of([5, 20]), [layer], monkeypatch), 2, output_scale=torch.ones(1))
    assert [who for who, _ in calls] == ["vLLM"] * 4


def test_a_group_of_layers_with_windows_and_without_is_told_apart(
    config: Any, calls: Any, monkeypatch: pytest.MonkeyPatch
):
    layers = [layer_of("m.0.attn", per_layer_sliding_window=20), layer_of("m.1.attn")]
    assert not built(batch_of([5]), layers, monkeypatch).anybit
    assert built(batch_of([5], sliding_window=(19, 0)), layers[:1], monkeypatch).anybit
    assert not built(batch_of([5], sliding_window=(-1, -1)), layers[:1], monkeypatch).anybit


def test_more_requests_than_kernels_attend_together_are_flash_attentions(config: Any, monkeypatch: pytest.MonkeyPatch):
    few, more = (built(batch_of([5] * n), [layer_of(f"m.{n}.attn")], monkeypatch, most=3) for n in (3, 4))
    assert few.anybit and few.fast and not more.anybit and not more.fast


def test_flash_attentions_schedule_is_made_for_what_it_attends(config: Any, monkeypatch: pytest.MonkeyPatch):
    layer = layer_of()
    assert built(batch_of([5]), [layer], monkeypatch).fast
    assert not built(batch_of([5], queries=2), [layer], monkeypatch).fast
    assert not built(batch_of([5]), [layer], monkeypatch, prefix=16).fast


@pytest.mark.parametrize(
    "words",
    [
        {"attn_type": "encoder_only"}, {"attn_type": "encoder_decoder"}, {"kv_sharing_target_layer_name": "m.0.attn"},
        {"head_size_v": 32},
    ],
    ids=lambda words: next(iter(words)),
)  # fmt: skip
def test_decode_is_left_to_vllm_for_other_layers(words: dict[str, Any], config: Any):
    layer_of()
    layer = layer_of("m.1.attn", **words)
    assert layer.attn_backend is FlashAttentionBackend and type(layer.impl) is FlashAttentionImpl


@pytest.mark.parametrize(
    ("kind", "flag", "plain"),
    [(MistralAttention, "do_llama_4_scaling", False), (GraniteAttention, "use_rope", True)],
)
@pytest.mark.parametrize("taken", [True, False])
def test_rope_is_anybits_unless_queries_are_scaled_or_not_turned(
    kind: Any, flag: str, plain: bool, taken: bool, config: Any
) -> None:
    parent: Any = kind.__new__(kind)
    torch.nn.Module.__init__(parent)
    parent.attn = layer_of()
    setattr(parent, flag, plain is taken)
    parent.rotary_emb = RotaryEmbedding(DIM, DIM, CAPACITY, 10000.0, True, torch.float16)
    found = rotary.heads_of(parent, torch.float16, Scheme.parse("w4a16"), plain=True)
    assert found == (rotary.Heads(HEADS, KV_HEADS, DIM, paired=True) if taken else None)


@pytest.mark.parametrize("option", [{"anybit_attention": False}, "not a dictionary", {}])
def test_decode_is_switched_off_by_an_option(option: Any, config: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config, "additional_config", option)
    taken = layer_of().attn_backend is decode.DecodeBackend
    assert taken == (option != {"anybit_attention": False})


def test_decode_is_left_to_vllm_for_models_of_others(config: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config, "quant_config", None)
    assert layer_of().attn_backend is FlashAttentionBackend


def test_an_option_that_says_neither_yes_nor_no_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config, "additional_config", {"anybit_attention": "off"})
    with pytest.raises(OptionError, match="anybit_attention of --additional-config is 'off', and must be true"):
        layer_of()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"impl": {"batch_invariant_enabled": True}}, "VLLM_BATCH_INVARIANT"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"parallel_config": SimpleNamespace(prefill_context_parallel_size=2)}, "context parallelism"),
        ({"mode": CUDAGraphMode.FULL}, "mixed batches"),
        ({"mode": CUDAGraphMode.FULL_DECODE_ONLY}, None),
        ({"mode": CUDAGraphMode.NONE}, None),
        ({"impl": {"alibi_slopes": torch.ones(HEADS)}}, "ALiBi"),
    ],
)
def test_decode_why_not_names_the_reason(changed: dict[str, Any], reason: str | None):
    impl = SimpleNamespace(**{"batch_invariant_enabled": False, "alibi_slopes": None, **changed.pop("impl", {})})
    mode = changed.pop("mode", CUDAGraphMode.FULL_AND_PIECEWISE)
    engine: dict[str, Any] = {"speculative_config": None, "parallel_config": SimpleNamespace()}
    engine |= {"compilation_config": SimpleNamespace(cudagraph_mode=mode), **changed}
    found = decode.why_not(SimpleNamespace(**engine), [impl])
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize(("reason", "most"), [(None, None), (None, 3), ("heads have 48 channels", None)])
def test_kernels_are_compiled_when_a_model_is_loaded(
    reason: str | None, most: int | None, config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    asked: list[Any] = []
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", lambda self, *_: None)
    monkeypatch.setattr(decode.Device, "of", lambda _: "a device")
    monkeypatch.setattr(decode.torch, "empty", lambda *_, **__: None)

    def kernels_for(problem: Any, device: Any) -> list[Any]:
        if reason:
            raise KernelError(reason)
        asked.append((problem, device))
        return [problem.sliding] * min(problem.batch, most or problem.batch)

    monkeypatch.setattr(decode.kv_plain, "kernels_for", kernels_for)
    ready = CompiledAhead(2, 2, 0.1, 0.1, ["no compiler"])
    monkeypatch.setattr(warmup, "make_ready", lambda kernels, _: asked.append(kernels) or ready)
    layers = [layer_of("m.0.attn", per_layer_sliding_window=20), *(layer_of(f"m.{i}.attn") for i in (1, 2))]
    monkeypatch.setattr(logging.getLogger("vllm.anybit"), "propagate", True)
    with caplog.at_level(logging.INFO, "vllm.anybit"):
        names = [layer.layer_name for layer in layers]
        builder: Any = decode.DecodeBuilder(SimpleNamespace(block_size=PAGE), names, config, torch.device("cuda"))
    sequences = config.scheduler_config.max_num_seqs
    assert builder.most == (0 if reason else most or sequences)
    if reason is not None:
        assert f"decode attention runs on FlashAttention: {reason}" in caplog.text
        return
    for problem, device in asked[:2]:
        shape = problem.plain, problem.heads, problem.kv_heads, problem.layout.head_dim, problem.capacity
        assert (shape, device) == ((PAGE, HEADS, KV_HEADS, DIM, CAPACITY), "a device") and not problem.bf16
    assert sorted(asked[2]) == [False, True] and len(asked) == 3  # equal layers once
    some = f" for up to 3 of {sequences} requests of {CAPACITY} tokens at a time" if most else ""
    assert f"decode attention of 3 layers runs on anybit's kernel{some};" in caplog.text
    assert '"anybit_attention": false' in caplog.text
    assert "no compiler" in caplog.text


def test_decode_is_left_to_vllm_without_a_gpu(config: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "__init__", lambda self, *_: None)
    layer = layer_of()
    builder: Any = decode.DecodeBuilder(
        SimpleNamespace(block_size=PAGE), [layer.layer_name], config, torch.device("cpu")
    )
    assert builder.most == 0
