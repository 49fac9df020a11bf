"""What a map is worth in whole models: time to first token and tokens a second by it, and by built-in choices alone.

A model of Llama-3-8B's shape or another's with random codes holds its layers in both layouts (``bitwise+packed``; with
16-bit activations in tiles), so that both dispatchers run the same tensors in the same process. A point is one CUDA
graph of the whole model: embedding, norms, attention, every linear layer and the head of the last token. Prefill: a
batch of prompts; decode: a step of ``generate`` over a static cache (kv16), a token for each sequence of a batch after
a history of 512: the attention before the output projection decides which of its kernels is faster.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from anybit.kernels.gemm.families import FAMILIES, Layout, tiles_of
from anybit.kernels.gemm.linear_problem import LinearProblem
from anybit.scheme import Scheme
from anybit.tune import dispatch as dispatching
from anybit.tune.dispatch import Choice, Dispatcher
from anybit.tune.policy import read
from layers import MODELS
from timing import merge_rows, stamp, worst_of

PROMPTS = (16, 32, 64, 128, 256, 512, 1024)
BATCHES = (1, 2, 4, 8)
_FIRST = [(batch, prompt) for batch in BATCHES for prompt in (1, 16, 128, 1024)]
"""Measured first, where time may run out."""
ROW_KEY = ("case", "scheme", "batch", "prompt")
LAYERS = 32
"""Of a whole Llama-3-8B, whose rows alone are called whole."""
CONTEXT = 512
"""Tokens of the history of a decoding step."""
_STEPS = 4
"""Steps timed in a row, so that the GPU never waits for the host; the first is left out."""


class Another(Dispatcher):
    """A dispatcher that runs another config of each kernel: never timed, but its results are compared."""

    def choose(
        self, product: LinearProblem, layouts: Collection[Layout] | None = None, allow: Collection[str] = ()
    ) -> Choice:
        """The same kernel as the map's choice, with another config."""
        chosen = super().choose(product, layouts, allow).candidate
        configs = FAMILIES[chosen.kernel].promising(product, 1000)
        return Choice(replace(chosen, config=next(one for one in configs if one != chosen.config)), "built in")


@torch.inference_mode()
def whole_models(options: argparse.Namespace) -> None:
    """Measure the variants at all points, in turns at each; rows are written scheme by scheme."""
    import anybit
    from generate_models import random_model, sizes_of

    began = time.perf_counter()
    gpu = torch.cuda.get_device_name()
    policies = [read(options.map)] if options.map else dispatching.dispatcher(gpu).policies
    marks = stamp()
    shapes = MODELS[options.model]
    for share, scheme in enumerate(options.schemes, 1):
        model = random_model(scheme, options.layers, prepare=False, sizes=sizes_of(shapes))
        anybit.fuse(model)
        planes = Scheme.parse(scheme).activations.quantized
        anybit.use_backend(model, "bitwise+packed" if planes else "packed")
        torch.cuda.synchronize()
        passed = time.perf_counter() - began
        print(f"{scheme} is there: {torch.cuda.memory_allocated() >> 20} MiB, {passed:.1f} s", flush=True)
        variants = {"dispatch": Dispatcher(gpu, policies), "built in": Dispatcher(gpu, [])}
        points = [(batch, 1) for batch in options.batches]
        points += [(batch, prompt) for prompt in options.prompts for batch in options.batches]
        points.sort(key=lambda point: point not in _FIRST)
        rows: list[dict[str, Any]] = []
        for batch, prompt in points:
            if time.perf_counter() - began > options.seconds * share / len(options.schemes):
                print(f"{scheme}: no time for batch {batch}, prompt {prompt} and what follows", flush=True)
                break
            try:
                row = _point(model, options.model, scheme, batch, prompt, variants, gpu, options.layers)
            except ValueError as error:
                print(f"WRONG, left out: {error}", flush=True)
                continue
            print(row["case"], scheme, batch, prompt, row["us"], row["variants"], row["check"], flush=True)
            rows.append(row | {"layers": options.layers} | marks)
            merge_rows(options.rows, rows, ROW_KEY)
        dispatching.use()
        del model
        torch.cuda.empty_cache()


