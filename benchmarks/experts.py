"""Mixtures of experts: both products with SiLU and the sum over experts, for a few tokens, beside the bytes' floor.

    python benchmarks/experts.py              into results/h200/moe.json
    python benchmarks/experts.py --case qwen3-30b mixtral --tokens 1 4 --scheme w4a16g128 --dry
    python benchmarks/experts.py --sweep --case qwen3-30b --tokens 1    every config, gate_up and down apart
    python benchmarks/experts.py --compile    only compile the kernels, which needs no GPU

A kernel just before writes the ids, in the same CUDA graph; its own time is subtracted. Weights and ids rotate through
more than L2. Each row is checked against the reference.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybit.codes import reference
from anybit.codes.packing import QuantizedWeight, words_per_row
from anybit.device import Device
from anybit.jit import Slot
from anybit.kernels.experts.sm90_experts_gemv import sm90_experts_gemv
from anybit.kernels.experts.sm90_experts_gemv.sm90_experts_gemv import Config, Problem
from anybit.kernels.packed.packed_layout import unit_bytes
from anybit.ops.experts import ExpertsSpec, PreparedExperts, experts, experts_plan, prepare_experts
from anybit.ops.plans import OpPlan, Rows
from anybit.scheme import ActivationFormat, Scheme, WeightFormat
from anybit.tune.processes import compile_kernels
from timing import RESULTS, Captured, merge_rows, rotations, stamp, time_in_turns

CASES = {
    "qwen3-30b": (128, 8, 2048, 768),
    "mixtral": (8, 2, 4096, 14336),
    "deepseek-v3": (32, 8, 7168, 2048),
    "gpt-oss-120b": (128, 4, 2880, 2880),
}
"""Experts, experts a token, hidden and inner size. deepseek-v3: the 32 experts of one of eight ranks, chosen by all."""
BASELINES = {
    "qwen3-30b": {1: (32.1, 29.0), 4: (52.3, 77.7)},
    "mixtral": {1: (95.4, 179.0), 4: (175.0, 740.0)},
    "deepseek-v3": {1: (100.0, 184.0), 4: (186.0, 444.0)},
}
"""vLLM 0.26's Marlin (w4a16g128) and Triton (bf16) by tokens, measured 2026-11-29 on the same machine."""
TOLERANCE = 1.6e-2
KEY = ("case", "scheme", "tokens", "routing", "dtype")


