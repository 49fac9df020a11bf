"""The search space of a problem: every strategy, every family's legal configs, and what is excluded, with reasons.

Legality is decided by the families' ``why_not`` alone. It includes APT-LLM's relation between block widths, warps and
tiles (section V-B): a config gives the tile and its warps, which determine the work of each warp.
"""

import contextlib
from typing import NamedTuple

from anybit.choose.builtin import FEW_TOKENS, MOST_TOKENS, bucket, step
from anybit.choose.choose import Map, forms
from anybit.choose.families import FAMILIES, Candidate, layouts, strategy_of
from anybit.errors import KernelError
from anybit.kernels.bitplane.bitplane_problem import half_bytes
from anybit.kernels.block.quantize_activations import Target
from anybit.kernels.linear_problem import LinearProblem as LinearProblem
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.scheme import CODES

_INT4_TENSOR_CORES = ("sm_80", "sm_86", "sm_89")
"""Read from the SASS of CUDA 13.0: later architectures emulate them."""
GRID = tuple(sorted({bucket(tokens) for tokens in range(1, MOST_TOKENS + 1)}))
"""Token counts of maps that cover all layers and schemes."""
STEPS = tuple(sorted({step(tokens) for tokens in range(1, MOST_TOKENS + 1)}))
"""All values of ``step``: the token counts that `anybit tune` measures."""


class Space(NamedTuple):
    """Every legal candidate of a product, by family, and why strategies, or families of them, are not among them."""

    candidates: list[Candidate]
    excluded: dict[str, str]


def space(product: LinearProblem) -> Space:
    """The whole space of a product."""
    found, excluded, x = list[Candidate](), dict[str, str](), product.activations
    for name, family in FAMILIES.items():
        configs = family.configs(product)
        found += [Candidate(name, config, x) for config in configs]
        if not configs:
            reason = family.why_not(product) or "none of its configs fits this product and device"
            excluded[f"{strategy_of(name, x)} ({name})"] = reason
    if split := why_not_split(product):
        excluded["split"] = split
    if x.quantized:
        excluded["dequantize"] = f"activations are quantized to {x.bits} bits"
    if x.integer:
        excluded["padding to fp8"] = "sums of e4m3 products are rounded, and integer activations are exact"
    elif x.quantized:
        excluded["padding to int8"] = "the activations are 8-bit floats"
    else:
        for name in ("padding to int8", "padding to fp8"):
            excluded[name] = "it would quantize the activations, which changes results"
    return Space(found, excluded)


def why_not_split(product: LinearProblem) -> str | None:
    """Why operands are not split into nibbles for int4 tensor cores, as a sentence; None if they may be."""
    w, x, arch = product.weights, product.activations, product.device.arch
    if w.sparse:
        return "the weights are 2:4 sparse"
    if w.code not in CODES:
        return f"{w.code} codes are not integers, so weights must be dequantized to 16-bit floats"
    if not x.integer:
        return f"split multiplies integers, and the activations are {x.bits}-bit floats"
    if arch not in _INT4_TENSOR_CORES:
        return f"4-bit integer products are emulated on the integer units of {arch}"
    if max(w.bits, x.bits) <= 4:
        return "both operands fit four bits, so there is nothing to split: padding runs them on 4-bit tensor cores"
    return None


# -------- what a search tries

_EVERYTHING = 1000  # a search for this many candidates per family skips nothing
_MANY_TOKENS = 256  # bit planes for few tokens take several times as long above this


def clearly_faster(us: float, before_us: float) -> bool:
    """Whether a config for few tokens gains more than the microsecond by which times in chains of one GEMM may err."""
    return us < max(0.95 * before_us, before_us - 1.0)


def preserves_pdl_overlap(product: LinearProblem, candidate: Candidate, own: Candidate) -> bool:
    """Whether the next kernel can start as early as after ``own``, what would run (PDL); always true above few tokens.

    More shared memory, or a second block per SM, keeps the next kernel's blocks from starting beside this one's, which
    only whole steps show. Half of an SM is always allowed.
    """
    if product.m > FEW_TOKENS:
        return True
    config = candidate.config
    blocks = config.min_blocks_per_sm if isinstance(config, sm90_packed_gemm.Config) else 1
    more = blocks > getattr(own.config, "min_blocks_per_sm", 1)
    return not more and candidate.shared_bytes <= max(own.shared_bytes, half_bytes(product.device))


def _hopeless(product: LinearProblem, kernel: str) -> bool:
    """Whether a family is not worth timing: mma.sync despite wgmma, or bit planes at many tokens."""
    if FAMILIES[kernel].target is not Target.planes:
        return False
    reloads = kernel in ("sm90_bitplane_skinny", "sm90_bitplane_resident")  # the weights, every 64 tokens
    slow = reloads or product.weights.bits * product.activations.bits > 16
    return (product.m > _MANY_TOKENS and slow) or (kernel == "sm80_bitplane_gemm" and product.device.arch == "sm_90a")


def defaults_of(product: LinearProblem, by: Map) -> list[Candidate]:
    """What would run by a map: in the best layout first, then in each."""
    found: dict[Candidate, None] = {}
    for layout in (None, *layouts(product.activations)):
        with contextlib.suppress(KernelError):
            found[by.choose(product, layout).candidate] = None
    return [one for one in found if one.why_not(product) is None]


def hints_of(product: LinearProblem, by: Map, count: int) -> list[Candidate]:
    """At most ``count`` candidates that a map expects to be fast here."""
    found: dict[Candidate, None] = {}
    for _, candidate, there in by.expected(product, everything=True):
        if len(found) >= count:
            break
        found |= {one: None for one, _ in forms(candidate, product, there) if one.why_not(product) is None}
    return list(found)


def promising(product: LinearProblem, each: int, by: Map, hints: int = 0) -> list[Candidate]:
    """What would run by a map, ``hints`` candidates that it expects to be fast, and ``each`` of every family.

    What would run comes first and is always included, so a search never ends with something worse.
    """
    chosen = [*defaults_of(product, by), *hints_of(product, by, hints)]
    for name, family in FAMILIES.items() if each else ():
        if each >= _EVERYTHING or not _hopeless(product, name):
            if not family.configs(product):
                continue
            near = by.choose(product, family.layout(product.activations), name).candidate
            like = near.config if near.kernel == name else None
            chosen += [Candidate(name, one, product.activations) for one in family.promising(product, each, like)]
    return [candidate for candidate in dict.fromkeys(chosen) if candidate.why_not(product) is None]