def _point(
    model: Any, shape: str, scheme: str, batch: int, prompt: int, variants: dict[str, Dispatcher], gpu: str, layers: int
) -> dict[str, Any]:
    from generate_models import packed_cache

    ids = torch.arange(batch * prompt, device="cuda").view(batch, prompt)
    graphs: dict[tuple[str, ...], _Graph | _Step] = {}
    runs: dict[str, tuple[str, ...]] = {}
    cache = packed_cache(model, "kv16", batch, CONTEXT) if prompt == 1 else None
    for name, variant in variants.items():
        key = runs[name] = _what_runs(variant, shape, scheme, batch * prompt)
        if key not in graphs:
            _decide_by(variant, gpu)
            graphs[key] = _Graph(model, ids, warm=not graphs) if cache is None else _Step(model, ids, cache)
    compared, names = dict(graphs), dict(runs)
    if len(graphs) == 1:  # all run the same kernels: another config of each, which is not timed, to compare with
        other = Another(gpu, variants["dispatch"].policies)
        names["another"] = _what_runs(other, shape, scheme, batch * prompt)
        _decide_by(other, gpu)
        compared[names["another"]] = _Graph(model, ids, warm=False) if cache is None else _Step(model, ids, cache)
    error = _compare(f"{scheme}, batch {batch}, prompt {prompt}", compared, names)
    times: dict[tuple[str, ...], list[float]] = {key: [] for key in graphs}
    longest, turns = 0.0, 0
    while turns < (7 if longest < 20e3 else 2):
        for key, graph in graphs.items():
            times[key].append(graph.replay())
            longest = max(longest, times[key][-1])
        turns += 1
    us = {name: round(statistics.median(times[key]) if turns > 2 else min(times[key]), 1) for name, key in runs.items()}
    what = "whole" if (shape, layers) == ("Llama-3-8B", LAYERS) else f"{layers} layers"
    case = f"{shape.lower()} {what}, {'decode' if prompt == 1 else 'prefill'}"
    row: dict[str, Any] = {"case": case, "scheme": scheme}
    row |= {"batch": batch, "prompt": None if prompt == 1 else prompt, "m": batch * prompt, "us": us["dispatch"]}
    row |= {"variants": us, "how": "a CUDA graph of the whole model; variants that run the same kernels share a time"}
    if prompt == 1:
        row["how"] = f"a step of generate over a static cache (kv16) after {CONTEXT} tokens, {_STEPS} in a row"
        row["tokens_per_second"] = round(batch * 1e6 / us["dispatch"], 1)
    else:
        row["ttft_ms"] = round(us["dispatch"] / 1e3, 3)
    return row | {"checked": True, "check": f"logits of {len(compared)} sets of kernels within {error:.1e}"}


def _compare(what: str, graphs: dict[tuple[str, ...], Any], runs: dict[str, tuple[str, ...]]) -> float:
    """How far the variants' logits are from the first one's, at most.

    Raises ValueError where that is more than a turned code explains: it says which variants, and whether they part in
    another pass, too.
    """

    def errors() -> dict[str, float]:
        first = next(iter(graphs.values())).out.float()
        return {name: float((graphs[key].out.float() - first).norm() / first.norm()) for name, key in runs.items()}

    found = errors()
    if not worst_of(found.values()) < 2e-2:
        for graph in graphs.values():
            graph.replay()
        raise ValueError(f"{what}: logits part from the first variant's by {found}, and in another pass by {errors()}")
    return max(found.values())


def _what_runs(variant: Dispatcher, shape: str, scheme: str, m: int) -> tuple[str, ...]:
    """The configs of the four layers: variants that agree in all of them are the same."""
    s = Scheme.parse(scheme)
    products = [LinearProblem(m, n, k, s.weights, s.activations) for n, k in MODELS[shape]]
    both = (Layout.planes, tiles_of(s.activations))
    return tuple(variant.choose(p, variant.in_fused(p, both)).candidate.name for p in products)


def _decide_by(variant: Dispatcher, gpu: str) -> None:
    """Have all layers ask this dispatcher anew."""
    dispatching.use()
    dispatching._dispatchers[gpu] = variant


class _Step:
    """A step of ``generate`` by what is decided now, which the model captures at its first calls."""

    def __init__(self, model: Any, ids: torch.Tensor, cache: Any) -> None:
        self._decoder, self._cache = model._anybit_decoder, cache
        self._call = lambda: model(input_ids=ids[:, :1], past_key_values=cache).logits
        self._graphs: dict[Any, Any] = type(self._decoder.graphs)()
        self._again()
        for _ in range(3):
            self._call()
        self.out = torch.empty(0)
        self.replay()

    def _again(self) -> None:
        """The history alone, and this step's own graph."""
        self._decoder.graphs = self._graphs
        for row in self._cache.rows:
            self._cache.store.crop(row, CONTEXT)
        self._cache.seen = CONTEXT

    def replay(self) -> float:
        """Microseconds of a step; ``out``: the logits of the first one after the history."""
        self._again()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_STEPS + 1)]
        for i, mark in enumerate(marks):
            mark.record()
            if i < _STEPS:
                logits = self._call()
            if i == 0:
                self.out = logits.clone()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks[1:])) * 1e3


class _Graph:
    """One pass of a model in a CUDA graph."""

    def __init__(self, model: Callable[..., Any], ids: torch.Tensor, warm: bool) -> None:
        def call() -> torch.Tensor:
            logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=1).logits
            return logits

        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        if warm:  # what else is loaded at a first call is no kernel of ours: those are loaded while they are recorded
            with torch.cuda.stream(self._stream):
                call()
            self._stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._graph.capture_begin()
            try:
                self.out = call()
            finally:
                self._graph.capture_end()
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.replay()

    def replay(self) -> float:
        """Microseconds of a pass."""
        begin, end = self._marks
        with torch.cuda.stream(self._stream):
            begin.record()
            self._graph.replay()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3
