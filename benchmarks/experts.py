"""Mixtures of experts: both products with SiLU and the sum over experts, beside the floor and vLLM's experts.

    python benchmarks/experts.py --peers     into results/h200/moe.json; peers need vLLM
    python benchmarks/experts.py --case qwen3-30b mixtral --tokens 1 4 --scheme w4a16g128 --dry
    python benchmarks/experts.py --compile   only compile the kernels, which needs no GPU

A kernel just before writes the ids, in the same CUDA graph; its own time is subtracted. Weights and ids rotate through
more than L2. A sample of each row's tokens is checked against the reference. ``routed_us`` of one token: the same with
the router, whose rows that kernel writes in place of the ids.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anybit import jit
from anybit.codes import reference
from anybit.codes.packing import QuantizedWeight, words_per_row
from anybit.device import Device
from anybit.kernels.experts.router import router
from anybit.kernels.experts.sm90_experts_gemv import sm90_experts_gemv
from anybit.kernels.experts.sm90_grouped_gemm import sm90_grouped_gemm
from anybit.kernels.experts.sm90_grouped_gemm.sm90_grouped_gemm import Operands, Problem
from anybit.kernels.packed.packed_layout import unit_bytes
from anybit.kernels.packed.packed_tiles import prepare
from anybit.scheme import Scheme
from anybit.tune.processes import compile_kernels
from timing import RESULTS, Captured, merge_rows, replays_at_full_clocks, rest, rotations, stamp, time_in_turns

CASES = {
    "qwen3-30b": (128, 8, 2048, 768),
    "mixtral": (8, 2, 4096, 14336),
    "deepseek-v3": (32, 8, 7168, 2048),
    "gpt-oss-120b": (128, 4, 2880, 2880),
}
"""Experts, experts a token, hidden and inner size. deepseek-v3: the 32 experts of one of eight ranks, chosen by all."""
SCHEMES = {**dict.fromkeys((1, 4, 16, 64), ("w4a16g128", "w2a16g128")), 4096: ("w4a16g128", "w4a8")}
"""By tokens, for all but gpt-oss, whose weights are MXFP4. Others: w4a16g128."""
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
TOLERANCE = {16: 1.6e-2, 8: 2.4e-2}
"""Mean relative error, by the bits of activations."""
KEY = ("case", "scheme", "tokens", "routing", "dtype")
Call = Callable[[Tensor, Tensor, Tensor, int], object]


@dataclass(frozen=True)
class Case:
    """One row: a mixture's shape, the scheme of its weights, tokens, and how they choose."""

    name: str
    scheme: str
    tokens: int
    routing: str = "uniform"

    def problem(self, device: Device) -> Problem:
        """Both products."""
        (count, top, hidden, inner), scheme = CASES[self.name], Scheme.parse(self.scheme)
        return Problem(
            self.tokens, top, count, hidden, inner, scheme.weights, scheme.weights, scheme.activations, device=device,
            id_words=1,
        )  # fmt: skip

    def router(self, device: Device) -> router.Problem:
        """The router before them."""
        count, top, hidden, _ = CASES[self.name]
        return router.Problem(self.tokens, hidden, count, top, device=device)

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's tiles without padding."""
        _, _, hidden, inner = CASES[self.name]
        return 3 * inner * hidden * unit_bytes(Scheme.parse(self.scheme).weights) // (16 * 128)

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


def few(p: Problem) -> bool:
    """Whether tokens run by the kernel for few of them."""
    return not p.activations.quantized and not sm90_grouped_gemm.pays(p, sm90_experts_gemv.MOST_TOKENS)


def launches(p: Problem, o: Operands) -> list[jit.Launch]:
    """Both products."""
    if not few(p):
        return sm90_grouped_gemm.launches(p, o)
    gate_up = sm90_experts_gemv.Problem(
        p.tokens, p.top_k, p.experts, 2 * p.inner, p.hidden, p.gate_up, False, dtype=p.dtype, device=p.device
    )
    down = replace(gate_up, n=p.hidden, k=p.inner, weights=p.down, down=True)
    first, second = (sm90_experts_gemv.default(one) for one in (gate_up, down))
    launch = sm90_experts_gemv.launch
    return [
        launch(gate_up, first, o.gate_up, o.x, p.hidden, o.scratch, p.inner, o.ids, 1),
        launch(down, second, o.down, o.scratch, p.inner, o.y, p.hidden, o.ids, 1, routing=o.weights),
    ]


def scratch_bytes(p: Problem) -> int:
    """Bytes between both products."""
    return 2 * p.slots * p.inner if few(p) else sm90_grouped_gemm.scratch(p)


