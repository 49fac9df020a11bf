"""anybit's KV cache inside vLLM: rows through vLLM's real scheduler, and refusals. No engine runs."""

import logging
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm makes an environment that has it")

from torch._subclasses import FakeTensorMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from anybit.errors import OptionError
from anybit.models.families import VLLM_HYBRIDS
from anybit.scheme import KVFormat
from anybit.vllm import config as quantization
from anybit.vllm import kv_backend, kv_cache
from anybit.vllm.kv_backend import RowBuilder
from anybit.vllm.kv_spec import RowManager
from cases_vllm_rows import LIVES, Life, World

SEEDS, STEPS = 3, 10_000
_steps = dict[str, int]()


@pytest.mark.parametrize("life", LIVES, ids=str)
def test_scheduler_loses_and_leaks_nothing(life: Life):
    done: Counter[str] = Counter()
    for seed in range(SEEDS):
        done.update(World(replace(life, seed=life.seed + 100 * seed)).live_through())
    _steps[str(life)] = done["steps"]
    assert done["aborted"] > 0
    assert (done["hit tokens"] > 0) == life.caching
    assert (done.get("accepted", 0) > 0) == bool(life.drafts)
    assert done["preempted"] > 0 or not life.longer


def test_scheduler_took_enough_steps():
    assert len(_steps) < len(LIVES) or sum(_steps.values()) >= STEPS


@pytest.mark.parametrize(
    ("life", "found"), [(Life(late=True), "published|page"), (replace(LIVES[5], slack=0), "ring|wrong tokens")]
)
def test_faults_of_a_backend_are_found(life: Life, found: str):
    with pytest.raises(AssertionError, match=found):
        World(life).live_through()


@pytest.mark.parametrize("fault", ["shared", "short", "kept", "forgotten"])
def test_faults_of_the_manager_are_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    """Residuals shared by two requests, too short, never freed, or kept by a freed request."""
    plain, missing, pop = RowManager.allocate_new_blocks, RowManager._missing, RowManager.pop_blocks_for_free

    def allocate(self: Any, request_id: str, *args: Any, **kw: Any) -> Any:
        new = plain(self, request_id, *args, **kw)
        first = next(iter(self.req_to_blocks))
        if first != request_id and self.fronts.get(first) and self.fronts.get(request_id):
            self.req_to_blocks[request_id][0] = self.req_to_blocks[first][0]
        return new

    def free(self: Any, request_id: str) -> Any:
        blocks = pop(self, request_id)
        return blocks[:-1] if fault == "kept" and blocks else blocks

    if fault == "shared":
        monkeypatch.setattr(RowManager, "allocate_new_blocks", allocate)
    elif fault == "short":
        monkeypatch.setattr(RowManager, "_missing", lambda self, *args: max(missing(self, *args) - 1, 0))
    elif fault == "kept":
        monkeypatch.setattr(RowManager, "pop_blocks_for_free", free)
    else:
        monkeypatch.setattr(
            RowManager, "pop_blocks_for_free", lambda self, r: super(RowManager, self).pop_blocks_for_free(r)
        )
    with pytest.raises((AssertionError, IndexError)):
        World(Life()).live_through()


def drafts(method: str, count: int = 3) -> Any:
    return SimpleNamespace(method=method, num_speculative_tokens=count)


def engine(format: str = "kv4", **changed: Any) -> Any:
    """The engine configuration that a low-bit KV cache reads; ``cache__cache_dtype`` is a nested field."""
    parts: dict[str, Any] = {
        "parallel": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        "cache": SimpleNamespace(
            cache_dtype="auto",
            kv_sharing_fast_prefill=False,
            user_specified_block_size=False,
            block_size=16,
            enable_prefix_caching=False,
        ),
        "model": SimpleNamespace(is_hybrid=False, architecture=VLLM_HYBRIDS[0]),
        "device": SimpleNamespace(device_type="cuda"),
    }
    whole = {name: changed.pop(name) for name in ("kv_transfer_config", "speculative_config") if name in changed}
    for name, value in changed.items():
        part, _, field = name.partition("__")
        setattr(parts[part], field, value)
    return SimpleNamespace(
        quant_config=None, additional_config={kv_cache.OPTION: format},
        parallel_config=parts["parallel"], cache_config=parts["cache"], model_config=parts["model"],
        device_config=parts["device"],
        **{"kv_transfer_config": None, "speculative_config": None, **whole},
    )  # fmt: skip


