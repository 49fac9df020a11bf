"""Small launches of the KV cache's kernels for compute-sanitizer, memcheck or racecheck:

    compute-sanitizer --tool memcheck --report-api-errors no python tests/kernels/sanitize_kv.py [case ...]

Packing (prompts, steps, windows that become full) and decode attention (even split, masks), each compared with
the reference.
"""

import dataclasses
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "kernels"), str(TESTS), str(TESTS / "emulator")]

import torch  # noqa: E402

from anybit.cache.attention import decode_kernel, decode_reference  # noqa: E402
from anybit.device import Device  # noqa: E402
from anybit.jit import Kernel  # noqa: E402
from anybit.kernels.attention.decode import decode  # noqa: E402
from anybit.kernels.attention.kv_quantize import kv_quantize  # noqa: E402
from cases_decode import Case, problem, relative_error  # noqa: E402

LENGTHS = (300, 7, 128, 1025)
CASES = [
    Case("kv4g128", lengths=LENGTHS),
    Case("kv2g128t", lengths=LENGTHS, heads=32, data="spiky"),
    Case("kv2g32", lengths=LENGTHS, head_dim=64, bf16=True, queries=3),
    Case("k8v4", lengths=LENGTHS, heads=32, window=150, sinks=True),
]


def kernels_used() -> list[Kernel]:
    """All kernels used here, for precompile.py."""
    device, found = Device.named("sm_90a"), set()
    for case in CASES:
        asked = problem(case)
        for split in (0, 256):
            cut = dataclasses.replace(asked, split=split)
            found.add(decode.kernel(decode.default(cut, device), asked.layout))
        for tokens in (1, 2):
            stored = kv_quantize.Problem(asked.layout, 1, case.kv_heads, tokens, asked.ring, asked.window, case.bf16)
            found.add(kv_quantize.kernel(kv_quantize.default(stored)))
    return list(found)


def main() -> None:
    chosen = [CASES[int(index)] for index in sys.argv[1:]] or CASES
    for case in chosen:
        here, _, _ = case.build("cpu")
        cache, sequences, q = case.build("cuda")
        torch.cuda.synchronize()
        assert torch.equal(here.pages[1], cache.pages[1].cpu()), case
        want, _ = decode_reference(q, cache, 1, sequences, case.masks("cuda"), precision=torch.float64)
        for split in (0, 0, 256):
            out, _ = decode_kernel(q, cache, 1, sequences, case.masks("cuda"), split=split)
            torch.cuda.synchronize()
            assert relative_error(out, want) < (1e-2 if case.bf16 else 2e-3), case
    print(f"{len(chosen)} cases, packing and attention: ok")


if __name__ == "__main__":
    main()
