"""What a config of the bitwise GEMM is, which ones can do a problem (`why_not`), and what they need of a GPU."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from anybit.device import Device
from anybit.kernels.common.types import Code, Output
from anybit.kernels.gemm import bitplane_layout
from anybit.scheme import ActivationFormat, WeightFormat


class Path(Enum):
    """Which kernel: tiles of 128 weights for many tokens, or of 64 with k shared out, for few.

    once: small tiles whose planes all fit shared memory, so that there are no rings.
    """

    large = "large"
    small = "small"
    once = "once"


class Turns(Enum):
    """How the two warpgroups of a large tile take turns; staggered: not at all, but the second starts later."""

    none = "none"
    diagonals = "diagonals"
    tiles = "tiles"
    staggered = "staggered"


class Walk(Enum):
    """Which operand of a small tile stands on wgmma's A side, 64 rows, and is walked plane by plane."""

    weights = "weights"
    tokens = "tokens"


@dataclass(frozen=True)
class Problem:
    """Y[m, n] = X[m, k] W[n, k]^T for operands in bit planes."""

    m: int
    n: int
    k: int
    weights: WeightFormat
    activations: ActivationFormat
    output: Output
    device: Device


@dataclass(frozen=True)
class Config:
    """How. ``tokens`` of a tile; ``short_sums``: no V reaches 2^22; ``blocks`` that registers must allow a
    multiprocessor; the rest belongs to one path.

    large: chunks of weights and of activations that shared memory holds (``weight_groups``, ``activation_groups``),
    tokens that are staged at once on their way out (``slab``) and how many such ``buffers`` there are, whether they
    leave by tensor map (``tensor``: rows of Y start on 16 bytes and end so), how the two warpgroups take turns,
    whether a block keeps its activations while it goes through weights (``resident``), the tokens of the tiles into
    which those are cut that whole rounds leave (``tail``, 0: none is cut), whether results leave L2 first
    (``streamed``), the blocks (``cluster``, with ``multicast``) that load their tokens for each other, and the pieces
    in which a block's first plane of activations arrives and is multiplied (``starts``).
    small: the operand that is walked (``walk``), its planes in flight (``slots``), the chunks of the other in shared
    memory (``stages``) and in a walk (``span``), the columns of the product (``stacked``, planes side by side), the
    warpgroups of a block (``groups``) that share k, or the columns of the tile (``by_columns``), or the blocks
    (``cluster``) that share k or (``multicast``) load their tokens for each other. ``tokens`` are the columns of the
    tile, which for Walk.tokens are weights.
    once: as small, with ``stages`` for all chunks of k; the chunks whose weights are asked for before the kernel ahead
    has ended (``early``), the ``sets`` of sums (planes so far apart share one), ``reserve`` bytes of shared memory that
    keep a multiprocessor from taking more blocks than are wanted, idle blocks that fill the last round (``even``), and
    whether all threads copy the tokens, 16 bytes each, in place of bulk copies (``threads_copy``).
    """

    path: Path
    weight_bits: int
    activation_bits: int
    weight_code: Code
    activation_code: Code
    output: Output
    tokens: int
    short_sums: bool = False
    blocks: int = 1
    weight_groups: int = 0
    activation_groups: int = 0
    slab: int = 32
    buffers: int = 3
    tensor: bool = False
    turns: Turns = Turns.diagonals
    resident: bool = False
    tail: int = 0
    streamed: bool = False
    walk: Walk = Walk.weights
    slots: int = 0
    stages: int = 0
    span: int = 0
    groups: int = 1
    by_columns: bool = False
    cluster: int = 1
    multicast: bool = False
    stacked: int = 0
    reserve: int = 0
    even: bool = False
    sets: int = 1
    early: int = 0
    threads_copy: bool = False
    starts: int = 1

    @property
    def threads(self) -> int:
        """Threads a block: two warpgroups that multiply, or one, and a warpgroup or a warp, of which a thread loads."""
        if self.path is Path.once:
            return 128
        return 384 if self.path is Path.large else 128 * self.groups + 32


ROWS = 128
SMALL_ROWS = 64
_PLANE_N = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # what wgmma takes
_SLOT_ROW = bitplane_layout.ROW_BYTES


