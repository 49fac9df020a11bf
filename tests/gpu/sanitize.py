"""Small launches for compute-sanitizer, memcheck or racecheck:

    compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/sanitize.py

(without API errors: a newer cuda-bindings asks an older driver for functions that it lacks; racecheck with
--kernel-name regex=bitwise --kernel-name regex=quantize, as it may fail on kernels that are not ours). Each product is
also compared with the reference, so that a tool that changes the timing changes nothing else.
"""

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402

from anybit.jit import Kernel  # noqa: E402
from anybit.kernels.elementwise import quantize_activations as activation_kernel  # noqa: E402
from anybit.kernels.gemm import (  # noqa: E402
    bitplane_layout,
    sm80_bitplane_gemm,
    sm90_bitplane,
    sm90_bitplane_stacked,
)
from anybit.kernels.gemm.sm90_bitplane import (  # noqa: E402
    Output,
    Path,
    Turns,
    Walk,
)
from anybit.kernels.gemm.sm90_bitplane_stacked import Keep  # noqa: E402
from anybit.reference import integer_product, quantize_activations  # noqa: E402
from anybit.scheme import Scheme  # noqa: E402
from cases import random_weight  # noqa: E402
from cases_bitplane import H200, large, once, operands, small, wide  # noqa: E402

CASES = [
    *((5, 24, 300, "w2a2"), (70, 136, 1100, "w3a4asym-xasym"), (17, 40, 2048, "w1a1"), (1, 72, 77, "w4a8")),
    (150, 264, 1100, "w2a2"),  # float16 results leave by tensor map
]
RINGS: dict[str, Any] = {"weight_groups": 2, "activation_groups": 2}
# Ways that small products do not take by themselves, with 16-bit results: tiles that are cut, tokens that blocks load
# for each other, warpgroups that share k or columns, clusters that share k.
WAYS: list[tuple[int, int, int, str, dict[str, Any]]] = [
    (150, 264, 1100, "w1a1", {"tokens": 128, "tensor": True, "tail": 64, "buffers": 4}),
    (150, 264, 1100, "w1a2", {"tokens": 64, "tensor": True, "cluster": 2, "multicast": True}),
    (300, 264, 2100, "w2a2", {"tokens": 256, "tensor": True, "turns": Turns.none, "starts": 2} | RINGS),
    (70, 72, 2100, "w2a2", {"tokens": 32, "walk": Walk.tokens, "groups": 4, "slots": 6, "stages": 3, "span": 3}),
    (70, 72, 2100, "w2a2", {"tokens": 32, "walk": Walk.tokens, "groups": 2, "by_columns": True, "stacked": 32}),
    (9, 72, 2100, "w1a2", {"tokens": 16, "cluster": 2}),
    (64, 64, 999, "w2a2", {"tokens": 32, "walk": Walk.tokens, "cluster": 2, "multicast": True, "slots": 3}),
    (64, 136, 2100, "w1a2", {"path": Path.once, "tokens": 32, "walk": Walk.weights, "even": True}),
    (70, 128, 2100, "w2a2", {"path": Path.once, "tokens": 32, "walk": Walk.weights, "sets": 2, "early": 1}),
    (64, 136, 2048, "w3a4", {"path": Path.once, "tokens": 32, "walk": Walk.tokens, "sets": 2}),
    (64, 136, 3100, "w3a4", {"path": Path.once, "tokens": 32, "walk": Walk.weights, "early": 1, "threads_copy": True}),
]
# Tiles of planes side by side, several of them a block.
WIDE: list[tuple[int, int, int, str, dict[str, Any]]] = [
    (1030, 4104, 2100, "w1a2", {"keep": Keep.tokens, "token_slots": 3, "weight_slots": 3, "lag": 2}),
    (1030, 4104, 1100, "w2a2", {"keep": Keep.weights, "weight_slots": 4, "lag": 1}),
    (1030, 4104, 1100, "w2a2asym-xasym", {"weight_slots": 3}),
]