def random_weight(n: int, k: int, scheme: str, generator: torch.Generator) -> QuantizedWeight:
    """Uniform codes, made on the GPU."""
    format = Scheme.parse(scheme).weights
    shape, groups = (n, words_per_row(k, format.bits)), format.groups(k)
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda", generator=generator)
    scale = (torch.rand(n, groups, device="cuda", generator=generator) + 0.5) * 0.02 / 2 ** (format.bits - 1)
    return QuantizedWeight(words, scale, None, (n, k), format)


class Bench:
    """The weights of a case's shape and format, in copies beyond L2."""

    def __init__(self, case: Case) -> None:
        self.problem, self.generator = case.problem(Device.at(0)), torch.Generator("cuda").manual_seed(0)
        p, order = self.problem, "a8" if self.problem.activations.quantized else "a16"
        self.weights, self.copies = [], []
        for _ in range(rotations(p.experts * case.expert_bytes, 4)):
            shapes = (p.experts * 2 * p.inner, p.hidden), (p.experts * p.hidden, p.inner)
            self.weights = [random_weight(n, k, case.scheme, self.generator) for n, k in shapes]
            self.copies.append([prepare(weight, order).pointers[:3] for weight in self.weights])

    def call(self, case: Case) -> tuple[Call, Tensor]:
        """The call with copy i, and its y."""
        p = case.problem(self.problem.device)
        y = torch.empty(p.tokens, p.hidden, dtype=p.dtype, device="cuda")
        room = torch.empty(scratch_bytes(p), dtype=torch.uint8, device="cuda")

        def call(x: Tensor, ids: Tensor, weights: Tensor, i: int) -> object:
            gate_up, down = self.copies[i % len(self.copies)]
            for one in launches(p, Operands(x, p.hidden, ids, weights, gate_up, down, y, room)):
                jit.launch(one.kernel, one.params, one.grid, pdl=one.pdl)
            return y

        return call, y

    def times(self, case: Case, calls: dict[str, Call], floor: float) -> dict[str, float]:
        """Microseconds of a call each, without the kernel that writes ids."""
        count = max(2, min(64, int(2000 / floor)))
        routes = case.routes(min(count, 16), self.generator)
        x = self.activations(case.tokens)
        ids = torch.empty_like(routes[0][0])

        def written(i: int) -> None:
            torch.add(routes[i % len(routes)][0], 0, out=ids)

        def both(call: Call) -> Callable[[int], None]:
            def run(i: int) -> None:
                written(i)
                call(x, ids, routes[i % len(routes)][1], i)

            return run

        graphs = [Captured(written, count), *(Captured(both(call), count) for call in calls.values())]
        p = self.problem
        operations = 6.0 * case.tokens * p.top_k * p.hidden * p.inner * count
        rest(operations)
        alone, *found = time_in_turns(graphs, replays_at_full_clocks(sum(1.5 * floor * count for _ in calls), 11))
        return {name: round(one.us - alone.us, 2) for name, one in zip(calls, found, strict=True)}

    def routed_us(self, case: Case, call: Call, floor: float) -> float:
        """Microseconds of the router and a call, without the kernel that writes x."""
        p, count = case.problem(self.problem.device), max(2, min(64, int(2000 / floor)))
        rows, x = [self.activations(p.tokens) for _ in range(16)], self.activations(p.tokens)
        ids = torch.empty(p.tokens, p.top_k, dtype=torch.int32, device="cuda")
        shares = torch.empty(p.tokens, p.top_k, device="cuda")
        weight = torch.randn(p.experts, p.hidden, device="cuda", generator=self.generator).bfloat16()
        weights = [weight.clone() for _ in range(rotations(2 * weight.numel()))]
        asked = case.router(p.device)

        def written(i: int) -> None:
            torch.add(rows[i % len(rows)], 0, out=x)

        def routed(i: int) -> None:
            written(i)
            one = router.launch(asked, x, p.hidden, weights[i % len(weights)], ids, shares)
            jit.launch(one.kernel, one.params, one.grid, pdl=True)
            call(x, ids, shares, i)

        graphs = [Captured(one, count) for one in (written, routed)]
        alone, found = time_in_turns(graphs, replays_at_full_clocks(1.5 * floor * count, 11))
        return round(found.us - alone.us, 2)

    def activations(self, tokens: int) -> Tensor:
        """Random x."""
        return torch.randn(tokens, self.problem.hidden, device="cuda", generator=self.generator).bfloat16()

    def error(self, case: Case, call: Call, y: Tensor) -> float:
        """Mean relative error of up to eight tokens."""
        p, (ids, weights) = self.problem, case.routes(1, self.generator)[0]
        x, sample = self.activations(case.tokens), slice(None, None, -(-case.tokens // 8))
        y.fill_(torch.nan)
        call(x, ids, weights, len(self.copies) - 1)
        exact = reference.experts(
            x[sample], ids[sample], weights[sample], *self.weights, (2 * p.inner, p.hidden), p.experts, p.activations,
            "silu",
        ).float()  # fmt: skip
        return float((y[sample].float() - exact).abs().mean() / exact.abs().mean())

    def floor_us(self, case: Case) -> float:
        """Distinct experts' bytes at 4.67 TB/s, on average, or operations at 931 or 1,860 TOPS."""
        p = self.problem
        hit = statistics.mean(len(ids.unique()) for ids, _ in case.routes(16, self.generator))
        rate = 1860e6 if p.activations.quantized else 931e6
        return max(hit * case.expert_bytes / 4.67e6, 6.0 * case.tokens * p.top_k * p.hidden * p.inner / rate)


class Peers:
    """vLLM's experts of a shape: Marlin (w4a16g128; it refuses sizes that 128 does not divide) and Triton (bf16)."""

    def __init__(self, p: Problem) -> None:
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
        from vllm.scalar_type import scalar_types

        e, h, n, like = p.experts, p.hidden, p.inner, {"dtype": torch.bfloat16, "device": "cuda"}
        dense = [torch.randn(e, 2 * n, h, **like) * 0.02, torch.randn(e, h, n, **like) * 0.02]
        self.calls: dict[str, Call] = {"triton bf16": lambda x, ids, w, i: fused_experts(x, *dense, w, ids)}
        if h % 128 or n % 128:
            return
        shapes = (e, h // 16, 4 * n), (e, n // 16, 2 * h)
        copies = [
            [torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device="cuda") for shape in shapes]
            for _ in range(rotations(3 * e * h * n // 2, 4))
        ]
        scales = [torch.rand(e, k // 128, rows, **like) * 0.01 for k, rows in ((h, 2 * n), (n, h))]
        kind = scalar_types.uint4b8.id
        self.calls["marlin w4a16g128"] = lambda x, ids, w, i: fused_marlin_moe(
            x, *copies[i % len(copies)], None, None, *scales, w, ids, kind
        )


def measured(case: Case, bench: Bench, peers: dict[str, Call]) -> dict[str, object]:
    """A row."""
    call, y = bench.call(case)
    error, floor = bench.error(case, call, y), bench.floor_us(case)
    us = bench.times(case, {"us": call, **peers}, floor)
    routed = {"routed_us": bench.routed_us(case, call, floor)} if case.tokens == 1 else {}
    return {
        "case": case.name, "scheme": case.scheme, "tokens": case.tokens, "routing": case.routing, "dtype": "bfloat16",
        "us": us.pop("us"), **routed, "floor_us": round(floor, 2), "baselines": us, "error": round(error, 5),
        "checked": error < TOLERANCE[bench.problem.activations.bits], **stamp(),
    }  # fmt: skip


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """The rows asked for, shape by shape and scheme by scheme."""
    for name in given.case:
        usual = ("w4a16g32e2m1",) if name == "gpt-oss-120b" else ("w4a16g128", "w2a16g128", "w4a8")
        for scheme in given.scheme or usual:
            for tokens in given.tokens:
                if given.scheme or scheme in SCHEMES.get(tokens, usual[:1]) or name == "gpt-oss-120b":
                    yield from (Case(name, scheme, tokens, routing) for routing in given.routing)


def main() -> None:
    """Measure, or compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--scheme", nargs="+")
    parser.add_argument("--routing", nargs="+", default=["uniform"], choices=["uniform", "one"])
    for flag in ("--dry", "--peers", "--compile"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    device = Device.named("sm_90a")
    operands = Operands(0, 0, 0, 0, (0, 0, 0), (0, 0, 0), 0, jit.Slot("room"))
    kernels = {one.kernel for case in cases(given) for one in launches(case.problem(device), operands)}
    kernels |= {router.kernel(router.config_of(case.router(device))) for case in cases(given) if case.tokens == 1}
    compile_kernels([(kernel, "sm_90a") for kernel in kernels])
    if given.compile:
        return
    rows, bench, peers, shape, name = [], None, {}, None, None
    for case in cases(given):
        if given.peers and case.name != name:
            name = case.name
            bench, peers, shape = None, {}, None
            torch.cuda.empty_cache()
            peers = Peers(case.problem(Device.at(0))).calls
        if (case.name, case.scheme) != shape:
            bench, shape = None, (case.name, case.scheme)
            torch.cuda.empty_cache()
            bench = Bench(case)
        assert bench is not None
        own = case.scheme in ("w4a16g128", "w4a16g32e2m1")
        rows.append(measured(case, bench, peers if own else {}))
        print(rows[-1], flush=True)
        if not given.dry:
            merge_rows(RESULTS / "h200" / "moe.json", rows[-1:], KEY)


if __name__ == "__main__":
    main()
