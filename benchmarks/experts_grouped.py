"""Experts of many tokens on a GPU: us of all launches and of each, and of other token tiles.

    python benchmarks/experts_grouped.py [--schemes w4a16g128 w4a8g128] [--cases qwen3-30b] [--tokens 64 256] [--sweep]

Each call's ids are written by a copy in the same graph, whose time is subtracted.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch

from anybit import jit
from anybit.codes.packing import QuantizedWeight
from anybit.codes.reference import quantize_activations
from anybit.device import Device
from anybit.kernels.experts.sm90_grouped_gemm import sm90_grouped_gemm
from anybit.kernels.experts.sm90_grouped_gemm.sm90_grouped_gemm import Config, Operands, Problem
from anybit.kernels.packed.packed_tiles import prepare
from anybit.kernels.packed.sm90_gemm.sm90_packed_gemm_rules import TOKENS
from anybit.scheme import Scheme, WeightFormat

CASES = {"qwen3-30b": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336), "deepseek-v3": (32, 8, 7168, 2048)}
FLOORS = {
    "qwen3-30b": {64: 65.6, 256: 66.7, 1024: 83, 4096: 332},
    "mixtral": {64: 156, 256: 194, 1024: 775, 4096: 3100},
    "deepseek-v3": {64: 156, 256: 194, 1024: 775, 4096: 3100},
}
"""Bytes of the experts hit at 4.67 TB/s, or operations at 931 TFLOPS; us."""
_CALLS = 10


def tall(experts: int, n: int, k: int, form: WeightFormat) -> QuantizedWeight:
    """Random experts' weights."""
    codes = torch.randint(0, 2**form.bits, (experts * n, k), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(experts * n, form.groups(k), device="cuda") + 0.5) / (2**form.bits * k**0.5 / 4)
    zero = torch.full_like(scale, 2 ** (form.bits - 1), dtype=torch.uint8) if form.code == "asym" else None
    return QuantizedWeight.from_codes(codes, scale, zero, form)


def graph_us(call: Callable[[int], None]) -> float:
    """Median us of a call in a graph of ten."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(_CALLS):
                call(i)
        times = []
        for _ in range(15):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1000 * begin.elapsed_time(end) / _CALLS)
    return statistics.median(times[3:])


def expected(p: Problem, o: Operands, gate_up: QuantizedWeight, down: QuantizedWeight) -> torch.Tensor:
    """The exact product, in float32."""

    def coded(x: torch.Tensor) -> torch.Tensor:
        return (
            quantize_activations(x, p.activations).dequantize(torch.float32) if p.activations.quantized else x.float()
        )

    first, second = (w.dequantize(torch.bfloat16).view(p.experts, -1, w.shape[1]) for w in (gate_up, down))
    y = torch.zeros(p.tokens, p.hidden, device="cuda")
    for expert in range(p.experts):
        token, choice = (o.ids == expert).nonzero(as_tuple=True)
        rows = (coded(o.x[token]) @ first[expert].float().T).unflatten(1, (-1, 2, 8))
        gate, up = rows[:, :, 0].flatten(1), rows[:, :, 1].flatten(1)
        inner = coded((torch.nn.functional.silu(gate) * up).to(p.dtype))
        y.index_add_(0, token, o.weights[token, choice, None] * (inner @ second[expert].float().T))
    return y


def call_us(
    p: Problem, o: Operands, routes: list[torch.Tensor], configs: tuple[Config, Config], upto: int | None = None
) -> float:
    """Us of the launches (or the first ``upto`` of them), without the copy of ids."""
    room = torch.empty(sm90_grouped_gemm.scratch(p, configs), dtype=torch.uint8, device="cuda")
    launches = sm90_grouped_gemm.launches(p, replace(o, scratch=room), configs)[:upto]

    def copy(i: int) -> None:
        assert isinstance(o.ids, torch.Tensor)
        o.ids.copy_(routes[i])

    def call(i: int) -> None:
        copy(i)
        for one in launches:
            jit.launch(one.kernel, one.params, one.grid, pdl=one.pdl)

    return graph_us(call) - graph_us(copy)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schemes", nargs="+", default=["w4a16g128", "w4a8g128"])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 256, 1024, 4096])
    parser.add_argument("--sweep", action="store_true")
    asked = parser.parse_args()
    for scheme in asked.schemes:
        form = Scheme.parse(scheme)
        for case in asked.cases:
            count, top_k, hidden, inner = CASES[case]
            torch.manual_seed(0)
            gate_up, down = tall(count, 2 * inner, hidden, form.weights), tall(count, hidden, inner, form.weights)
            order = "a8" if form.activations.quantized else "a16"
            packed = [prepare(one, order).pointers[:3] for one in (gate_up, down)]
            for tokens in asked.tokens:
                p = Problem(
                    tokens, top_k, count, hidden, inner, form.weights, form.weights, form.activations,
                    device=Device.at(0),
                )  # fmt: skip
                x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
                routes = [torch.rand(tokens, count, device="cuda").topk(top_k).indices for _ in range(_CALLS)]
                ids, weights = routes[0].clone(), torch.full((tokens, top_k), 1 / top_k, device="cuda")
                o = Operands(x, hidden, ids, weights, packed[0], packed[1], torch.empty_like(x), x)
                chosen = sm90_grouped_gemm.default(p)
                total = call_us(p, o, routes, chosen)
                ids.copy_(routes[_CALLS - 1])
                wanted = expected(p, o, gate_up, down)
                error = float((o.y.float() - wanted).abs().mean() / wanted.abs().mean())
                parts = [call_us(p, o, routes, chosen, n) for n in range(1, 5 + 2 * form.activations.quantized)]
                steps = [f"{b - a:.1f}" for a, b in zip([0.0, *parts[:-1]], parts, strict=True)]
                shapes = [(c.tile_m, c.row_warpgroups, c.stages, c.span) for c in chosen]
                floor = FLOORS[case].get(tokens, 0)
                print(
                    f"{scheme} {case} {tokens}: {total:.1f} us, floor {floor}, error {error:.4f}",
                    steps,
                    shapes,
                    flush=True,
                )
                if asked.sweep:
                    mean = p.slots / count
                    for tile_m in TOKENS:
                        if (mean / 8 <= tile_m <= max(4 * mean, 32)) and (
                            found := sm90_grouped_gemm.configs(p, tile_m)
                        ):
                            rows = [(c.row_warpgroups, c.stages, c.span) for c in found]
                            print(f"    {tile_m}: {call_us(p, o, routes, found):.1f}", rows, flush=True)


if __name__ == "__main__":
    main()
