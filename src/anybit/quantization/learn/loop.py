"""The loop of everything that learns from the 16-bit model: which text, how fast, how long."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from anybit.errors import CalibrationError, TextError

Step = TypeVar("Step")
Progress = Callable[[int, int, float], None]
"""Called with steps or seconds done, those in all, and the last loss (nats a token, or a block's relative error)."""

# Steps that compile and capture.
_STARTING = 3
# The rate rises over so many steps, and falls to this fraction of the whole.
_WARM, _LEAST = 50, 0.02


@dataclass(slots=True)
class Course:
    """How far learning has come. Give steps, which two runs repeat exactly, or seconds, which are kept.

    step, elapsed: so far; a resumed run continues those of the interrupted one.  tokens: seen in this run.
    starting: seconds of this run's first steps, which compile.  fastest: of its other steps, in seconds.
    """

    steps: int = 0
    seconds: float = 0.0
    step: int = 0
    elapsed: float = 0.0
    tokens: int = 0
    starting: float = 0.0
    fastest: float = 0.0

    @property
    def done(self) -> float:
        """The fraction done."""
        return self.step / self.steps if self.steps else min(self.elapsed / self.seconds, 1.0)

    @property
    def over(self) -> bool:
        """Whether it ends here: another step would take too long, or there are no more."""
        return self.step >= self.steps if self.steps else self.step > 0 and self.elapsed + self.fastest > self.seconds

    @property
    def rate(self) -> float:
        """The factor of all learning rates: a short rise, then a cosine."""
        warm = min(_WARM, self.steps // 20 + 1) if self.steps else _WARM
        return min((self.step + 1) / warm, max(0.5 * (1 + math.cos(math.pi * self.done)), _LEAST))


def learn(
    gradient: Callable[[Step], tuple[float, int]],
    steps: Iterable[Step],
    course: Course,
    update: Callable[[float], None],
    progress: Progress | None = None,
) -> None:
    """Run a course. gradient: of a step; returns its loss, and its tokens.  steps: endless.
    update: takes a step at a rate, and prepares the next gradients.

    A resumed course passes over the steps that it took. Raises CalibrationError if a loss is not finite.
    """
    unseen = itertools.islice(steps, course.step, None)
    started, first = time.monotonic(), course.step + _STARTING
    began = started - course.elapsed
    while not course.over:
        loss, tokens = gradient(next(unseen))
        if not math.isfinite(loss):
            raise CalibrationError(f"the loss of step {course.step} is not finite: lower the learning rates")
        update(course.rate)
        course.step += 1
        course.tokens += tokens
        took, course.elapsed = time.monotonic() - began - course.elapsed, time.monotonic() - began
        if course.step == first:
            course.starting = time.monotonic() - started
        elif course.step > first:
            course.fastest = min(course.fastest or took, took)
        if progress is not None:
            done = (course.step, course.steps) if course.steps else (int(course.elapsed), int(course.seconds) + 1)
            progress(*done, loss)


def steps_of(text: Sequence[Tensor], step_tokens: int, seed: int = 0) -> Iterator[list[Tensor]]:
    """Endless steps of about ``step_tokens`` tokens: batches int64 [B, L], one for each length; passes are shuffled."""
    usable = [sequence for sequence in text if len(sequence) > 1]
    if not usable:
        raise TextError("learning needs sequences of at least 2 tokens")
    held: list[Tensor] = []
    count = 0
    for epoch in itertools.count():
        order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed + epoch))
        for sequence in (usable[i] for i in order.tolist()):
            if held and count + len(sequence) > step_tokens:
                yield _batches(held)
                held, count = [], 0
            held.append(sequence)
            count += len(sequence)


def _batches(sequences: Sequence[Tensor]) -> list[Tensor]:
    by_length: dict[int, list[Tensor]] = {}
    for sequence in sequences:
        by_length.setdefault(len(sequence), []).append(sequence)
    return [torch.stack(rows) for rows in by_length.values()]
