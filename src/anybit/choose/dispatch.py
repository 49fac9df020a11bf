"""The policy maps of this process: read once, consulted for every choice.

Maps in order of precedence: those passed to ``use``, the user's own for this GPU (``policy.own_file``), the shipped
ones. A map of another GPU only offers neighbours.
"""

import os
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from anybit.choose.builtin import step
from anybit.choose.choose import Map
from anybit.choose.families import FAMILIES, GemmFamily, Layout
from anybit.choose.heuristics import among_small, limit_occupancy
from anybit.choose.policy import SHIPPED, Policy, own_file, usable
from anybit.jit import Config
from anybit.kernels.linear_problem import LinearProblem


class Dispatcher(Map):
    """The policy maps of one GPU. hints: maps of other GPUs."""

    def __init__(self, gpu: str, policies: Collection[Policy]) -> None:
        self.gpu = gpu
        self.policies = [policy for policy in policies if policy.origin.gpu == gpu]
        self.hints = [policy for policy in policies if policy.origin.gpu != gpu]
        super().__init__([*self.policies, *self.hints])


_given: list[Policy] = []
_dispatchers: dict[str, Dispatcher] = {}
_forgets: list[Callable[[], None]] = []


def chosen(problem: LinearProblem, layout: Layout, fused: bool) -> tuple[GemmFamily, Config]:
    """The kernel and config that run a problem of weights in a layout. fused: between the small kernels of a layer."""
    like = replace(problem, m=step(problem.m))
    candidate = dispatcher(problem.device.name).choose(like, layout).candidate
    config = limit_occupancy(candidate.config, problem.device)
    return FAMILIES[candidate.kernel].module, among_small(like, config) if fused else config


def dispatcher(gpu: str) -> Dispatcher:
    """The dispatcher of a GPU, by name; its maps are read at the first call."""
    found = _dispatchers.get(gpu)
    if found is None:
        found = _dispatchers[gpu] = Dispatcher(gpu, [*_given, *_files(gpu)])
        for policy in _given:
            if reason := policy.why_hint(gpu):
                told = f"{policy.path} only offers neighbours to choose by: {reason}; measure with `anybit tune`"
                warnings.warn(told, stacklevel=2)
    return found


def _files(gpu: str) -> list[Policy]:
    paths = (own_file(gpu), *sorted(SHIPPED.glob("*.json")))  # lexists: warn about dangling links
    return [found for path in paths if os.path.lexists(path) and (found := usable(path))]


def use(*paths: str | Path) -> None:
    """Use these maps before all others; without arguments, drop those given and reread the files at the next call.

    Prepared layers keep their layout, and CUDA graphs what they captured. Other files are ignored with a warning.
    """
    for forget in _forgets:
        forget()
    _dispatchers.clear()
    _given[:] = [found for path in paths if (found := usable(Path(path)))]


def forget_with_maps(forget: Callable[[], None]) -> None:
    """Register what clears a cache of decisions, to be called by ``use``."""
    _forgets.append(forget)
