"""Quantize-and-pack alone: activations [M, K] in fp16 -> planes or bytes, beside the time of reading them once."""

import argparse
import time
from pathlib import Path

import torch

from anybit.kernels.elementwise import quantize_activations as activation_kernel
from anybit.kernels.elementwise.quantize_activations import Target
from anybit.kernels.gemm import bitplane_layout
from anybit.reference import quantize_activations
from anybit.scheme import ActivationFormat
from timing import RESULTS, calls_for, copies, merge_rows, read_floor_us, stamp, time_graph

SHAPES = [(m, k) for k in (4096, 14336) for m in (1, 16, 64, 256, 1024, 4096)]


def check(x: torch.Tensor, packed: quantize_activations.Packed) -> None:
    """Compare the first and the last rows with the reference."""
    rows = torch.cat([x[:4], x[-4:]]).cpu()
    expected = quantize_activations(rows, packed.format)
    m, k = x.shape
    codes = (
        bitplane_layout.unpack(packed.codes.cpu(), m, k)
        if packed.target is Target.planes
        else packed.codes.cpu()[:, :k]
    )
    got = torch.cat([codes[:4], codes[-4:]])
    offset = 0 if packed.target is Target.planes else 2 ** (packed.format.bits - 1)
    if packed.format.integer and not torch.equal(got.int(), expected.codes.int() - offset):
        raise AssertionError(f"{m} x {k} in {packed.format}: codes differ from the reference")


def run(m: int, k: int, format: ActivationFormat, target: Target, every: bool) -> list[dict[str, object]]:
    x = torch.randn(m, k, device="cuda").half()
    inputs = copies(x, 64)
    problem = activation_kernel.problem_of(x, format, target)
    out = quantize_activations.Packed(m, k, format, target, x.device)
    rows = []
    for config in activation_kernel.configs(problem) if every else [activation_kernel.default(problem)]:
        activation_kernel.launch(problem, config, out, x)
        check(x, out)
        timing = {}
        for name, sources in (("us", inputs), ("us_warm", [x])):
            call = lambda i, s=sources, c=config: activation_kernel.launch(problem, c, out, s[i % len(s)])  # noqa: E731
            guess = time_graph(call, 8, replays=1)
            timing[name] = round(time_graph(call, calls_for(guess.us, len(sources), 500.0), 7).us, 3)
        written = out.buffer.numel()
        rows.append(
            {
                "case": f"pack {target.value}",
                "scheme": f"a{format.bits}{format.code}",
                "m": m,
                "n": 0,
                "k": k,
                **timing,
                "floor_us": round(read_floor_us(x.numel() * 2 + written), 3),
                "config": f"{config.threads} threads x {config.vectors}",
                "checked": True,
            }
        )
    return rows


FORMATS = (
    (ActivationFormat(1, "bipolar"), Target.planes),
    (ActivationFormat(2, "sym"), Target.planes),
    (ActivationFormat(4, "sym"), Target.planes),
    (ActivationFormat(8, "sym"), Target.bytes),
)


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", action="store_true", help="every config, not the default alone; nothing is written")
    parser.add_argument("--tokens", type=int, nargs="*")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further shape after this time")
    options = parser.parse_args()
    marks = stamp()
    for m, k in SHAPES:
        if options.tokens and m not in options.tokens:
            continue
        if time.perf_counter() - began > options.seconds:
            print(f"out of time before {m} x {k}")
            break
        rows = [row | marks for format, target in FORMATS for row in run(m, k, format, target, options.every)]
        for row in rows:
            print(*(row[name] for name in ("scheme", "m", "k", "us", "us_warm", "floor_us", "config")), flush=True)
        if not options.every:
            merge_rows(Path(RESULTS) / "h200" / "pack.json", rows)


if __name__ == "__main__":
    main()
