"""y = x W^T for up to 4 tokens, as int8 products of fixed-point digits of x. Host side of sm90_packed_gemv.cuh.

It can fuse RMSNorm(x + residual) into the product: blocks hold whole rows of x anyway.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from anybit import jit
from anybit.errors import KernelError
from anybit.jit import Pointer
from anybit.kernels.block.quantize_activations import Target
from anybit.kernels.block.rope import RopeStoreArgs
from anybit.kernels.block.rope_pages import RopePagesArgs
from anybit.kernels.common.types import Code
from anybit.kernels.gemm_kernel import Operands, Traits
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed import packed_layout
from anybit.kernels.packed import packed_problem as few
from anybit.kernels.packed.packed_layout import UNIT_ROWS, round_up
from anybit.kernels.packed.packed_problem import FewFacts, Params, arguments

traits = Traits("sm90_packed_gemv", Target.bytes, arguments, gathers=True)
MOST_TOKENS = 4
_FLOATS = (Code.e2m1, Code.nf4, Code.e4m3)
"""Table codes whose values are not integers."""
_AT_ONCE = 4
"""Blocks of activations that a warp converts before its first product, if these are all."""


@dataclass(frozen=True)
class Config(FewFacts):
    """A kernel config.

    tile_m: at least m. warps: of a block, all along K. stage_units: units of 16 rows per copy; a block has ``chunks``
    times as many. stages: depth of a warp's pipeline of copies; prologue_stages: copies issued at once, the others as
    these land. x_stages: blocks of activations that a warp has at hand; x_resident: whether these are all. trigger:
    when the next kernel may start (PDL): 0 at once, else when trigger - 1 copies are left to issue.
    min_shared_bytes: see ``heuristics.limit_occupancy``. cluster_k: blocks that split K. sparse: the weights are 2:4
    sparse.
    """

    tile_m: int
    warps: int
    stage_units: int
    chunks: int
    stages: int
    x_stages: int
    x_resident: bool
    prologue_stages: int
    trigger: int = 0
    min_shared_bytes: int = 0
    cluster_k: int = 1
    sparse: bool = False


class NormParams(Params, header="packed/sm90_gemv/sm90_packed_gemv_parts.cuh"):
    """Arguments of a launch with a fused norm."""


class RotaryParams(NormParams, header="packed/sm90_gemv/sm90_packed_gemv_parts.cuh"):
    """Arguments of a launch with fused norm and RoPE, K and V stored to a ring."""


class RotaryPagesParams(NormParams, header="packed/sm90_gemv/sm90_packed_gemv_parts.cuh"):
    """``RotaryParams`` for a paged cache."""


def why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""
    if (reason := few.why_not_few(problem, MOST_TOKENS, "sm90_packed_skinny_f16.py", sparse=True)) is not None:
        return reason
    if config is None:
        return None
    if config.cluster_k not in (1, 2, 4):
        return f"a cluster has 1, 2 or 4 blocks, not {config.cluster_k}"
    if config.x_resident != (config.x_stages * config.warps * config.cluster_k >= problem.k_blocks):
        return "x_resident must say whether x_stages hold all of a warp's activations"
    return few.why_not_config(problem, config, shared_bytes(config))


def _columns(c: FewFacts) -> int:
    """MMA columns per token: 4 if codes are at different bits of their bytes, else 2."""
    if getattr(c, "sparse", False):
        return 2
    free = c.group in (0, 128)
    if c.code is Code.iq4:
        return 2
    return 2 if c.code is not Code.bipolar and (c.bits in (6, 7, 8) or (c.bits in (3, 5) and not free)) else 4


def slot_bytes(c: FewFacts, tile_m: int) -> int:
    """Bytes of a k block of activations: digits, scales and sums, or floats and scales."""
    if c.code in _FLOATS:
        return round_up(tile_m * 276 + 16, 16)
    flushes = max(1, packed_layout.subgroups(c.group))
    return round_up(tile_m * (_columns(c) * 144 + flushes * 8), 16)


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory: per warp a pipeline of weights (reused for sums) and activations; factors; barriers;
    sums of other blocks.
    """
    c, rows = config, config.stage_units * config.chunks * UNIT_ROWS
    ring = round_up(max(c.stages * c.stage_units * c.unit_bytes, c.tile_m * rows * 4), 128)
    digits = c.x_stages if c.x_resident and c.x_stages <= _AT_ONCE else 1
    a_warp = ring + digits * slot_bytes(c, c.tile_m) + (c.x_stages - digits) * c.tile_m * 256 + c.stages * 8
    received = (c.cluster_k - 1) * c.tile_m * rows * 4 + 8 * (c.cluster_k > 1)
    return max(c.warps * a_warp + rows * 8 + received, c.min_shared_bytes)


def kernel(config: Config, params: type[Params] = Params, silu: bool = False) -> jit.Kernel:
    """The kernel of a config. params: with a fused norm ``NormParams``, with RoPE, too, ``RotaryParams`` or
    ``RotaryPagesParams``.  silu: with a SiLU epilogue, behind a norm.
    """
    c, more = config, (params.__name__, "Gate::silu") if silu else (params.__name__,) if params is not Params else ()
    entry = traits.name + f"<{', '.join(more)}>" * bool(more)
    header = f"packed/sm90_gemv/{traits.name}.cuh"
    return jit.Kernel(header, entry, c, params, c.warps * 32, shared_bytes(c), c.cluster_k)


