"""The policy maps of this process: read once, consulted for every choice.

Maps in order of precedence: those passed to ``use``, the user's own for this GPU (``policy.own_file``), the shipped
ones. A map of another GPU only offers neighbours.
"""

import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from anybit.choose.choose import Choice, Map
from anybit.choose.families import Layout
from anybit.choose.policy import SHIPPED, Policy, own_file, usable
from anybit.kernels.linear_problem import LinearProblem

_MOST_CHOICES = 1 << 14

Choices = dict[tuple[LinearProblem, Layout], Choice]
"""Choices for problems whose weights are in a layout."""


class Dispatcher(Map):
    """The policy maps of one GPU. hints: maps of other GPUs.  choices: cache of ``kept``."""

    def __init__(self, gpu: str, policies: Collection[Policy]) -> None:
        self.gpu = gpu
        self.policies = [policy for policy in policies if policy.origin.gpu == gpu]
        self.hints = [policy for policy in policies if policy.origin.gpu != gpu]
        self.choices: Choices = {}
        super().__init__([*self.policies, *self.hints])

    def kept(self, product: LinearProblem, layout: Layout) -> Choice:
        """``choose`` for one layout, cached."""
        like = product, layout
        found = self.choices.get(like)
        if found is None:
            if len(self.choices) >= _MOST_CHOICES:
                self.choices.clear()
            found = self.choices[like] = self.choose(product, layout)
        return found


# -------- the process's dispatchers

_given: list[Policy] = []
_dispatchers: dict[str, Dispatcher] = {}
_told: set[str] = set()
_generation = 0
_decisions: list[dict[Any, Any]] = []


def dispatcher(gpu: str) -> Dispatcher:
    """The dispatcher of a GPU, by name; its maps are read at the first call."""
    found = _dispatchers.get(gpu)
    if found is None:
        found = _dispatchers[gpu] = Dispatcher(gpu, [*_given, *_files(gpu)])
        for policy in _given:
            if reason := policy.why_hint(gpu):
                tell(f"{policy.path} only offers neighbours to choose by: {reason}; measure with `anybit tune`")
    return found


def _files(gpu: str) -> list[Policy]:
    paths = (own_file(gpu), *sorted(SHIPPED.glob("*.json")))  # lexists: warn about dangling links
    return [found for path in paths if os.path.lexists(path) and (found := usable(path))]


def use(*paths: str | Path) -> None:
    """Use these maps before all others; without arguments, drop those given and reread the files at the next call.

    Prepared layers keep their layout, and CUDA graphs what they captured; all other choices are made again. Files that
    are not policy maps are ignored with a warning.
    """
    global _generation
    _generation += 1
    for decided in _decisions:
        decided.clear()
    _dispatchers.clear()
    _given.clear()
    _given.extend(found for path in paths if (found := usable(Path(path))))


def given() -> bool:
    """Whether maps were given to ``use``."""
    return bool(_given)


def forget_with_maps(decided: dict[Any, Any]) -> None:
    """Register a cache of decisions, to be cleared by ``use``."""
    _decisions.append(decided)


def generation() -> int:
    """A number that changes with every ``use``."""
    return _generation


def tell(message: str) -> None:
    """Warn, once per process."""
    if message not in _told:
        _told.add(message)
        warnings.warn(message, stacklevel=3)