def why_not(problem: Problem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot do ``problem``, in a sentence; None if it can."""
    asked = (problem.m, problem.n, problem.k, problem.weights, problem.activations, problem.device)
    reason = bitplane_layout.why_not_product(*asked, first=90)
    if reason is not None:
        return reason
    return None if config is None else _why_not_config(problem, config)


def why_not_facts(problem: Problem, config: Any) -> str | None:
    """Why what a config of bit planes repeats of its problem is not so, in a sentence; None if it is."""
    if (config.weight_bits, config.activation_bits) != (problem.weights.bits, problem.activations.bits):
        return "the config is for other widths"
    if (config.weight_code.value, config.activation_code.value) != (problem.weights.code, problem.activations.code):
        return "the config is for other codes"
    if config.output is not problem.output:
        return f"the config writes {config.output.value}, and {problem.output.value} is asked for"
    if config.short_sums and not short_sums(problem):
        return f"sums of K = {problem.k} may reach 2^22, and the config's are shorter"
    return None


def _why_not_config(problem: Problem, config: Config) -> str | None:
    reason = why_not_facts(problem, config)
    if reason is not None:
        return reason
    if config.tokens % 8:
        return f"a tile of {config.tokens} tokens is not made of eights"
    reason = _WHY_NOT[config.path](problem, config)
    if reason is not None:
        return reason
    needed = shared_bytes(config)
    if needed > problem.device.shared_bytes:
        return (
            f"{needed} bytes of shared memory are more than the {problem.device.shared_bytes} that a block of "
            f"{problem.device.arch} can have"
        )
    return None


def short_sums(problem: Problem) -> bool:
    """Whether no integer result reaches 2^22, below which an addition makes a float of it."""
    return bitplane_layout.largest_sum(problem.k, problem.weights, problem.activations) < 2**22


def _why_not_large(problem: Problem, config: Config) -> str | None:
    p, q, chunks = config.weight_bits, config.activation_bits, bitplane_layout.chunks(problem.k)
    if config.tokens not in (64, 128, 256):
        return f"large tiles have 64, 128 or 256 tokens, not {config.tokens}"
    if config.slab not in (32, 64, 128) or config.slab > config.tokens:
        return f"32, 64 or 128 of a tile's {config.tokens} tokens are staged at once, not {config.slab}"
    if not 2 <= config.buffers <= 8:
        return f"results are staged in 2 to 8 buffers, not {config.buffers}"
    if config.cluster not in (1, 2, 4) or config.multicast != (config.cluster > 1):
        return f"1, 2 or 4 blocks load tokens for each other, not {config.cluster}"
    reason = _why_not_pieces(config)
    if reason is not None:
        return reason
    if config.resident and config.multicast:
        return "blocks that keep their tokens do not load them for each other"
    if config.streamed and not config.tensor:
        return "results that leave L2 first leave by tensor map"
    if config.tail and (config.resident or config.tail not in (64, 128) or config.tail >= config.tokens):
        return f"streaming blocks cut their last tiles of {config.tokens} tokens into 64 or 128, not {config.tail}"
    if config.tensor and not _narrow(config):
        return f"tensor maps store 16-bit results, not {config.output.value}"
    if config.tensor and problem.n % 8:
        return f"tensor maps store whole sixteen bytes, and rows of {problem.n} results end within them"
    for side, bits, groups in (("weight", p, config.weight_groups), ("activation", q, config.activation_groups)):
        if groups < 1 or groups * bits < 2:
            return f"loading ahead needs room for two planes, and {groups} chunks of {bits} {side} planes are fewer"
    if config.resident and config.activation_groups != chunks:
        return f"resident activations are all {chunks} chunks of k, and the config holds {config.activation_groups}"
    if config.turns is Turns.tiles and min(config.weight_groups, config.activation_groups) < chunks:
        return f"turns tile by tile need all {chunks} chunks of k in shared memory, for weights and activations"
    return None


def _why_not_pieces(config: Config) -> str | None:
    """Of a first plane in pieces."""
    if config.starts == 1:
        return None
    # Elsewhere the assembler finds too few registers for products of two shapes, and waits after each: tests/compile
    # sees it, and they took 1.2 to 2 us longer (1024 x 4096 x 4096).
    rings = config.weight_groups, config.activation_groups, config.slab, config.buffers
    codes = config.weight_code, config.activation_code
    if (config.weight_bits, config.activation_bits, config.tokens) != (2, 2, 256) or codes != (Code.sym, Code.sym):
        return "only tiles of 256 tokens of signed 2-bit codes begin in pieces"
    if config.starts != 2 or rings != (2, 2, 32, 3) or not config.tensor:
        return f"tiles begin in 2 pieces with rings of 2 chunks and 3 buffers of 32, not {config.starts} with {rings}"
    if config.resident or config.multicast or config.tail or config.turns is not Turns.none or config.streamed:
        return "tiles that begin in pieces are whole, of one block, and their warpgroups take no turns"
    return None


def _why_not_small(problem: Problem, config: Config) -> str | None:
    beside = _beside(config)
    parts = config.groups if config.by_columns else 1
    needed = beside * config.tokens // parts
    if config.tokens % (8 * parts) or config.stacked not in _PLANE_N or config.stacked < needed:
        return f"{beside} planes of {config.tokens} rows are {needed} columns, and the most is {_PLANE_N[-1]}"
    if not 2 <= config.slots <= 32:
        return f"loading ahead needs slots for two planes, and a lane of the loading warp for each, not {config.slots}"
    split = blocks_sharing_k(config)
    rounds = -(-bitplane_layout.chunks(problem.k) // split)
    if not 1 <= config.span <= config.stages or (config.span < rounds and config.stages < 2 * config.span):
        return f"walks of {config.span} chunks of {rounds} need as many slots, or twice as many, not {config.stages}"
    if config.groups not in (1, 2, 4) or config.groups > 1 < split:
        return f"k is shared by 1, 2 or 4 warpgroups or by blocks, not by {config.groups} of each of {split}"
    walked = config.weight_bits if config.walk is Walk.weights else config.activation_bits
    once = config.span >= rounds and config.slots >= walked * rounds
    if config.groups > 1 and not config.by_columns and not once:
        # A warpgroup that skips the others' chunks tells one use of a slot from the next but one by nothing: it hung.
        return f"warpgroups that share k need a slot for each of {walked} planes of {rounds} chunks, not {config.slots}"
    if config.multicast:
        reason = _why_not_multicast(problem, config, rounds)
        if reason is not None:
            return reason
    room = (config.slots * SMALL_ROWS + config.stages * config.stacked) * _SLOT_ROW
    if not config.by_columns and config.groups * config.tokens * 256 > room:
        return f"the sums of {config.groups} warpgroups do not fit over {config.slots} slots and {config.stages} chunks"
    if config.tokens // 2 % config.groups:
        return f"the {config.tokens // 2} sums of a thread are not shared out by {config.groups} warpgroups"
    registers = 65536 // (128 * -(-config.blocks * config.threads // 128)) // 8 * 8  # warps lie in four partitions
    if config.stacked * 9 // 16 + 36 > registers:
        return f"{config.stacked // 2} sums are too many for the {registers} registers of each of so many threads"
    if config.cluster not in (1, 2, 4, 8) or config.tokens // 2 % split:
        return f"the {config.tokens // 2} sums of a thread are not shared out by {config.cluster} blocks"
    return None


def _why_not_once(problem: Problem, config: Config) -> str | None:
    chunks, needed = bitplane_layout.chunks(problem.k), _beside(config) * config.tokens
    if config.stacked not in _PLANE_N or config.stacked < needed:
        return f"{_beside(config)} planes of {config.tokens} rows are {needed} columns, and the most is {_PLANE_N[-1]}"
    if config.reserve < 0 or config.reserve % 16:
        return f"shared memory is kept in sixteens of bytes, not {config.reserve}"
    if config.stages != chunks or not 0 <= config.early <= chunks:
        return f"all {chunks} chunks of k lie in shared memory, and the config is for {config.stages}"
    if config.threads_copy and config.walk is Walk.weights and config.tokens % 16:
        return f"128 threads copy 16 tokens of a plane at a time, and a tile of {config.tokens} is not made of these"
    if config.groups > 1 or config.cluster > 1 or config.by_columns or config.multicast:
        return "one warpgroup multiplies a tile that is loaded once, and shares it with none"
    walked = config.weight_bits if config.walk is Walk.weights else config.activation_bits
    if not 1 <= config.sets <= walked:
        return f"sets of sums are for 1 to {walked} planes, not {config.sets}"
    registers = min(255, 65536 // (128 * config.blocks) // 8 * 8)
    if config.sets * config.stacked // 2 + config.tokens // 2 + 36 > registers:
        sums = config.sets * config.stacked // 2
        return f"{sums} sums are too many for the {registers} registers of each of so many threads"
    return None


def _why_not_multicast(problem: Problem, config: Config, rounds: int) -> str | None:
    weights = SMALL_ROWS if config.walk is Walk.weights else config.tokens
    tokens = config.tokens if config.walk is Walk.weights else SMALL_ROWS
    if config.cluster == 1 or -(-problem.n // weights) % config.cluster:
        return f"{-(-problem.n // weights)} tiles of weights are not made of clusters of {config.cluster}"
    if tokens % (8 * config.cluster):
        return f"{config.cluster} blocks do not load {tokens} tokens in eights"
    if config.span < rounds:
        return f"the slots of chunks are used once, and {config.span} of {rounds} chunks have one"
    return None


_WHY_NOT = {Path.large: _why_not_large, Path.small: _why_not_small, Path.once: _why_not_once}


def blocks_sharing_k(config: Config) -> int:
    """Blocks that share k."""
    return 1 if config.multicast else config.cluster


def _narrow(config: Config) -> bool:
    return config.output in (Output.f16, Output.bf16)


def _beside(config: Config) -> int:
    """Planes that stand side by side."""
    return config.activation_bits if config.walk is Walk.weights else config.weight_bits


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a block."""
    p, q = config.weight_bits, config.activation_bits
    if config.path is Path.large:
        weight_slots, activation_slots = config.weight_groups * p, config.activation_groups * q
        columns = 2 * config.tokens * (12 if config.activation_code is Code.asym else 8)
        writer = 128 * config.slab * config.buffers * _narrow(config) + columns
        slots = (weight_slots * ROWS + activation_slots * config.tokens) * _SLOT_ROW
        barriers = 16 * (weight_slots + activation_slots + 2 * config.buffers)
        first = 16 * config.starts if config.starts > 1 else 0
        return slots + 2 * (-(-writer // 1024) * 1024) + barriers + first
    if config.path is Path.once:
        walked = p if config.walk is Walk.weights else q
        chunks = config.stages * (walked * SMALL_ROWS + config.stacked) * _SLOT_ROW
        staging = 128 * config.tokens if config.walk is Walk.weights and _narrow(config) else 0
        return chunks + staging + 16 * config.stages + config.reserve
    received = config.tokens // 2 * 4 * 128 if blocks_sharing_k(config) > 1 else 0
    stacked = config.stacked * (config.groups if config.by_columns else 1)
    slots = (config.slots * SMALL_ROWS + config.stages * stacked) * _SLOT_ROW
    return slots + received + 16 * (config.slots + config.stages) + 16


_RUNTIME_BYTES = 1024
"""What the runtime keeps of a multiprocessor's shared memory for each block."""


def blocks_that_fit(config: Config, device: Device) -> int:
    """Blocks of a config that a multiprocessor's shared memory holds at once."""
    return (device.shared_bytes + _RUNTIME_BYTES) // (shared_bytes(config) + _RUNTIME_BYTES)


def half_bytes(device: Device) -> int:
    """Shared memory of which a block leaves room for another of as much, as the next kernel's."""
    return device.shared_bytes // 2 - _RUNTIME_BYTES


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """large: as many blocks as run at once, each taking tile after tile; small: a cluster a tile."""
    if config.path is Path.large:
        tiles = -(-problem.m // config.tokens) * -(-problem.n // (ROWS * config.cluster))
        pieces = tiles * (config.tokens // config.tail if config.tail else 1)
        return (min(pieces, problem.device.sms // config.cluster) * config.cluster, 1, 1)
    weights, tokens = (SMALL_ROWS, config.tokens) if config.walk is Walk.weights else (config.tokens, SMALL_ROWS)
    if config.path is Path.once:
        tiles = -(-problem.n // weights) * -(-problem.m // tokens)
        return (-(-tiles // problem.device.sms) * problem.device.sms if config.even else tiles, 1, 1)
    return (-(-problem.n // weights) * blocks_sharing_k(config), -(-problem.m // tokens), 1)


def stacked_columns(needed: int) -> int:
    """The smallest N of a product that holds ``needed`` columns; 0 if there is none."""
    return next((n for n in _PLANE_N if n >= needed), 0)


def reserved(config: Config, blocks: int, device: Device) -> int | None:
    """Bytes that leave room for ``blocks`` blocks of ``config`` on a multiprocessor and no more; None: too few fit.

    Where a block of each of so many kernels fits, those to come wait with their weights loaded. Where more fit, some
    multiprocessors take two blocks of one kernel, and all others wait for them.
    """
    whole, each = device.shared_bytes + _RUNTIME_BYTES, _RUNTIME_BYTES
    taken = shared_bytes(config)
    if taken > whole // blocks - each:
        return None
    return max(0, -(-(whole // (blocks + 1) - each + 1 - taken) // 128) * 128)