LAYER = {
    "attn_type": "decoder", "prefix": "model.layers.0", "kv_sharing_target_layer_name": None, "alibi_slopes": None,
    "attn_backend": None, "head_size": 128, "head_size_v": None, "per_layer_sliding_window": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layer", "reason"),
    [
        (engine(kv_transfer_config=object()), {}, "KV connectors"),
        (engine(parallel__decode_context_parallel_size=2), {}, "context parallelism"),
        (engine(parallel__prefill_context_parallel_size=2), {}, "context parallelism"),
        (engine(parallel__use_ubatching=True), {}, "--enable-dbo"),
        (engine(model__is_mm_prefix_lm=True), {}, "FalconH1ForCausalLM has bidirectional attention"),
        (engine(model__rswa_window=64), {}, "attends to a window and the prompt"),
        (engine(4), {}, "anybit_kv_cache of --additional-config is 4, and must be a KV format"),
        (engine(cache__cache_dtype="fp8"), {}, "choose one of the two"),
        (engine(cache__kv_sharing_fast_prefill=True), {}, "fast-prefill"),
        (engine(cache__user_specified_block_size=True), {}, "--block-size is 16"),
        (engine(model__is_hybrid=True, cache__enable_prefix_caching=True), {}, "--no-enable-prefix-caching"),
        (engine(model__is_hybrid=True, model__architecture="Qwen3NextForCausalLM"), {}, "Qwen3Next.* is a hybrid"),
        (engine(speculative_config=drafts("suffix")), {}, "speculative decoding by suffix"),
        (engine(speculative_config=drafts("eagle3")), {}, "speculative decoding by eagle3"),
        (engine("kvfp4"), {}, "use kv4"),
        (engine(), {"kv_sharing_target_layer_name": "model.layers.1"}, "shares the keys and values of model.layers.1"),
        (engine(), {"alibi_slopes": [1.0]}, "ALiBi"),
        (engine(), {"attn_type": "encoder_decoder"}, "encoder_decoder"),
        (engine(), {"attn_backend": object()}, "brings its own backend"),
        (engine(), {"head_size_v": 64}, "differ in size"),
    ],
)
def test_kv_cache_refuses_what_is_not_tested(
    config: Any, layer: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kv_cache, "get_current_vllm_config_or_none", lambda: config)
    with pytest.raises(OptionError, match=reason):
        kv_cache.backend_for({**LAYER, **layer})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"cache__enable_prefix_caching": True}, "--no-enable-prefix-caching"),
        ({"speculative_config": drafts("ngram")}, "speculative decoding"),
    ],
)
def test_kv_cache_of_hybrid_models(changed: dict[str, Any], reason: str | None):
    config = engine(model__is_hybrid=True, **changed)
    found = kv_cache.why_not(config, KVFormat.parse("kv4"))
    assert found is None if reason is None else found is not None and reason in found


def test_a_plain_layer_gets_rows_of_the_format_that_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    config = engine("kv2")
    monkeypatch.setattr(kv_cache, "get_current_vllm_config_or_none", lambda: config)
    backend = kv_cache.backend_for(LAYER)
    assert backend is not None and backend.format == KVFormat.parse("kv2") and backend.slack == 0
    config.speculative_config = drafts("ngram", 5)
    drafted = kv_cache.backend_for(LAYER)
    assert drafted is not None and drafted.slack == 32
    assert kv_cache.backend_for({**LAYER, "attn_type": "encoder_only"}) is None
    config.additional_config = {}
    assert kv_cache.backend_for(LAYER) is None


@pytest.mark.parametrize(
    ("count", "new", "padded", "few"),
    [
        (2, (3, 3, 3), 4, (4, 12, 3)),  # a full graph's batch: a row and its tokens are padding
        (2, (3, 1, 2), 3, (3, 6, 3)),
        (2, (1, 1), 2, (2, 2, 1)),
        (0, (1, 1, 1), 4, (4, 4, 1)),
        (20, (1, 1), 2, (2, 2, 1)),  # more than kernels take: as prompts, and no full graphs
    ],
)
def test_steps_of_drafts_are_described_without_a_look_at_the_device(
    count: int, new: tuple[int, ...], padded: int, few: tuple[int, int, int]
):
    config = SimpleNamespace(speculative_config=drafts("ngram", count) if count else None)
    builder: Any = RowBuilder.__new__(RowBuilder)
    builder.device, builder.reorder_batch_threshold = torch.device("cuda"), kv_backend.most_of(config)
    with FakeTensorMode():  # reading a value of these fails
        table = torch.zeros(padded, 8, dtype=torch.int32)
        lengths, starts = torch.zeros(padded, dtype=torch.int32), torch.zeros(padded + 1, dtype=torch.int32)
    tokens = sum(new) // len(new) * padded if padded > len(new) else sum(new)
    known = torch.tensor([0, *new, *[0] * (padded - len(new))], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch = builder.build(
        0,
        SimpleNamespace(
            block_table_tensor=table, seq_lens=lengths, query_start_loc=starts, query_start_loc_cpu=known,
            num_actual_tokens=tokens, num_reqs=padded, max_query_len=max(new), seq_lens_cpu_upper_bound=None,
        ),
    )  # fmt: skip
    assert (batch.decodes, batch.decode_tokens, batch.queries) == few and not batch.groups
    one = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert RowBuilder.get_cudagraph_support(config, None) == (AttentionCGSupport.UNIFORM_BATCH if count == 2 else one)


def test_layers_with_a_window_stay_as_they_are_in_pages_of_the_packed_ones(monkeypatch: pytest.MonkeyPatch):
    config = engine("kv4g128")
    monkeypatch.setattr(kv_cache, "get_current_vllm_config_or_none", lambda: config)
    assert kv_cache.backend_for({**LAYER, "per_layer_sliding_window": 512}) is None
    window = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.float16, sliding_window=512)
    found = kv_cache._beside_rows(window, config)
    assert (found.block_size, found.page_size_bytes) == (32, 8 * 17_536)  # 32 tokens of 4,096 bytes
    with pytest.raises(OptionError, match="is too small for 16 tokens"):
        kv_cache._beside_rows(replace(window, dtype=torch.float32), engine("kv2g128"))


