"""The GPU side of a search: layers with random weights, a check of each candidate, and timing of many in one graph."""

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor

from anybit.choose.families import FAMILIES, Candidate, GemmFamily, Layout, quantizer
from anybit.codes import reference
from anybit.codes.packing import QuantizedWeight, words_per_row
from anybit.device import Device
from anybit.jit import Config, Launch, Plan, Slot
from anybit.kernels.bitplane import bitplane_layout
from anybit.kernels.bitplane.bitplane_layout import PlaneWeight
from anybit.kernels.block import quantize_activations
from anybit.kernels.block.quantize_activations import Packed
from anybit.kernels.gemm_kernel import launches
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.multiply import product
from anybit.kernels.packed import packed_tiles
from anybit.kernels.packed.packed_layout import PackedWeight
from anybit.scheme import ActivationFormat, WeightFormat

_ROTATE_BYTES = 160 << 20
"""Timed calls rotate through at least this many bytes of weights, 2.7 times the L2 of an H200, to avoid L2 hits."""
_SAMPLE = 128
_TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
_FP8_TOLERANCE = 1e-2  # fp8 tensor cores accumulate with about 14 bits


@dataclass(frozen=True)
class TimingBudget:
    """Timing effort: microseconds of calls per candidate and graph, replays in the first and last round."""

    microseconds: float = 60.0
    replays: int = 2
    final_replays: int = 5
    finalists: int = 4
    margin: float = 1.2


@dataclass(frozen=True)
class Time:
    """Microseconds of a call, and whether they come from the final, careful round."""

    us: float
    final: bool


class Facts(TypedDict):
    """What a map says about where it was measured; ``torch`` is its version."""

    device: Device
    driver: str
    torch: str


_Shared = TypeVar("_Shared")


class WrongResultError(Exception):
    """A candidate's result differs from the reference."""


