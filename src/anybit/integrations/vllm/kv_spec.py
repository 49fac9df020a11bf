"""vLLM's block manager with rows that begin with a sequence's 16-bit residual: a spec and a manager.

One block of vLLM is one page of 128 packed tokens (several, beside layers that keep a state), and a row is
[residual blocks | pages]; ``kernels.attention.kv_rows`` says what is in them. Pages exist for full pages only, and
before the first one there are only as many residual blocks as the tokens need, so rows only grow at their end; a
request that begins with a prefix hit gets all of them at once.
Residual blocks are ordinary blocks of the pool that are never hashed: the scheduler counts them, preemption frees them,
and prefix hits are whole pages. Nothing else of vLLM knows.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from anybit.ops.kv_rows import PAGE, RowLayout

_logger = logging.getLogger("vllm.anybit")
_EACH = 8192
"""Tokens of a request, where a log line says how many fit."""
_BY_CONTENT = any(f.name == "state_content_bytes" for f in fields(AttentionSpec))  # from 0.32 on


@dataclass(frozen=True, kw_only=True)
class RowSpec(FullAttentionSpec):  # type: ignore[misc]
    """What vLLM knows of a layer's cache.

    page_bytes: of one KV head.  together: pages of a block.  front, slots: residual blocks of a row, and the tokens of
    each.  format: its name.
    """

    page_bytes: int = 0
    together: int = 1
    front: int = 0
    slots: int = 0
    format: str = ""

    @classmethod
    def of(cls, spec: FullAttentionSpec, rows: RowLayout) -> "RowSpec":
        """The spec of a layer that would have a 16-bit cache."""
        known = {f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec) if f.init and hasattr(spec, f.name)}
        size = rows.layout.page_bytes
        known["sliding_window"] = None  # of a model whose layers all have one: rows keep all tokens
        known |= {"page_bytes": size, "together": rows.together, "format": str(rows.layout.format)}
        known |= {"front": rows.front // rows.together, "slots": rows.slots * rows.together}
        if _BY_CONTENT:
            known |= {"state_content_bytes": size, "tokens_per_state": PAGE}
        return cls(**known)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of a block; vLLM asks for those of a token, too."""
        return int(self.num_kv_heads * self.page_bytes * self.block_size // PAGE)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """The same under its newer name."""
        return self.real_page_size_bytes

    def tokens_that_fit(self, blocks: int, each: int) -> tuple[int, int]:
        """Tokens that so many blocks hold in requests of ``each`` tokens, and in 16 bits in the same memory."""
        needed = self.front + -(-(each // PAGE) // self.together)
        sixteen = 4 * self.num_kv_heads * self.head_size
        return blocks * each // needed, blocks * self.real_page_size_bytes // sixteen

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        """The width of a row."""
        return self.front + int(-(-max_len // self.block_size))

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Bytes of a request of the longest length."""
        return int(
            self.max_num_blocks_per_req(vllm_config, vllm_config.model_config.max_model_len) * self.page_size_bytes
        )

    @classmethod
    def merge(cls, specs: Sequence["RowSpec"]) -> "RowSpec":
        """One spec of layers that are alike; the base class would drop the fields of this one.

        AssertionError where they differ, which is how vLLM asks whether they do.
        """
        if any(spec != specs[0] for spec in specs):
            raise AssertionError(f"layers of one KV cache group differ: {specs}")
        return replace(specs[0])


class _Pages:
    """The base class's view of a request: its residual is taken out of its row, then put back."""

    def __init__(self, manager: "RowManager", request: str) -> None:
        self.manager, self.request, self.front = manager, request, list[Any]()

    def __enter__(self) -> None:
        count = self.manager.fronts.get(self.request, 0)
        if count:
            row = self.manager.req_to_blocks[self.request]
            self.front = row[:count]
            del row[:count]

    def __exit__(self, *error: object) -> None:
        if self.front:
            self.manager.req_to_blocks[self.request][:0] = self.front


class RowManager(FullAttentionManager):  # type: ignore[misc]
    """Rows with the residual in front. The base class sees pages only, so that its body may differ by version.

    fronts: how many residual blocks a request has. A row of fresh prefix hits exists before its residual does, so that
    it cannot be told from the row.
    """

    supports_fine_grained_hash_lookup = False  # a hit inside a page would need its 16-bit tokens

    def __init__(self, spec: RowSpec, *args: Any, **kw: Any) -> None:
        super().__init__(spec, *args, **kw)
        self.spec = spec
        self.fronts: dict[str, int] = {}
        if self.block_size != PAGE * spec.together:
            raise ValueError(
                f"a block has {self.block_size} tokens, and anybit's KV cache wants {PAGE * spec.together}: context "
                "parallelism is not supported, leave out --decode-context-parallel-size and its like"
            )
        packed, plain = spec.tokens_that_fit(self.block_pool.num_gpu_blocks - 1, _EACH)  # but the null block
        _logger.info(
            "anybit: the KV cache is %s: %d tokens fit in requests of %d, and in 16 bits %d would",
            spec.format, packed, _EACH, plain,
        )  # fmt: skip

    def _missing(self, request: str, tokens: int, hits: bool) -> int:
        """Residual blocks that a request of so many tokens still lacks."""
        front = self.spec.front
        wanted = front if hits or tokens >= PAGE else min(front, -(-tokens // self.spec.slots))
        return int(max(wanted - self.fronts.get(request, 0), 0))

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Any, *args: Any, **kw: Any
    ) -> int:
        """Blocks that a request still needs for so many tokens."""
        pages = num_tokens // PAGE * PAGE
        with _Pages(self, request_id):
            found = super().get_num_blocks_to_allocate(request_id, pages, new_computed_blocks, *args, **kw)
        return int(found + self._missing(request_id, num_tokens, bool(new_computed_blocks)))

    def allocate_external_computed_blocks(self, *args: Any, **kw: Any) -> Any:
        """Refused: blocks that a KV connector brings have no residual."""
        raise NotImplementedError(
            "anybit's KV cache inside vLLM has no KV connectors, which know nothing of its residual: leave out "
            "--kv-transfer-config"
        )

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kw: Any) -> Any:
        """Give a request the blocks of so many tokens; returns the new ones, residual first."""
        have = self.fronts.get(request_id, 0)
        with _Pages(self, request_id):
            missing = self._missing(request_id, num_tokens, bool(self.req_to_blocks[request_id]))
            new = super().allocate_new_blocks(request_id, num_tokens // PAGE * PAGE, *args, **kw)
        front = self.block_pool.get_new_blocks(missing) if missing else []
        self.req_to_blocks[request_id][have:have] = front
        self.fronts[request_id] = have + missing
        return front + new

    def cache_blocks(self, request: Any, *args: Any, **kw: Any) -> None:
        """Publish full pages."""
        with _Pages(self, request.request_id):
            super().cache_blocks(request, *args, **kw)

    def pop_blocks_for_free(self, request_id: str) -> Any:
        """Forget a request; returns its blocks."""
        self.fronts.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def _cache_partial_tail_block(self, *args: Any, **kw: Any) -> None:
        return

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """0: no cascade attention, since rows begin with what is not shared."""
        return 0

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """False: block i is not tokens 128 i, which keeps connectors away."""
        return False


def register() -> None:
    """Make vLLM's block managers know these rows; may be called again."""
    KVCacheSpecRegistry._ensure_registered()  # else the built-in specs would never be registered
    KVCacheSpecRegistry.register(RowSpec, RowManager, uniform_type_base_spec=FullAttentionSpec)
