"""Choose anybit's KV cache for vLLM's attention layers: by scheme (``w4a8-kv4``) or by ``--additional-config``.

    vllm serve MODEL --additional-config '{"anybit_kv_cache": "kv4"}'

Full-attention layers get ``kv_backend`` as their backend. Sliding-window layers beside them stay vLLM's, which keeps
their window in 16 bits and frees the rest. Unsupported or untested configurations raise OptionError. Layers over vLLM's
own 16-bit pages may get ``decode``.
"""

import inspect
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.kv_cache_interface import AttentionSpec, SlidingWindowSpec

from anybit.errors import OptionError
from anybit.models.families import VLLM_HYBRIDS
from anybit.ops.kv_rows import PAGE
from anybit.scheme import KVFormat
from anybit.vllm import kv_spec
from anybit.vllm.config import AnyBitConfig
from anybit.vllm.kv_backend import RowBackend, backend_of, drafts_of
from anybit.vllm.kv_spec import RowSpec

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.block_table import BlockTables

OPTION, ATTENTION = "anybit_kv_cache", "anybit_attention"
_logger = init_logger("vllm.anybit")


def format_of(config: VllmConfig) -> KVFormat | None:
    """The KV format that an engine's configuration asks for; None for vLLM's own cache."""
    more = config.additional_config if isinstance(config.additional_config, dict) else {}
    unknown = [name for name in more if name.startswith("anybit") and name not in (OPTION, ATTENTION)]
    if unknown:
        raise OptionError(f"--additional-config has unknown {unknown[0]}; anybit's are {OPTION} and {ATTENTION}")
    by_option = more.get(OPTION)
    if by_option is not None and not isinstance(by_option, str):
        raise OptionError(f'{OPTION} of --additional-config is {by_option!r}, and must be a KV format such as "kv4"')
    by_scheme = getattr(getattr(config.quant_config, "scheme", None), "kv", None)
    return by_scheme if by_option is None else KVFormat.parse(by_option)


def attends(config: VllmConfig | None) -> bool:
    """Whether decode attention over 16-bit pages may run on anybit's kernel: yes, unless the option says no."""
    more = getattr(config, "additional_config", None)
    asked = more.get(ATTENTION, True) if isinstance(more, dict) else True
    if not isinstance(asked, bool):
        raise OptionError(
            f"{ATTENTION} of --additional-config is {asked!r}, and must be true (anybit's kernel runs decode steps) or "
            "false (FlashAttention runs every step)"
        )
    return asked and isinstance(getattr(config, "quant_config", None), AnyBitConfig)


def why_not(config: VllmConfig, format: KVFormat) -> str | None:
    """Why an engine's configuration rules out a low-bit KV cache, as a sentence; None if it does not."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    if format.float4:
        return f"there is no kernel that stores {format}: use kv4"
    if config.kv_transfer_config is not None:
        return "KV connectors (--kv-transfer-config) do not transfer a request's 16-bit residual"
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "context parallelism splits pages between ranks, which is not supported"
    if getattr(parallel, "use_ubatching", False):
        return "--enable-dbo and --ubatch-size run two halves of a step at once, which would share one scratch buffer"
    if getattr(model, "is_mm_prefix_lm", False):
        return (
            f"{model.architecture} has bidirectional attention within images, and its kernels are causal (for text "
            'alone, vLLM 0.32 takes --limit-mm-per-prompt \'{"image": 0, "video": 0}\')'
        )
    if getattr(model, "rswa_window", None) is not None:
        return f"{model.architecture} attends to a window and the prompt, which its kernels do not support"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT asks for results that do not depend on the batch, which its kernels do not promise"
    if cache.cache_dtype != "auto":
        return f"--kv-cache-dtype {cache.cache_dtype} asks for vLLM's own low-bit cache: choose one of the two"
    if getattr(cache, "kv_sharing_fast_prefill", False):
        return "--kv-sharing-fast-prefill is not tested with it"
    drafter = getattr(config.speculative_config, "method", None)
    if drafter not in (None, "ngram"):
        return f"speculative decoding by {drafter} is not tested with it: use ngram, or leave --speculative-config out"
    if model.is_hybrid:
        if model.architecture not in VLLM_HYBRIDS:
            return (
                f"{model.architecture} is a hybrid model (Mamba or linear-attention layers); of these, only "
                f"{', '.join(VLLM_HYBRIDS)} are tested"
            )
        if cache.enable_prefix_caching:
            return "prefix caching is not tested with hybrid models: use --no-enable-prefix-caching"
        if drafter is not None:
            return "speculative decoding is not tested with hybrid models: leave --speculative-config out"
    if cache.user_specified_block_size and cache.block_size != PAGE:
        return f"a block is a page of {PAGE} tokens, and --block-size is {cache.block_size}: leave it out"
    return None


def _without(config: VllmConfig, format: KVFormat) -> str:
    """Advice: how to get vLLM's own cache."""
    by_option = isinstance(config.additional_config, dict) and config.additional_config.get(OPTION) is not None
    where = f"{OPTION} out of --additional-config" if by_option else f"-{format} out of the scheme in config.json"
    return f"for vLLM's own 16-bit cache leave {where}"


