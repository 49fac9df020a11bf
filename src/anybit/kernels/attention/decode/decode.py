"""Decode attention over a paged, quantized KV cache: the host side of ``decode.cuh``.

The grid does not depend on sequence lengths, which the kernel reads on the device.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import Kernel
from anybit.kernels.attention.kv_page import BlockConfig, PageLayout, constants

MOST_QUERIES = 16
_MOST_WARPS = 16  # the merge has a lane for each of a block's 2 * warps segments
_MOST_PARTS, _MOST_BLOCKS = 32, 8  # the merge of a cluster has a lane for each warp's part
_SHORT, _SHORT_16, _FEW_PAIRS = 1024, 4096, 8
"""Capacities (packed, 16 bits) and pairs to which a cluster for each pair was measured, and faster (H200)."""


@dataclass(frozen=True)
class Problem:
    """Attention of ``queries`` new tokens of each of ``batch`` sequences with ``heads`` query heads on ``kv_heads``.

    layout: of the pages.  ring, window: of the residual, in tokens.  capacity: the most tokens of a sequence.
    bf16: queries, output and residual are bfloat16, else float16.  sliding, softcap, alibi: whether the model uses
    them.  split: 0 for an even split-KV, or the tokens per split; then results are bitwise independent of the batch.
    front, slots: with the residual in an external pool (``kv_rows``): residual blocks per row, and tokens of each; a
    sequence then brings up to ``queries`` tokens.  plain: 0, or the page size in tokens of an unquantized cache without
    a residual (vLLM's for FlashAttention); layout is then kv16's.
    """

    layout: PageLayout
    batch: int
    heads: int
    kv_heads: int
    queries: int = 1
    ring: int = 160
    window: int = 128
    capacity: int = 1 << 20
    bf16: bool = False
    sliding: bool = False
    softcap: bool = False
    alibi: bool = False
    split: int = 0
    front: int = 0
    slots: int = 0
    plain: int = 0

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Queries per KV head: rows of its attention matrix."""
        return self.group * self.queries

    @property
    def parts(self) -> int:
        """Parts of a sequence that are scheduled separately; see decode_schedule.cuh."""
        return 2 if self.front and self.queries > 1 else 1


@dataclass(frozen=True)
class Config(BlockConfig):
    """A kernel config. ``decode_block.cuh`` explains its constants.

    l2_early, l2_late: packed blocks that a warp prefetches into L2 beyond its pipeline, while the previous kernel still
    runs, and after it has ended.  merge_warps: warps that share a row of the merge.  pair_blocks: 0, or the blocks of a
    cluster for each pair (decode_pair.cuh).
    """

    windowed: bool
    softcap: bool
    alibi: bool
    residual_tokens: int
    group: int
    queries: int
    query_tiles: int
    paired: bool
    rows: int
    query_chunks: int
    warps: int
    stages: int
    min_blocks_per_sm: int
    split: int
    bulk: bool
    keep_in_l2: bool
    checked: bool
    l2_early: int = 0
    l2_late: int = 0
    merge_warps: int = 1
    pair_blocks: int = 0
    plain: bool = False


class Params(jit.Params, header="attention/decode/decode_schedule.cuh"):
    """The arguments of one launch."""

    page_stride = token_stride = head_stride = 0
    starts = values = None


def residual_tokens(layout: PageLayout) -> int:
    """Tokens per chunk of the residual: as many as fit a slot of half a block; 16 or 32."""
    room = max(layout.key_bytes, layout.value_bytes)
    tokens = 16
    while tokens < 32 and 2 * tokens * layout.head_dim * 2 <= room:
        tokens *= 2
    return tokens


def slot_bytes(config: "Config", layout: PageLayout) -> int:
    """Bytes per pipeline slot of a warp: half a block, or half a chunk of the residual or of plain pages."""
    chunk = config.residual_tokens * (2 * layout.head_dim + (16 if config.plain else 0))
    largest = chunk if config.plain else max(layout.key_bytes, layout.value_bytes, chunk)
    return -(-largest // 128) * 128


def shared_bytes(config: Config, layout: PageLayout) -> int:
    """Dynamic shared memory per block: pipelines, first segments, states, owners, barriers, plan; with a cluster for
    each pair pipelines, what other warps send, barriers.
    """
    if config.pair_blocks:
        rings = config.warps * config.stages * slot_bytes(config, layout)
        tasks, parts = config.rows * config.merge_warps, config.pair_blocks * config.warps
        task = parts * (config.head_dim // config.merge_warps * 4 + 8)
        return rings + -(-tasks // config.pair_blocks) * task + (config.warps * config.stages + 1) * 8
    segments = config.warps * (config.stages * slot_bytes(config, layout) + config.rows * config.head_dim * 4)
    owners = segments + config.warps * 2 * config.rows * 8
    barriers = -(-(owners + config.warps * 2 * 4) // 8) * 8
    return barriers + config.warps * config.stages * 8 + 48


def make(
    problem: Problem, device: Device, warps: int, stages: int, *, min_blocks_per_sm: int = 1,
    paired: bool | None = None, checked: bool = False, bulk: bool = True, chunk: int = 0,
) -> Config:  # fmt: skip
    """The config of a problem with these warps and stages. paired: None, chunk: 0 for automatic.

    bulk: use bulk copies if the device has them.  chunk: tokens per chunk of the residual or of plain pages.
    """
    layout, format = problem.layout, problem.layout.format
    # Two query tiles share the work of dequantization, if registers suffice.
    roomy = layout.block <= 64 and layout.head_dim <= 128 and not format.float4
    query_tiles = 2 if problem.rows > 8 and roomy else 1
    # Up to four queries take two of the MMA's eight columns each, and keys use integer tensor cores.
    pairs = problem.rows <= 4 and format.key_bits in (2, 4) and layout.head_dim <= 128
    paired = format.float4 or (pairs if paired is None else paired)
    rows = min(problem.rows, (4 if paired else 8) * query_tiles)
    sizes = constants(layout, problem.bf16, problem.front, problem.slots)
    sizes |= {name: getattr(problem, name) for name in ("softcap", "alibi", "group", "queries")}
    if problem.plain:
        sizes |= {"page": problem.plain}
    return Config(
        **sizes,
        windowed=problem.sliding,
        residual_tokens=chunk or residual_tokens(layout),
        query_tiles=query_tiles,
        paired=paired,
        rows=rows,
        query_chunks=-(-problem.rows // rows),
        warps=warps,
        stages=stages,
        min_blocks_per_sm=min_blocks_per_sm,
        split=problem.split // layout.block,
        bulk=bulk and device.capability >= 90,
        keep_in_l2=problem.rows > rows,
        checked=checked,
        plain=problem.plain > 0,
    )


def why_not(problem: Problem, config: Config, device: Device) -> str | None:
    """Why a config cannot run a problem on a device, in a sentence; None if it can."""
    if device.capability < 80:
        return f"{device.name} is {device.arch}, and decode attention needs sm_80 or later"
    if problem.layout.format.float4 and device.arch != "sm_120a":
        return f"4-bit floats need the tensor cores of sm_120, and {device.name} is {device.arch}: use kv4"
    if problem.heads % problem.kv_heads:
        return f"{problem.heads} query heads cannot share {problem.kv_heads} KV heads evenly"
    if not 1 <= problem.queries <= MOST_QUERIES:
        return f"a decode step brings 1 to {MOST_QUERIES} tokens, not {problem.queries}"
    if problem.plain:
        format = problem.layout.format
        if problem.split or problem.front or format.key_bits + format.value_bits != 32:
            return "unquantized pages need the layout of kv16, no residual and no fixed split"
        if config.residual_tokens not in (16, 32):
            return f"a chunk of unquantized pages has 16 or 32 tokens, not {config.residual_tokens}"
    elif problem.ring < problem.window - 1 + problem.queries:
        return (
            f"{problem.queries} new tokens need a residual ring of {problem.window - 1 + problem.queries} tokens, and "
            f"this one has {problem.ring}: make the cache with more slack"
        )
    elif problem.ring % config.residual_tokens or problem.window % config.residual_tokens:
        return (
            f"the residual (ring {problem.ring}, window {problem.window}) must be cut evenly into chunks of "
            f"{config.residual_tokens} tokens"
        )
    if problem.front and (problem.slots % config.residual_tokens or problem.split):
        return (
            f"with the residual in an external pool, residual blocks must hold a multiple of {config.residual_tokens} "
            f"tokens (not {problem.slots}), and splits cannot be fixed"
        )
    if problem.split % config.block or config.split != problem.split // config.block:
        return f"a fixed split must be a multiple of the {config.block} tokens of a block, not {problem.split}"
    if not 2 <= config.warps <= _MOST_WARPS:
        return f"a block has 2 to {_MOST_WARPS} warps, not {config.warps}"
    if config.merge_warps > 1 and (config.split or config.head_dim % (32 * config.merge_warps)):
        where = "a fixed split merges within its loop" if config.split else f"heads have {config.head_dim} channels"
        return f"{config.merge_warps} warps cannot share a row of the merge, since {where}: use merge_warps = 1"
    if config.pair_blocks and (config.split or device.capability < 90):
        return "a cluster for each pair needs sm_90 or later and no fixed split: use pair_blocks = 0"
    if config.pair_blocks * config.warps > _MOST_PARTS or config.pair_blocks > _MOST_BLOCKS:
        return (
            f"a cluster has at most {_MOST_BLOCKS} blocks and {_MOST_PARTS} warps, not {config.pair_blocks} blocks of "
            f"{config.warps} warps"
        )
    ring, part = config.stages * slot_bytes(config, problem.layout), config.rows * (4 * config.head_dim + 8)
    if config.pair_blocks and part > ring:
        return f"a warp's part of {part} bytes does not fit its pipeline of {ring}: use pair_blocks = 0"
    if config.stages < 2:
        return f"the pipeline needs at least 2 stages, one for keys and one for values, not {config.stages}"
    if config.bulk and device.capability < 90:
        return f"bulk copies need sm_90 or later, and {device.name} is {device.arch}"
    needed = shared_bytes(config, problem.layout)
    available = device.shared_bytes // config.min_blocks_per_sm - (1024 if config.min_blocks_per_sm > 1 else 0)
    if needed > available:
        return f"{config.warps} warps with {config.stages} stages need {needed} bytes of shared memory of {available}"
    items = problem.batch * problem.parts * problem.kv_heads * config.query_chunks
    packed = 0 if problem.plain else problem.capacity // config.block
    items *= packed + (problem.capacity if problem.plain else problem.ring) // config.residual_tokens + 1
    if items * device.sms * config.min_blocks_per_sm >= 1 << 32:
        return (
            f"{problem.batch} sequences of up to {problem.capacity} tokens are {items} items of work, too many for the "
            "32-bit scheduler: run fewer sequences at a time, or shorter ones"
        )
    return None


@cache
def default(problem: Problem, device: Device, checked: bool = False) -> Config:
    """The built-in config, from measurements on an H200. Raises KernelError with the reason if there is none."""
    format, pairs = problem.layout.format, problem.batch * problem.kv_heads
    most = _SHORT_16 if format.key_bits == format.value_bits == 16 else _SHORT
    if problem.capacity <= most and pairs <= _FEW_PAIRS and not (problem.plain or problem.front or format.float4):
        clusters = replace(make(problem, device, 8, 2, checked=checked), pair_blocks=4)
        if why_not(problem, clusters, device) is None:
            return clusters
    return on_a_line(problem, device, checked)


@cache
def on_a_line(problem: Problem, device: Device, checked: bool = False) -> Config:
    """The built-in config of one wave of blocks that share all items; KernelError as ``default``."""
    layout = problem.layout
    bits = layout.format.key_bits + layout.format.value_bits
    wide = problem.rows > 8 or layout.head_dim > 128 or layout.chunk < 64
    pairs = problem.batch * problem.kv_heads
    many = pairs > device.sms  # a block then processes and merges several pairs
    paired = make(problem, device, 2, 2).paired and not wide
    first: tuple[tuple[int, int, int], ...] = ()  # warps, stages, blocks per SM
    if paired and bits == 4:
        # Fixed splits merge within the loop, which takes too many registers for two blocks.
        one = many or not layout.by_channel or problem.split
        first = ((12, 2, 1),) if one else ((8, 2, 2), (12, 2, 1))
    elif paired and bits <= 8:
        first = ((8, 2, 1),)
    elif bits <= 4 and layout.by_channel and not wide:
        first = ((12, 2, 1),)
    rest = ((8, 3, 1), (8, 2, 1), (6, 2, 1), (4, 3, 1), (4, 2, 1), (3, 2, 1), (2, 2, 1))
    reason: str | None = why_not(problem, make(problem, device, 2, 2), device)
    if reason is not None:  # for any config
        raise KernelError(reason)
    chunks: tuple[int, ...] = (0,)
    if problem.plain and many:  # small chunks balance better, but are more items of work, which has a limit
        first, chunks = ((12, 3, 1),), (16, 32)
    bulk = many or not problem.plain  # with few warps copying, smaller copies finish sooner
    for chunk, (warps, stages, min_blocks_per_sm) in product(chunks, (*first, *rest)):
        asks = int(not wide and bits <= 8 and not layout.format.float4 and min_blocks_per_sm == 1)
        # With few pairs in many splits, prefetch more only after the previous kernel has ended.
        early = int(asks and bits > 4 and 4 * pairs > device.sms)
        config = make(
            problem, device, warps, stages,
            min_blocks_per_sm=min_blocks_per_sm, checked=checked, bulk=bulk, chunk=chunk,
        )  # fmt: skip
        config = replace(
            config, l2_early=early, l2_late=asks - early, merge_warps=_merge_warps(problem, config, device)
        )
        reason = why_not(problem, config, device)
        if reason is None:
            return config
    raise KernelError(str(reason))


def _merge_warps(problem: Problem, config: Config, device: Device) -> int:
    """Warps per row of the merge: two if a pair has so many parts that one warp would need two rounds of loads."""
    pairs, round_of_loads = problem.batch * problem.kv_heads * config.query_chunks, 18  # see decode_merge.cuh
    many = device.sms * config.min_blocks_per_sm > round_of_loads * pairs and not problem.split
    return 2 if many and 2 * config.rows <= config.warps and problem.layout.head_dim % 64 == 0 else 1


def grid(problem: Problem, config: Config, device: Device) -> tuple[int, int, int]:
    """Blocks: one wave, independent of lengths; or a cluster for each pair."""
    if config.pair_blocks:
        return (problem.batch * problem.parts * problem.kv_heads * config.query_chunks * config.pair_blocks, 1, 1)
    return (device.sms * config.min_blocks_per_sm, 1, 1)


def workspace(problem: Problem, config: Config, device: Device) -> tuple[int, int, int]:
    """Elements of ``partial``, ``partial_state`` (float32) and ``arrivals`` (int32, zero before the first use)."""
    pairs = problem.batch * problem.parts * problem.kv_heads * config.query_chunks
    parts = 2 * grid(problem, config, device)[0]
    if config.split:
        items = problem.capacity // config.block + problem.ring // config.residual_tokens + 1
        parts = pairs * -(-items // config.split)
    return (
        parts * config.rows * config.head_dim,
        parts * config.rows * 2 * config.merge_warps,
        pairs * config.rows * config.merge_warps,
    )


@cache
def kernel(config: Config, layout: PageLayout) -> Kernel:
    """The kernel of a config."""
    shared, cluster = shared_bytes(config, layout), config.pair_blocks or 1
    return Kernel("attention/decode/decode.cuh", "decode::kernel", config, Params, 32 * config.warps, shared, cluster)


def log2_scale(scale: float) -> float:
    """Convert a logit scale from base e to base 2."""
    return scale * math.log2(math.e)