def grid(problem: LinearProblem, config: Config) -> tuple[int, int, int]:
    """At most a block per SM if that covers the rows, so that the next kernel's blocks fit beside them."""
    units = problem.units
    owners = min(problem.device.clusters(config.cluster_k), units)
    return max(owners, -(-units // (config.stage_units * config.chunks))) * config.cluster_k, 1, 1


def fitted(
    p: LinearProblem, warps: int, stage_units: int, kibibytes: int, x_stages: int = 4, prefetch: int = 0,
    trigger: int = 0, cluster: int = 1,
) -> Config:  # fmt: skip
    """A config with these warps, and pipelines of about ``kibibytes``. prefetch: prologue_stages; 0: automatic."""
    units, blocks = p.units_of(p.device.clusters(cluster)), -(-p.k_blocks // (warps * cluster))
    stage_units = min(stage_units, units)
    chunks, stage = -(-units // stage_units), warps * stage_units * packed_layout.unit_bytes(p.weights)
    stages, prologue = few.ring(kibibytes << 10, stage, blocks * chunks, prefetch)
    return Config(
        **few.facts(p, Config), tile_m=packed_layout.power_of_two(p.m), warps=warps, stage_units=stage_units,
        chunks=chunks, stages=stages, x_stages=min(x_stages, blocks), x_resident=x_stages >= blocks,
        prologue_stages=prologue, trigger=trigger, cluster_k=cluster,
    )  # fmt: skip


def refit(p: LinearProblem, c: Config) -> Iterator[Config]:
    """A config of another problem for this one: the same warps and copies, with less and less shared memory."""
    sizes = few.sizes(c, c.stage_units)
    for at_hand, size in itertools.product((p.k_blocks, 2) if c.x_resident else (c.x_stages,), sizes):
        yield fitted(p, c.warps, c.stage_units, size, at_hand, c.prologue_stages, c.trigger, c.cluster_k)


def configs(problem: LinearProblem) -> Iterator[Config]:
    """Every legal config worth trying; the default first."""
    shapes = itertools.product((8, 16), (1, 2, 3, 4), (48, 72, 96), (4,), (1, 2, 4), (0,), (1, 2))
    candidates = (fitted(problem, *shape) for shape in shapes)
    return few.legal(problem, default(problem), why_not, candidates)


@functools.cache
def default(problem: LinearProblem) -> Config:
    """Pipelines of as much shared memory as fits, where nothing was measured. Raises KernelError if there is none."""
    return packed_layout.first_legal(problem, (fitted(problem, 8, 2, size) for size in few.SIZES), why_not)


NORM_TOKENS = 2
"""Most tokens for which the kernel can normalize its activations."""


def norm_why_not(problem: LinearProblem, config: Config | None = None) -> str | None:
    """Why the kernel cannot normalize its activations, in a sentence; None if it can."""
    if (reason := why_not(problem, config)) is not None:
        return reason
    if problem.m > NORM_TOKENS:
        return f"the fused norm takes up to {NORM_TOKENS} tokens, not {problem.m}"
    if problem.act_order or not problem.aligned or problem.k % 4:
        return "the fused norm needs 16-byte aligned rows, K % 4 == 0 and no activation order"
    if config is not None and not config.x_resident:
        return "the config does not hold whole rows of activations"
    if config is not None and config.cluster_k > 1:
        return f"every block needs whole rows of activations, and {config.cluster_k} split K"
    return None


@functools.cache
def norm_default(problem: LinearProblem, like: Config | None = None) -> Config:
    """A config like another, by default the usual one, with a fused norm. Raises KernelError if there is none."""
    for config in refit(problem, replace(like or default(problem), x_resident=True, cluster_k=1)):
        if (reason := norm_why_not(problem, config)) is None:
            return config
    raise KernelError(reason)


def norm_arguments(
    operands: Operands, problem: LinearProblem, gamma: Pointer, epsilon: float, residual: Pointer = None,
    residual_sum: Pointer = None,
) -> NormParams:  # fmt: skip
    """The NormParams of y = norm(x + residual) W^T + bias and residual_sum = x + residual, unchecked.

    x, residual, residual_sum [m, k] and gamma [k] in one 16-bit type, dense and 16-byte aligned; residual and
    residual_sum both or neither. With a SiLU epilogue y is [m, n / 2] (``Traits.silu``).
    """
    stride = 0 if residual is None else problem.k
    return NormParams(
        **vars(arguments(operands, problem)), residual=residual, residual_sum=residual_sum, gamma=gamma,
        residual_stride=stride, epsilon=epsilon, part=1 / problem.k,
    )  # fmt: skip


def norm_launch(problem: LinearProblem, config: Config, arguments: NormParams, silu: bool = False) -> jit.Launch:
    """A launch with a fused norm, or with RoPE, too, by the type of its arguments."""
    return jit.Launch(kernel(config, type(arguments), silu), arguments, grid(problem, config), pdl=True)


def rotary_arguments(norm: NormParams, step: RopeStoreArgs | RopePagesArgs) -> RotaryParams | RotaryPagesParams:
    """The parameters of a launch, unchecked: of a QKV projection; y [m, query_heads * head_dim] is the rotated Q.

    K and V go to step's cache. Channels of Q and K are in ``rope.paired_channels`` order.
    """
    if isinstance(step, RopePagesArgs):
        return RotaryPagesParams(**vars(norm), **step.params())
    return RotaryParams(
        **vars(norm), cosine=step.cosine, sine=step.sine, ring=step.ring, lengths=step.lengths,
        sequences=step.sequences, query_heads=step.query_heads, key_heads=step.key_heads, head_dim=step.head_dim,
        new_tokens=step.tokens, ring_tokens=step.ring_tokens,
    )  # fmt: skip