@dataclass(eq=False)
class Layer:
    """Random weights of one shape and format: sampled rows to check against, and copies in each layout requested."""

    weight: QuantizedWeight
    rows: Tensor
    sample: Tensor
    copies: dict[Layout, list[PackedWeight | PlaneWeight]] = field(default_factory=dict)

    @staticmethod
    def random(n: int, k: int, format: WeightFormat, device: torch.device) -> "Layer":
        """Random codes with scales of both signs, so that sums neither grow nor cancel."""
        generator = torch.Generator(device).manual_seed(n * 31 + k)
        shape = (n, words_per_row(k, format.bits))
        words = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device, generator=generator)
        groups = format.groups(k)
        if format.code == "e4m3":
            words &= 0x77777777  # no NaN
        scale = (torch.rand(n, groups, device=device, generator=generator) + 0.5) * (1.0 / 2**format.bits / k**0.5)
        scale *= torch.randint(0, 2, scale.shape, device=device, generator=generator) * 2 - 1
        zero = None
        if format.code == "asym":
            zero = torch.full((n, groups), 2 ** (format.bits - 1), dtype=torch.uint8, device=device)
        scale = scale.half().float()
        minimum = -scale * 2 ** (format.bits - 1) if format.code == "min" else None
        weight = QuantizedWeight(words, scale, zero, (n, k), format, minimum=minimum)
        rows = torch.randint(0, n, (min(n, _SAMPLE),), device=device, generator=generator)
        return Layer(weight, rows, weight.rows(rows).dequantize(torch.float32).double())

    def laid_out(self, layout: Layout) -> list[PackedWeight | PlaneWeight]:
        """Copies of the weights in a layout, enough to defeat the caches."""
        if layout not in self.copies:
            codes, first = _CODES[layout], _PREPARE[layout](self.weight)
            count = max(2, min(256, -(-_ROTATE_BYTES // max(getattr(first, codes).numel(), 1))))
            others = (replace(first, **{codes: getattr(first, codes).clone()}) for _ in range(count - 1))
            self.copies[layout] = [first, *others]
        return self.copies[layout]


_CODES = {Layout.planes: "planes", Layout.tiles_a16: "tiles", Layout.tiles_a8: "tiles"}
"""The attribute that holds the codes, by layout."""
_PREPARE: dict[Layout, Callable[[QuantizedWeight], PackedWeight | PlaneWeight]] = {
    Layout.planes: bitplane_layout.prepare,
    Layout.tiles_a16: packed_tiles.prepare,
    Layout.tiles_a8: lambda weight: packed_tiles.prepare(weight, "a8"),
}


class Bench:
    """One product on the GPU."""

    def __init__(self, product: LinearProblem, layer: Layer, stream: torch.cuda.Stream) -> None:
        self.product, self.layer, self.stream = product, layer, stream
        device = layer.rows.device
        m, n, k = product.m, product.n, product.k
        generator = torch.Generator(device).manual_seed(m)
        pitch = quantize_activations.pitch(k, 2)  # as ops passes rows to kernels
        self.x = torch.randn(m, pitch, device=device, generator=generator).to(product.dtype)[:, :k]
        self.y = torch.empty(m, n, device=device, dtype=product.dtype)
        self.tokens = torch.arange(m, device=device)
        if m > _SAMPLE:
            self.tokens = torch.cat((self.tokens[: _SAMPLE // 2], self.tokens[-_SAMPLE // 2 :]))
        self._shared: dict[Hashable, Any] = {}

    def expected(self, activations: ActivationFormat) -> Tensor:
        """The reference's result for the sampled tokens and rows, float64."""

        def make() -> Tensor:
            x = self.x[self.tokens]
            if not activations.quantized:
                return x.double() @ self.layer.sample.T
            return reference.quantize_activations(x, activations).dequantize(torch.float64) @ self.layer.sample.T

        return self._once(activations, make)

    def _once(self, key: Hashable, make: Callable[[], _Shared]) -> _Shared:
        """A value shared by all candidates, created once."""
        if key not in self._shared:
            self._shared[key] = make()
        found: _Shared = self._shared[key]
        return found

    def plan(self, candidate: Candidate) -> Plan:
        """The launches of a candidate, activation quantization included; its slots are a copy of the weights."""
        return self._once(candidate, lambda: self._made(candidate))

    def _made(self, candidate: Candidate) -> Plan:
        kernel, activations, before = FAMILIES[candidate.kernel].module, candidate.activations, list[Launch]()
        asked, target = replace(self.product, activations=activations), kernel.traits.target
        x: Tensor | Packed = self.x
        if activations.quantized:
            key = activations, target
            x = codes = self._once(key, lambda: Packed(asked.m, asked.k, *key, self.x.device))
            source = quantize_activations.problem_of(self.x, *key)
            how = quantizer(asked, target), codes.pointers, self.x, self.x.stride(0), self.x.device
            before.append(quantize_activations.made(source, *how))
        weight = self.layer.laid_out(candidate.layout)[0]
        problem, operands = product(kernel, x, weight, self.y)
        slots = Slot("0"), Slot("1"), Slot("2"), Slot("3")
        operands = replace(operands, weight=slots, scratch=self._scratch(kernel, problem, candidate.config))
        made = launches(kernel, operands, problem, candidate.config)
        return Plan([*before, *made], "0123", self.y.get_device())

    def _scratch(
        self, kernel: GemmFamily, problem: LinearProblem, config: Config
    ) -> tuple[Tensor | None, Tensor | None]:
        """Scratch memory for every config of a kernel: one for each candidate would add up to some 10 GB."""
        if not any(kernel.traits.scratch(problem, config)):
            return None, None

        def make() -> tuple[Tensor, Tensor]:
            sizes = zip(*(kernel.traits.scratch(problem, one) for one in kernel.configs(problem)), strict=True)
            room, zeros = (torch.zeros(max(size), dtype=torch.uint8, device=self.y.device) for size in sizes)
            return room, zeros

        return self._once((kernel.traits.name, problem), make)

    def again(self, candidate: Candidate) -> Callable[[int], object]:
        """A function that runs a candidate on the i-th copy of the weights."""
        plan, copies = self.plan(candidate), self.layer.copies[candidate.layout]
        places = [[0 if one is None else one.data_ptr() for one in copy.pointers] for copy in copies]
        return lambda i: plan.run(places[i % len(places)])

    def check(self, candidate: Candidate) -> None:
        """Run a candidate once and compare it with the reference. Raises WrongResultError."""
        self.y.fill_(torch.nan)
        self.again(candidate)(0)
        found = self.y[self.tokens][:, self.layer.rows].double()
        expected = self.expected(candidate.activations)
        error = float((found - expected).abs().mean() / expected.abs().mean())
        fp8 = candidate.activations.quantized and not candidate.activations.integer
        most = max(_TOLERANCE[self.product.dtype], _FP8_TOLERANCE if fp8 else 0.0)
        if not error < most:
            raise WrongResultError(f"its mean relative error is {error:.2e}, and {most:.1e} is allowed")
        if bool(self.y.isnan().any()):
            raise WrongResultError("parts of the result were not written")

    def times(
        self, candidates: Sequence[Candidate], keep: Collection[int], effort: TimingBudget, guess_us: float
    ) -> list[Time]:
        """The time of a call of each candidate.

        Candidates are captured in one graph, one after another, so that all run at the same clocks. The better half of
        each strategy advances, with twice the calls, until no more than ``finalists`` are left, which are timed with
        the most replays. Candidates beyond ``margin`` times their strategy's best, or of a strategy far behind, drop
        out at once; ``keep`` (what would run) only with such a strategy.
        """
        calls = [self.again(candidate) for candidate in candidates]
        once = guess_us > _ROUGH
        counts = [1 if once else calls_in(effort.microseconds, guess_us)] * len(calls)
        us = race(self.stream, calls, counts, min(1, effort.replays) if once else effort.replays)
        alive, microseconds, last = list(range(len(calls))), effort.microseconds, len(calls) == 1
        while effort.final_replays and not last:
            names = [candidates[i].strategy for i in alive]
            better = finalists(names, [us[i] for i in alive], [p for p, i in enumerate(alive) if i in keep], effort)
            alive = [alive[place] for place in better]
            others = Counter(candidates[i].strategy for i in alive if i not in keep)
            last = max(others.values(), default=0) <= effort.finalists
            microseconds *= 2
            replays = max(2, min(effort.final_replays, round(4000 / min(us)))) if last else effort.replays
            counts = [calls_in(microseconds, us[i], MOST_CALLS if last else _CALLS) for i in alive]
            how = race_in_orders if last else race
            for i, found in zip(alive, how(self.stream, [calls[i] for i in alive], counts, replays), strict=True):
                us[i] = found
        return [Time(found, i in alive) for i, found in enumerate(us)]


class Runner:
    """Checks and times candidates on the current CUDA device; keeps the weights of the last layer."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device)
        self._layer: Layer | None = None

    def describe(self) -> Facts:
        """The Device, and the driver and torch versions for a map's origin."""
        from cuda.bindings import driver

        _, version = driver.cuDriverGetVersion()
        found = Device.of(torch.empty(0, device=self.device))
        return {"device": found, "driver": _driver_version() or f"CUDA {version}", "torch": torch.__version__}

    def prepare(self, product: LinearProblem) -> Bench:
        """The Bench of a product: inputs, outputs and weights."""
        shape, layer = (product.n, product.k), self._layer
        if layer is None or (layer.weight.shape, layer.weight.format) != (shape, product.weights):
            if layer is not None:
                self._layer = layer = None
                torch.cuda.empty_cache()
            layer = self._layer = Layer.random(*shape, product.weights, self.device)
        return Bench(product, layer, self.stream)


def _driver_version() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return ""
    return next((word for word in words if "." in word and word[0].isdigit()), "")


def finalists(strategies: Sequence[str], us: Sequence[float], keep: Collection[int], effort: TimingBudget) -> list[int]:
    """Indices to time again: the better half of each strategy, or all if they are few."""
    best = min(us)
    chosen: set[int] = set()
    for strategy in dict.fromkeys(strategies):
        mine = sorted((i for i, name in enumerate(strategies) if name == strategy), key=us.__getitem__)
        if us[mine[0]] > 2 * best:
            continue
        most = max(effort.finalists, len(mine) // 2)
        chosen.update([i for i in mine if us[i] <= effort.margin * us[mine[0]]][:most])
        chosen.update(i for i in mine if i in keep)
    return sorted(chosen)


_ROUGH = 60.0
"""Calls longer than this (us) are timed once in the first round: slow candidates stand out from the noise."""
_LONG = 300.0
"""Calls longer than this (us) need only one call per graph and no warm-up call: start and end hardly matter."""
_CALLS, MOST_CALLS = 16, 48
"""Most calls of a candidate per graph; the second in the last round, where events with an error of some tenths of a
microsecond have to tell short calls apart that differ by 5 %."""


def calls_in(microseconds: float, guess_us: float, most: int = _CALLS) -> int:
    """Number of calls of a candidate in a graph."""
    return max(1 if guess_us > _LONG else 2, min(most, round(microseconds / max(guess_us, 0.5))))


_PLACED = 60.0
"""Calls shorter than this (us) depend on the GPU clock's ticks and on the preceding kernel: one of 25 us differed by
4 % between two graphs (w4a16g128, 37888 x 3584)."""


def race(
    stream: torch.cuda.Stream, calls: Sequence[Callable[[int], object]], counts: Sequence[int], replays: int
) -> list[float]:
    """Microseconds per call, from one graph with ``counts`` calls of each between events; medians over replays.

    Short calls are preceded by an untimed one, which absorbs the overlap with the previous candidate; the first replay
    is a warm-up and does not count, except with ``replays`` 0, where it is the only one.
    """
    marks = [[torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)] for _ in calls]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    turn = 0
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            for call, count, (begin, end) in zip(calls, counts, marks, strict=True):
                if count > 1:
                    call(turn)
                begin.record(stream)
                for i in range(count):
                    call(turn + 1 + i)
                end.record(stream)
                turn += count + 1
        finally:
            graph.capture_end()
        found: list[list[float]] = []
        for _ in range(replays + 1):
            graph.replay()
            stream.synchronize()
            found.append([begin.elapsed_time(end) for begin, end in marks])
    rows = found[1:] or found
    return [statistics.median(row[i] for row in rows) * 1e3 / count for i, count in enumerate(counts)]


def race_in_orders(
    stream: torch.cuda.Stream, calls: Sequence[Callable[[int], object]], counts: Sequence[int], replays: int
) -> list[float]:
    """``race``, in three orders if any call is short: its time depends on its position in the graph."""
    places = list(range(len(calls)))
    half = len(places) // 2
    found: list[list[float]] = [[] for _ in calls]
    orders = (places, places[::-1], places[half:] + places[:half])
    for order in orders[: len(places)]:  # two calls: each comes first once
        us = race(stream, [calls[i] for i in order], [counts[i] for i in order], replays)
        for i, time in zip(order, us, strict=True):
            found[i].append(time)
        if min(us) >= _PLACED:
            break
    return [statistics.median(times) for times in found]