def problems() -> list[tuple[int, int, int, Scheme]]:
    return [(m, n, k, Scheme.parse(text)) for m, n, k, text in CASES]


def ways() -> list[tuple[sm90_bitplane.Problem, sm90_bitplane.Config]]:
    """The problems and configs of WAYS."""
    found = []
    for m, n, k, text, change in WAYS:
        problem = problem_of(m, n, k, text)
        of_few = "walk" in change or change["tokens"] < 32
        make = once if "path" in change else small if of_few else large
        config = make(problem, **change)
        reason = sm90_bitplane.why_not(problem, config)
        assert reason is None, reason
        found.append((problem, config))
    return found


def problem_of(m: int, n: int, k: int, text: str) -> sm90_bitplane.Problem:
    """Of a product with 16-bit results."""
    scheme = Scheme.parse(text)
    return sm90_bitplane.Problem(m, n, k, scheme.weights, scheme.activations, Output.f16, H200)


def wide_ways() -> list[tuple[sm90_bitplane.Problem, sm90_bitplane_stacked.Config]]:
    """The problems and configs of WIDE."""
    found = []
    for *shape, text, change in WIDE:
        problem = problem_of(*shape, text)
        config = wide(problem, 128, **change)
        reason = sm90_bitplane_stacked.why_not(problem, config)
        assert reason is None, reason
        found.append((problem, config))
    return found


def kernels_used() -> list[Kernel]:
    """What is launched below, for precompile.py."""
    found = set()
    for m, n, k, scheme in problems():
        for output in (Output.s32, Output.f16):
            formats = (m, n, k, scheme.weights, scheme.activations, output, H200)
            found.add(sm90_bitplane.kernel(sm90_bitplane.default(sm90_bitplane.Problem(*formats))))
            found.add(
                sm80_bitplane_gemm.kernel(sm80_bitplane_gemm.default(sm80_bitplane_gemm.Problem(*formats, n % 8 == 0)))
            )
        found.add(
            activation_kernel.kernel(
                activation_kernel.default(activation_kernel.Problem(m, k, scheme.activations, aligned=k % 8 == 0))
            )
        )
    found |= {sm90_bitplane_stacked.kernel(config) for _, config in wide_ways()}
    return [*found, *(sm90_bitplane.kernel(config) for _, config in ways())]


def main() -> None:
    for m, n, k, scheme in problems():
        weight = random_weight(n, k, scheme.weights)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).half()
        doubled = (scheme.weights.code == "bipolar") + (scheme.activations.code == "bipolar")
        expected = integer_product(quantize_activations(x, scheme.activations), weight) * 2**doubled
        prepared = bitplane_layout.prepare(weight).to("cuda")
        packed = activation_kernel.quantize(x.cuda(), scheme.activations)
        scaled = expected / 2**doubled * packed.scale.cpu().double()[:, None] * weight.scale[:, 0].double()
        for family in (sm80_bitplane_gemm, sm90_bitplane):
            y = family.multiply(packed, prepared, Output.s32)
            torch.cuda.synchronize()
            assert torch.equal(y.cpu(), expected.int()), (family.__name__, m, n, k, scheme)
            y = family.multiply(packed, prepared, Output.f16)
            torch.cuda.synchronize()
            torch.testing.assert_close(y.cpu().double(), scaled, rtol=1e-3, atol=1e-5)
    families: list[tuple[Any, sm90_bitplane.Problem, Any]] = [(sm90_bitplane, *way) for way in ways()]
    families += [(sm90_bitplane_stacked, *way) for way in wide_ways()]
    for family, problem, config in families:
        given = operands(problem.m, problem.n, problem.k, problem.weights, problem.activations, "cuda")
        y = family.multiply(given.x, given.weight, Output.f16, config=config)
        torch.testing.assert_close(y.double(), given.exact * given.unit, rtol=1e-3, atol=1e-5)
    print(f"{len(CASES)} cases, both families, and {len(families)} ways: right")


if __name__ == "__main__":
    main()