def test_a_log_line_says_how_many_tokens_fit(caplog: pytest.LogCaptureFixture):
    logger = logging.getLogger("vllm.anybit")
    World(Life())  # vLLM sets up logging with the first engine, and removes handlers
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "vllm.anybit"):
            world = World(Life())
    finally:
        logger.removeHandler(caplog.handler)
    (said,) = {r.getMessage() for r in caplog.records if "tokens fit in requests" in r.getMessage()}
    spec = world.spec
    packed, plain = spec.tokens_that_fit(world.total, 8192)
    assert f"is {spec.format}: {packed} tokens fit in requests of 8192 (in 16 bits: {plain} tokens)" in said
    assert spec.tokens_that_fit(10 * (spec.front + 64), 8192)[0] == 10 * 8192
    bytes_of_a_token = 2 * 2 * spec.num_kv_heads * spec.head_size
    assert plain * bytes_of_a_token <= world.total * spec.page_size_bytes < (plain + 1) * bytes_of_a_token


def test_kv_cache_refuses_unknown_options(monkeypatch: pytest.MonkeyPatch):
    asked = engine()
    asked.additional_config = {"anybit_kv_cach": "kv4", "another": 1}
    with pytest.raises(OptionError, match="has unknown anybit_kv_cach; anybit's are anybit_kv_cache and anybit_att"):
        kv_cache.format_of(asked)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT" in str(kv_cache.why_not(engine(), KVFormat.parse("kv4")))


def test_latents_are_not_left_in_16_bits_without_a_word(monkeypatch: pytest.MonkeyPatch):
    """DeepSeek's attention has another class in vLLM, which never asks anybit for a backend."""
    kv_cache.install()
    monkeypatch.setattr(kv_cache, "get_current_vllm_config_or_none", lambda: engine("kv4"))
    with pytest.raises(OptionError, match=r"layers\.0\.attn uses MLA, .* leave anybit_kv_cache out"):
        kv_cache.MLAAttention(2, 1.0, 8, 8, 8, None, 8, None, prefix="layers.0.attn")


def offloading(gigabytes: float = 0, layers: int = 0) -> Any:
    return SimpleNamespace(
        uva=SimpleNamespace(cpu_offload_gb=gigabytes), prefetch=SimpleNamespace(offload_group_size=layers)
    )


@pytest.mark.parametrize("where", [{"gigabytes": 2}, {"layers": 4}])
def test_codes_are_not_offloaded(where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        quantization, "get_current_vllm_config", lambda: SimpleNamespace(offload_config=offloading(**where))
    )
    with pytest.raises(OptionError, match="do not work with anybit's layers"):
        quantization.AnyBitConfig("w4a16").get_quant_method(torch.nn.Identity(), "a")


@pytest.mark.parametrize(("ranks", "fits"), [(1, True), (2, True), (12, True), (4, False), (9, False)])
def test_kv_heads_that_ranks_cannot_share_are_refused_by_name(
    ranks: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's models would only assert, without a message."""
    engine = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 6),
        offload_config=offloading(),
    )
    monkeypatch.setattr(quantization, "get_current_vllm_config", lambda: engine)
    if fits:
        assert quantization.AnyBitConfig("w4a16").get_quant_method(torch.nn.Identity(), "a") is None
        return
    with pytest.raises(OptionError, match=f"{ranks} cannot share the 6 KV heads of the model: choose one of 1, 2, 3"):
        quantization.AnyBitConfig("w4a16").get_quant_method(torch.nn.Identity(), "a")


@pytest.mark.parametrize(
    ("drafter", "rotated", "told"),
    [
        ("eagle3", ("down_proj",), True),
        ("mtp", ("down_proj",), True),
        ("ngram", ("down_proj",), False),
        ("eagle3", ("q_proj", "o_proj", "gate_proj", "down_proj"), False),  # smooth_rotate
        ("eagle3", (), False),
        (None, ("down_proj",), False),
    ],
)
def test_drafters_of_hidden_states_that_are_rotated_are_told_of(
    drafter: str | None,
    rotated: tuple[str, ...],
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=None,
        offload_config=offloading(),
        speculative_config=drafter and SimpleNamespace(method=drafter),
    )
    monkeypatch.setattr(quantization, "get_current_vllm_config", lambda: engine)
    monkeypatch.setattr(quantization._logger, "propagate", True)
    config = quantization.AnyBitConfig("w4a16", hadamard=[f"model.layers.0.x.{name}" for name in rotated])
    for _ in range(2):
        config.get_quant_method(torch.nn.Identity(), "a")
    assert caplog.text.count("hidden states are rotated") == told
