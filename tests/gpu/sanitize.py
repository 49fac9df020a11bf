"""Small launches for compute-sanitizer, memcheck or racecheck:

    compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/sanitize.py

(without API errors: a newer cuda-bindings asks an older driver for functions that it lacks). Each product is also
compared with the reference, so that a tool that changes the timing changes nothing else.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402

from anybit.jit import Kernel  # noqa: E402
from anybit.kernels import bitwise, bitwise_sync, pack, planes  # noqa: E402
from anybit.kernels.bitwise import Output  # noqa: E402
from anybit.reference import integer_product, quantize_activations  # noqa: E402
from anybit.scheme import Scheme  # noqa: E402
from cases import random_weight  # noqa: E402
from cases_bitwise import H200  # noqa: E402

CASES = [
    *((5, 24, 300, "w2a2"), (70, 136, 1100, "w3a4asym-xasym"), (17, 40, 2048, "w1a1"), (1, 72, 77, "w4a8")),
    (150, 264, 1100, "w2a2"),  # float16 results leave by tensor map
]


def problems() -> list[tuple[int, int, int, Scheme]]:
    return [(m, n, k, Scheme.parse(text)) for m, n, k, text in CASES]


def kernels_used() -> list[Kernel]:
    """What is launched below, for precompile.py."""
    found = set()
    for m, n, k, scheme in problems():
        for output in (Output.s32, Output.f16):
            formats = (m, n, k, scheme.weights, scheme.activations, output, H200)
            found.add(bitwise.kernel(bitwise.default(bitwise.Problem(*formats))))
            found.add(bitwise_sync.kernel(bitwise_sync.default(bitwise_sync.Problem(*formats, n % 8 == 0))))
        found.add(pack.kernel(pack.default(pack.Problem(m, k, scheme.activations, aligned=k % 8 == 0))))
    return list(found)


def main() -> None:
    for m, n, k, scheme in problems():
        weight = random_weight(n, k, scheme.weights)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).half()
        doubled = (scheme.weights.code == "bipolar") + (scheme.activations.code == "bipolar")
        expected = integer_product(quantize_activations(x, scheme.activations), weight) * 2**doubled
        prepared = planes.prepare(weight).to("cuda")
        packed = pack.quantize(x.cuda(), scheme.activations)
        scaled = expected / 2**doubled * packed.scale.cpu().double()[:, None] * weight.scale[:, 0].double()
        for family in (bitwise_sync, bitwise):
            y = family.multiply(packed, prepared, Output.s32)
            torch.cuda.synchronize()
            assert torch.equal(y.cpu(), expected.int()), (family.__name__, m, n, k, scheme)
            y = family.multiply(packed, prepared, Output.f16)
            torch.cuda.synchronize()
            torch.testing.assert_close(y.cpu().double(), scaled, rtol=1e-3, atol=1e-5)
    print(f"{len(CASES)} cases, both families: right")


if __name__ == "__main__":
    main()
