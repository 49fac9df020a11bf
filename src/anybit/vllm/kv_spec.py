"""anybit's KV cache in vLLM's block manager: a cache spec and a manager whose block-table rows start with the residual.

One block of vLLM is one page of 128 packed tokens (several pages in hybrid models), and a request's block-table row is
[residual blocks | pages]; ``kernels.attention.kv_rows`` documents their layout. Only full pages get a block, and until
the first one a request has only as many residual blocks as its tokens need, so rows only grow at the end; a request
that starts with a prefix-cache hit gets all residual blocks at once.
Residual blocks are ordinary blocks of the pool that are never hashed: the scheduler counts them, preemption frees them,
and prefix hits are whole pages. The rest of vLLM is unaware of them.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NoReturn

from vllm.config import VllmConfig
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from anybit.ops.kv_rows import PAGE, RowLayout

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

_logger = logging.getLogger("vllm.anybit")
_EACH = 8192
"""Request length (tokens) assumed by the log line that says how many tokens fit."""
_BY_CONTENT = any(f.name == "state_content_bytes" for f in fields(AttentionSpec))  # from 0.32 on


@dataclass(frozen=True, kw_only=True)
class RowSpec(FullAttentionSpec):  # type: ignore[misc]
    """A layer's KV cache spec.

    page_bytes: bytes of a page, per KV head.  together: pages per block.  front, slots: residual blocks per row, and
    tokens per residual block.  format: the KV format's name.
    """

    page_bytes: int = 0
    together: int = 1
    front: int = 0
    slots: int = 0
    format: str = ""

    @classmethod
    def of(cls, spec: FullAttentionSpec, rows: RowLayout) -> "RowSpec":
        """Convert the spec of a 16-bit cache."""
        known = {f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec) if f.init and hasattr(spec, f.name)}
        size = rows.layout.page_bytes
        known["sliding_window"] = None  # rows keep all tokens, even in models whose layers all have a window
        known |= {"page_bytes": size, "together": rows.together, "format": str(rows.layout.format)}
        known |= {"front": rows.front // rows.together, "slots": rows.slots * rows.together}
        if _BY_CONTENT:
            known |= {"state_content_bytes": size, "tokens_per_state": PAGE}
        return cls(**known)

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of a block, for all KV heads."""
        return int(self.num_kv_heads * self.page_bytes * self.block_size // PAGE)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """The same, by the name that newer versions of vLLM use."""
        return self.real_page_size_bytes

    def tokens_that_fit(self, blocks: int, each: int) -> tuple[int, int]:
        """(tokens that ``blocks`` hold in requests of ``each`` tokens, tokens in the same memory at 16 bits)."""
        needed = self.front + -(-(each // PAGE) // self.together)
        sixteen = 4 * self.num_kv_heads * self.head_size
        return blocks * each // needed, blocks * self.real_page_size_bytes // sixteen

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """The width of a block-table row."""
        return self.front + int(-(-max_len // self.block_size))

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of a request of the maximum length."""
        blocks = self.max_num_blocks_per_req(vllm_config, vllm_config.model_config.max_model_len)
        return int(blocks * self.page_size_bytes)

    @classmethod
    def merge(cls, specs: Sequence["RowSpec"]) -> "RowSpec":
        """Merge equal specs (the base class would drop this class's fields).

        Raises AssertionError if they differ: vLLM relies on that to find out whether they can be merged.
        """
        if any(spec != specs[0] for spec in specs):
            raise AssertionError(f"layers of one KV cache group differ: {specs}")
        return replace(specs[0])


class RowManager(FullAttentionManager):  # type: ignore[misc]
    """Manages rows with the residual in front. The base class sees only pages, so it may change between versions.

    fronts: residual blocks per request. A row does not tell: one made from prefix hits exists before its residual.
    """

    supports_fine_grained_hash_lookup = False  # a hit inside a page would need its tokens in 16 bits

    def __init__(self, spec: RowSpec, *args: object, **kw: object) -> None:
        super().__init__(spec, *args, **kw)
        self.spec = spec
        self.fronts: dict[str, int] = {}
        if self.block_size != PAGE * spec.together:
            raise ValueError(
                f"a block has {self.block_size} tokens, and anybit's KV cache needs {PAGE * spec.together}: context "
                "parallelism is not supported, leave out --decode-context-parallel-size and the like"
            )
        packed, plain = spec.tokens_that_fit(self.block_pool.num_gpu_blocks - 1, _EACH)  # without the null block
        _logger.info(
            "anybit: the KV cache is %s: %d tokens fit in requests of %d (in 16 bits: %d tokens)",
            spec.format, packed, _EACH, plain,
        )  # fmt: skip

    @contextmanager
    def _pages(self, request: str) -> Iterator[None]:
        """Take a request's residual blocks out of its row, so that the base class sees only pages."""
        count = self.fronts.get(request, 0)
        front = self.req_to_blocks[request][:count] if count else []
        if count:
            del self.req_to_blocks[request][:count]
        try:
            yield
        finally:
            if front:
                self.req_to_blocks[request][:0] = front

    def _missing(self, request: str, tokens: int, hits: bool) -> int:
        """Residual blocks still to allocate for a request of ``tokens`` tokens."""
        front = self.spec.front
        wanted = front if hits or tokens >= PAGE else min(front, -(-tokens // self.spec.slots))
        return int(max(wanted - self.fronts.get(request, 0), 0))

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: "list[KVCacheBlock]", *args: object, **kw: object
    ) -> int:
        """Blocks still to allocate for a request of ``num_tokens`` tokens, residual included."""
        pages = num_tokens // PAGE * PAGE
        with self._pages(request_id):
            found = super().get_num_blocks_to_allocate(request_id, pages, new_computed_blocks, *args, **kw)
        return int(found + self._missing(request_id, num_tokens, bool(new_computed_blocks)))

    def allocate_external_computed_blocks(self, *args: object, **kw: object) -> NoReturn:
        """Not supported: blocks from a KV connector have no residual."""
        raise NotImplementedError(
            "anybit's KV cache inside vLLM does not support KV connectors, which do not transfer its residual: leave "
            "out --kv-transfer-config"
        )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, *args: object, **kw: object
    ) -> "list[KVCacheBlock]":
        """Allocate the missing blocks of a request of ``num_tokens`` tokens. Returns them, residual first."""
        have = self.fronts.get(request_id, 0)
        with self._pages(request_id):
            missing = self._missing(request_id, num_tokens, bool(self.req_to_blocks[request_id]))
            new = super().allocate_new_blocks(request_id, num_tokens // PAGE * PAGE, *args, **kw)
        front = self.block_pool.get_new_blocks(missing) if missing else []
        self.req_to_blocks[request_id][have:have] = front
        self.fronts[request_id] = have + missing
        found: list[KVCacheBlock] = front + new
        return found

    def cache_blocks(self, request: "Request", *args: object, **kw: object) -> None:
        """Hash full pages, for prefix caching."""
        with self._pages(request.request_id):
            super().cache_blocks(request, *args, **kw)

    def pop_blocks_for_free(self, request_id: str) -> "list[KVCacheBlock]":
        """Remove a request and return its blocks."""
        self.fronts.pop(request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        return blocks

    def _cache_partial_tail_block(self, *args: object, **kw: object) -> None:
        return

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """0, which disables cascade attention: rows start with blocks that are not shared."""
        return 0

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """False, which rules out KV connectors: block i of a row does not start at token 128 * i."""
        return False


def register() -> None:
    """Register spec and manager with vLLM; idempotent."""
    KVCacheSpecRegistry._ensure_registered()  # otherwise the built-in specs would never be registered
    KVCacheSpecRegistry.register(RowSpec, RowManager, uniform_type_base_spec=FullAttentionSpec)