def _slack(config: VllmConfig) -> int:
    """Residual slots beyond a page: a step may pack its draft tokens, and rejected ones are rolled back."""
    return -(-drafts_of(config) // 32) * 32


def backend_for(arguments: dict[str, Any]) -> type[RowBackend] | None:
    """The backend for an attention layer being built with these arguments; None to leave it to vLLM.

    Raises OptionError if a low-bit cache is asked for that the layer or engine does not support.
    """
    config = get_current_vllm_config_or_none()
    format = None if config is None else format_of(config)
    if format is None or arguments["attn_type"] in ("encoder", "encoder_only"):
        return None
    prefix, window = arguments["prefix"], arguments["per_layer_sliding_window"]
    reason = why_not(config, format)
    if reason is None and window is not None:
        _logger.info("anybit: %s keeps its window of %d tokens in 16 bits", prefix, window)
        return None
    if arguments["kv_sharing_target_layer_name"] is not None:
        reason = f"{prefix} shares the keys and values of {arguments['kv_sharing_target_layer_name']}"
    elif arguments["alibi_slopes"] is not None:
        reason = f"{prefix} has ALiBi slopes, which its prefill does not support"
    elif arguments["attn_type"] != "decoder" or arguments["attn_backend"] is not None:
        reason = f"{prefix} is not decoder self-attention, or brings its own backend ({arguments['attn_type']})"
    elif (arguments["head_size_v"] or arguments["head_size"]) != arguments["head_size"]:
        reason = f"keys and values of {prefix} differ in size"
    if reason is not None:
        raise OptionError(f"a KV cache of {format} inside vLLM: {reason}; {_without(config, format)}")
    backend = backend_of(format, _slack(config))
    backend.rows(arguments["head_size"])  # raises for head sizes that the format does not divide
    if config.model_config.is_hybrid and config.device_config.device_type == "cpu":
        _clear_whole_blocks()
    return backend


def install() -> None:
    """Patch vLLM to ask ``backend_for`` for each attention layer it builds; idempotent."""
    if hasattr(Attention.__init__, "anybit"):
        return
    kv_spec.register()
    plain, signature = Attention.__init__, inspect.signature(Attention.__init__)

    def init(self: Attention, *args: object, **kw: object) -> None:
        given = signature.bind(self, *args, **kw)
        given.apply_defaults()
        backend = backend_for(given.arguments)
        plain(self, *args, **kw) if backend is None else plain(self, *args, **{**kw, "attn_backend": backend})
        config = get_current_vllm_config_or_none()
        if backend is not None or not attends(config):
            return
        if (name := self.attn_backend.get_name()) != "FLASH_ATTN":
            _logger.info_once("anybit: decode attention runs on vLLM's %s: anybit's kernel replaces FLASH_ATTN's", name)
            return
        from anybit.vllm.decode import take_over  # late: FlashAttention makes choices at import

        take_over(self, config)

    init.anybit = True  # type: ignore[attr-defined]
    Attention.__init__ = init
    latent, named = MLAAttention.__init__, inspect.signature(MLAAttention.__init__)

    def init_latent(self: MLAAttention, *args: object, **kw: object) -> None:
        config = get_current_vllm_config_or_none()
        if config is not None and (format := format_of(config)) is not None:  # which would be ignored silently
            prefix = named.bind(self, *args, **kw).arguments.get("prefix", "")
            raise OptionError(
                f"a KV cache of {format} inside vLLM: {prefix} uses MLA, whose latent cache it cannot pack; "
                f"{_without(config, format)}"
            )
        latent(self, *args, **kw)

    MLAAttention.__init__ = init_latent
    if hasattr(RowBackend.__mro__[1], "customize_spec"):  # vLLM 0.32 and later ask the backend
        return
    spec = Attention.get_kv_cache_spec

    def get_kv_cache_spec(self: Attention, vllm_config: VllmConfig) -> AttentionSpec:
        found = spec(self, vllm_config)
        backend = self.attn_backend
        if not (isinstance(backend, type) and issubclass(backend, RowBackend)):
            return _beside_rows(found, vllm_config) if isinstance(found, SlidingWindowSpec) else found
        rows = backend.customize_spec(replace(found, block_size=PAGE * _together(found, backend, vllm_config)))
        _widen_tables(rows.front)
        return rows

    Attention.get_kv_cache_spec = get_kv_cache_spec


def _clear_whole_blocks() -> None:
    """Patch vLLM's CPU runner to zero whole blocks of several pages: it takes block ids for page ids."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    plain = CPUModelRunner._zero_block_ids

    def zero(self: CPUModelRunner, block_ids: list[int]) -> None:
        layers = self.compilation_config.static_forward_context
        groups = [g for g in self.kv_cache_config.kv_cache_groups if isinstance(g.kv_cache_spec, RowSpec)]
        if not groups:
            plain(self, block_ids)
        for name in (name for group in groups for name in group.layer_names):
            pages = layers[name].kv_cache.unflatten(0, (self.kv_cache_config.num_blocks, -1))
            pages[block_ids] = 0

    if not hasattr(plain, "anybit"):
        zero.anybit = True  # type: ignore[attr-defined]
        CPUModelRunner._zero_block_ids = zero


def _together(spec: AttentionSpec, backend: type[RowBackend], config: VllmConfig) -> int:
    """Pages per block: in hybrid models enough to cover the 16-bit block, which vLLM makes as large as a state."""
    page = spec.num_kv_heads * backend.rows(spec.head_size).layout.page_bytes
    return int(-(-spec.page_size_bytes // page)) if config.model_config.is_hybrid else 1


def _beside_rows(spec: SlidingWindowSpec, config: VllmConfig) -> SlidingWindowSpec:
    """The spec of a sliding-window layer in 16 bits: its blocks are padded to the packed layers' page size."""
    format = format_of(config)
    if format is None:
        return spec
    rows = backend_of(format, _slack(config)).rows(spec.head_size)
    page = RowSpec.of(replace(spec, sliding_window=None, block_size=PAGE), rows)
    token = spec.real_page_size_bytes // spec.block_size
    block = next((size for size in (128, 64, 32, 16) if size * token <= page.page_size_bytes), None)
    if block is None:
        raise OptionError(
            f"a KV cache of {format} inside vLLM: a page of {page.page_size_bytes} bytes is too small for 16 tokens of "
            f"{token} bytes of the sliding-window layers: use more bits (kv4, kv8), or --dtype float16; "
            + _without(config, format)
        )
    return replace(spec, block_size=block, page_size_padded=page.page_size_bytes)


def _widen_tables(front: int) -> None:
    """Widen the block tables of vLLM 0.26's V2 model runner by the residual: it sizes them without asking the spec."""
    runner: Any = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is None or getattr(runner.BlockTables, "anybit", 0) >= front:
        return
    plain = getattr(runner.BlockTables, "plain", runner.BlockTables)

    def wider(*args: object, max_num_blocks_per_group: list[int], **kw: object) -> "BlockTables":
        return plain(*args, max_num_blocks_per_group=[n + front for n in max_num_blocks_per_group], **kw)

    wider.anybit, wider.plain = front, plain  # type: ignore[attr-defined]
    runner.BlockTables = wider
