"""Quantize-and-pack of activations [M, K] in fp16 -> planes or bytes, alone and after a Hadamard rotation.

    python benchmarks/activations.py [--only pack] [--tokens 1 16] [--seconds 10]

pack, into results/h200/pack.json: beside the time of reading the activations once; ``us_warm`` with them in L2.
rotate, into results/h200/rotate.json: ``us`` of the one kernel that rotates and packs, ``baselines`` of a kernel each,
of each alone, and of torch's rotation. Both ways must give the same codes, bit for bit.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from anybit import hadamard, reference
from anybit.kernels.elementwise import hadamard as rotation
from anybit.kernels.elementwise.quantize_activations import Packed, Target, default, launch, problem_of
from anybit.kernels.gemm import bitplane_layout
from anybit.scheme import ActivationFormat
from timing import RESULTS, calls_for, copies, merge_rows, read_floor_us, stamp, time_graph

TOKENS = (1, 16, 64, 256, 1024, 4096)
PLANES, BYTES = Target.planes, Target.bytes
CASES = {
    "pack": ((4096, 14336), ((1, "bipolar", PLANES), (2, "sym", PLANES), (4, "sym", PLANES), (8, "sym", BYTES))),
    "rotate": ((4096, 14336, 576, 1536), ((4, "asym", PLANES), (8, "sym", BYTES))),
}
"""Widths K, and formats with the layout of their codes."""


def microseconds(call: Callable[[torch.Tensor], object], inputs: Sequence[torch.Tensor]) -> float:
    """The time of a call on inputs in turn."""

    def again(i: int) -> None:
        call(inputs[i % len(inputs)])

    guess = time_graph(again, 8, replays=1)
    return round(time_graph(again, calls_for(guess.us, len(inputs), 500.0), 7).us, 3)


def codes_of(packed: Packed) -> torch.Tensor:
    """The codes of the rows that there are, one an element."""
    if packed.target is BYTES:
        return packed.codes[:, : packed.k].cpu()
    return bitplane_layout.unpack(packed.codes.cpu(), packed.m, packed.k)


def row(packed: Packed, case: str, x: torch.Tensor, **more: object) -> dict[str, object]:
    """A row of either file, whose result was checked."""
    floor = round(read_floor_us(x.numel() * 2 + packed.buffer.numel()), 3)
    fields = {"case": f"{case} {packed.target.value}", "scheme": f"a{packed.format.bits}{packed.format.code}"}
    return {**fields, "m": packed.m, "n": 0, "k": packed.k, **more, "floor_us": floor, "checked": True}


def pack(x: torch.Tensor, format: ActivationFormat, target: Target) -> dict[str, object]:
    """Quantize-and-pack, whose first and last rows are compared with the reference."""
    m, k = x.shape
    problem, out = problem_of(x, format, target), Packed(m, k, format, target, x.device)
    config = default(problem)
    launch(problem, config, out, x)
    expected = reference.quantize_activations(torch.cat([x[:4], x[-4:]]).cpu(), format).codes.int()
    codes = codes_of(out)
    offset = 0 if target is PLANES else 2 ** (format.bits - 1)
    if not torch.equal(torch.cat([codes[:4], codes[-4:]]).int(), expected - offset):
        raise AssertionError(f"{m} x {k} in {format}: codes differ from the reference")
    times = {
        name: microseconds(lambda x: launch(problem, config, out, x), inputs)
        for name, inputs in (("us", copies(x, 64)), ("us_warm", [x]))
    }
    return row(out, "pack", x, **times)


def rotate(x: torch.Tensor, format: ActivationFormat, target: Target) -> dict[str, object]:
    """Rotation and quantize-and-pack by one kernel, whose results must be those of two."""
    m, k = x.shape
    inputs = copies(x, 64)
    apart, fused = (problem_of(x, format, target, rotated=rotated) for rotated in (False, True))
    one, each = default(fused), default(apart)
    out = Packed(m, k, format, target, x.device)

    def results() -> list[torch.Tensor]:
        parts = (part for part in (out.scale, out.sum, out.zero) if part is not None)
        return [codes_of(out).clone(), *(part.clone() for part in parts)]

    launch(apart, each, out, rotation.transform(x))
    wanted = results()
    baselines = {
        "kernel each": microseconds(lambda x: launch(apart, each, out, rotation.transform(x)), inputs),
        "rotation alone": microseconds(rotation.transform, inputs),
        "pack alone": microseconds(lambda x: launch(apart, each, out, x), inputs),
        "torch": microseconds(hadamard.transform, inputs),
    }
    out.buffer.zero_()
    launch(fused, one, out, x)
    if any(not torch.equal(a, b) for a, b in zip(wanted, results(), strict=True)):
        raise AssertionError(f"{m} x {k} in {format}, {one}: other codes than by two kernels")
    us = microseconds(lambda x: launch(fused, one, out, x), inputs)
    return row(out, "rotate and pack", x, us=us, baselines=baselines)


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, nargs="*", default=list(CASES))
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this time")
    options = parser.parse_args()
    marks = stamp()
    for name in options.only:
        run, (widths, formats) = {"pack": pack, "rotate": rotate}[name], CASES[name]
        for m, k in ((m, k) for k in widths for m in options.tokens):
            if time.perf_counter() - began > options.seconds:
                print(f"out of time before {name}, {m} x {k}")
                return
            x = torch.randn(m, k, device="cuda").half()
            rows = [run(x, ActivationFormat(bits, code), target) | marks for bits, code, target in formats]
            for found in rows:
                print(found, flush=True)
            merge_rows(RESULTS / "h200" / f"{name}.json", rows)


if __name__ == "__main__":
    main()