@dataclass(frozen=True)
class Case:
    """One row: a mixture's shape, the format of its weights, tokens, and how they choose."""

    name: str
    scheme: str
    tokens: int
    routing: str = "uniform"

    @property
    def format(self) -> WeightFormat:
        """The format of all weights."""
        return Scheme.parse(self.scheme).weights

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's tiles without padding."""
        _, _, hidden, inner = CASES[self.name]
        return 3 * inner * hidden * unit_bytes(self.format) // (16 * 128)

    def problems(self, device: Device) -> tuple[Problem, Problem]:
        """gate_up and down."""
        count, top, hidden, inner = CASES[self.name]
        shared: dict[str, Any] = {"weights": self.format, "dtype": torch.bfloat16, "device": device}
        return (
            Problem(min(self.tokens, 8), top, count, 2 * inner, hidden, down=False, **shared),
            Problem(min(self.tokens, 8), top, count, hidden, inner, down=True, **shared),
        )

    def routes(self, count: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
        """``count`` different ids and weights."""
        number, top, _, _ = CASES[self.name]
        found = []
        for _ in range(count):
            logits = torch.randn(self.tokens, number, device="cuda", generator=generator)
            if self.routing == "one":
                logits = logits[:1].repeat(self.tokens, 1)
            weights, ids = logits.softmax(-1).topk(top, -1)
            found.append((ids.to(torch.int32), weights / weights.sum(-1, keepdim=True)))
        return found


def random_weight(n: int, k: int, format: WeightFormat, generator: torch.Generator) -> QuantizedWeight:
    """Uniform codes, made on the GPU."""
    shape, groups = (n, words_per_row(k, format.bits)), format.groups(k)
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda", generator=generator)
    scale = (torch.rand(n, groups, device="cuda", generator=generator) + 0.5) * 0.02 / 2 ** (format.bits - 1)
    zero = torch.full((n, groups), 1 << format.bits - 1, dtype=torch.uint8, device="cuda")
    return QuantizedWeight(words, scale, zero if format.code == "asym" else None, (n, k), format)


class Bench:
    """The weights of a case's shape and format, in copies beyond L2."""

    def __init__(self, case: Case) -> None:
        count, self.top, hidden, inner = CASES[case.name]
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.copies = [
            self._prepared(case.format, count, hidden, inner) for _ in range(rotations(count * case.expert_bytes, 4))
        ]

    def _prepared(self, format: WeightFormat, count: int, hidden: int, inner: int) -> PreparedExperts:
        gate_up = random_weight(count * 2 * inner, hidden, format, self.generator)
        down = random_weight(count * hidden, inner, format, self.generator)
        return prepare_experts(gate_up, down, count, ActivationFormat())

    def times(
        self,
        case: Case,
        call: Callable[[Tensor, Tensor, Tensor, PreparedExperts], object],
        calls: int,
        replays: int = 11,
    ) -> float:
        """Microseconds of a call, without the kernel that writes ids."""
        hidden = CASES[case.name][2]
        routes = case.routes(calls, self.generator)
        x = torch.randn(case.tokens, hidden, device="cuda", generator=self.generator).bfloat16()
        ids = torch.empty_like(routes[0][0])

        def written(i: int) -> None:
            torch.add(routes[i % calls][0], 0, out=ids)

        def both(i: int) -> None:
            written(i)
            call(x, ids, routes[i % calls][1], self.copies[i % len(self.copies)])

        whole, alone = time_in_turns([Captured(both, calls), Captured(written, calls)], replays)
        return whole.us - alone.us

    def error(self, case: Case) -> float:
        """Mean relative error of the op for two routings, the worse."""
        hidden, found = CASES[case.name][2], []
        for (ids, weights), prepared in zip(case.routes(2, self.generator), self.copies, strict=False):
            x = torch.randn(case.tokens, hidden, device="cuda", generator=self.generator).bfloat16()
            spec = ExpertsSpec.parse(prepared.spec_text)
            y, pair = experts(x, ids, weights, prepared), (prepared.gate_up.restore(), prepared.down.restore())
            exact = reference.experts(x, ids, weights, *pair, spec.rows, spec.count, ActivationFormat(), spec.gate)
            found.append(float((y.float() - exact.float()).abs().mean() / exact.float().abs().mean()))
        return max(found)

    def floor_us(self, case: Case) -> float:
        """Distinct experts' bytes at 4.67 TB/s, on average."""
        hit = statistics.mean(len(ids.unique()) for ids, _ in case.routes(64, self.generator))
        return hit * case.expert_bytes / 4.67e6

    def plan(self, case: Case, choose: Callable[[Problem], Config]) -> OpPlan:
        """The op's plan with other configs."""
        hidden = CASES[case.name][2]
        spec, device = ExpertsSpec.parse(self.copies[0].spec_text), torch.device("cuda", torch.cuda.current_device())
        rows = Rows(Slot("x"), case.tokens, hidden, hidden, True, torch.bfloat16, device, Device.at(device.index))
        return experts_plan(spec, rows, self.top, torch.int32, choose=choose)


def measured(case: Case, bench: Bench) -> dict[str, object]:
    """A row."""
    error, floor = bench.error(case), bench.floor_us(case)
    us = bench.times(case, experts, max(8, min(64, int(2000 / floor))))
    baselines = BASELINES.get(case.name, {}).get(case.tokens, ())
    named = dict(zip(("marlin w4a16g128", "triton bf16"), baselines, strict=False))
    return {
        "case": case.name, "scheme": case.scheme, "tokens": case.tokens, "routing": case.routing, "dtype": "bfloat16",
        "us": round(us, 2), "floor_us": round(floor, 2), "baselines": named, "error": round(error, 5),
        "checked": error < TOLERANCE, **stamp(),
    }  # fmt: skip


def candidates(problem: Problem) -> Iterator[Config]:
    """Configs of a problem, its default first."""
    yield from sm90_experts_gemv.configs(problem)


def sweep(case: Case, bench: Bench, seconds: float) -> None:
    """Time every config of one product with the default of the other; prints the best."""
    problems = case.problems(Device.at(0))
    kinds = [list(candidates(problem)) for problem in problems]
    compile_kernels([(sm90_experts_gemv.kernel(config), "sm_90a") for kind in kinds for config in kind])
    for problem, configs in zip(problems, kinds, strict=True):
        found, end = list[tuple[float, Config]](), time.monotonic() + seconds
        for config in configs:
            if time.monotonic() > end:
                break

            def choose(asked: Problem, mine: Config = config, down: bool = problem.down) -> Config:
                return mine if asked.down == down else sm90_experts_gemv.default(asked)

            plan = bench.plan(case, choose)

            def call(x: Tensor, ids: Tensor, weights: Tensor, one: PreparedExperts, plan: OpPlan = plan) -> object:
                return plan.call(x, ids, weights, None, None, *one.gate_up.tensors[:3], *one.down.tensors[:3])

            found.append((bench.times(case, call, 32, 5), config))
        print(f"{case} {'down' if problem.down else 'gate_up'}: default {found[0][0]:.2f} us, {len(found)} configs")
        for us, c in sorted(found, key=lambda one: one[0])[:8]:
            print(
                f"  {us:.2f} us tile_m={c.tile_m} blocks={c.blocks}x{c.cluster} warps={c.warps} units={c.stage_units}"
                f"x{c.chunks} stages={c.stages} x={c.x_stages} shared={sm90_experts_gemv.shared_bytes(c)}", flush=True,
            )  # fmt: skip


def main() -> None:
    """Measure, or compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--scheme", nargs="+", default=["w4a16g128", "w2a16g128"])
    parser.add_argument("--routing", nargs="+", default=["uniform"], choices=["uniform", "one"])
    parser.add_argument("--seconds", type=float, default=30.0, help="of a sweep, a product")
    for flag in ("--dry", "--sweep", "--compile"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    cases = [
        Case(name, scheme, tokens, routing)
        for name in given.case for scheme in given.scheme for tokens in given.tokens for routing in given.routing
    ]  # fmt: skip
    device = Device.named("sm_90a") if given.compile else Device.at(0)
    usual = {sm90_experts_gemv.kernel(sm90_experts_gemv.default(p)) for case in cases for p in case.problems(device)}
    compile_kernels([(kernel, "sm_90a") for kernel in usual])
    if given.compile:
        return
    rows, bench, shape = [], None, None
    for case in cases:
        if (case.name, case.scheme) != shape:
            bench, shape = None, (case.name, case.scheme)
            torch.cuda.empty_cache()
            bench = Bench(case)
        assert bench is not None
        if given.sweep:
            sweep(case, bench, given.seconds)
            continue
        rows.append(measured(case, bench))
        print(rows[-1], flush=True)
    if rows and not given.dry:
        merge_rows(RESULTS / "h200" / "moe.json", rows, KEY)


if __name__ == "__main__":
    main()
