"""Explain a choice: config, time, runner-up, and why the other strategies do not run."""

from collections import Counter
from dataclasses import dataclass

from anybit.choose.dispatch import Dispatcher
from anybit.choose.space import space
from anybit.kernels.linear_problem import LinearProblem
from anybit.tune.roofline import floor_us


@dataclass(frozen=True)
class Other:
    """A strategy that was not chosen: its best time and how much slower it is, or why it cannot run."""

    strategy: str
    config: str
    us: float | None
    reason: str


@dataclass(frozen=True)
class Explanation:
    """Everything known about how a problem runs. us: measured time of a call, activation quantization included.

    expected_us: the same, where other points say so.
    """

    product: str
    gpu: str
    strategy: str
    config: str
    us: float | None
    expected_us: float | None
    why: str
    runner_up: str
    floor_us: float
    others: tuple[Other, ...]
    candidates: int
    families: dict[str, int]

    def text(self) -> str:
        """The explanation as lines for a terminal."""
        time = "not measured"
        if self.us is not None:
            time = f"{self.us:.2f} us, {self.floor_us / self.us:.0%} of the roofline's speed"
        elif self.expected_us is not None:
            time = f"not measured, expected {self.expected_us:.2f} us"
        families = ", ".join(f"{count} {name}" for name, count in self.families.items())
        lines = [
            f"{self.product} on {self.gpu}",
            f"  runs       {self.strategy}: {self.config}",
            f"  time       {time}",
            f"  because    {self.why}",
            f"  runner-up  {self.runner_up}",
            f"  roofline   {self.floor_us:.2f} us: operands read once, MMAs issued at the tensor cores' rate",
            f"  space      {self.candidates} legal candidates: {families}",
        ]
        for other in self.others:
            what = other.reason if other.us is None else f"{other.us:.2f} us, {other.reason}: {other.config}"
            lines.append(f"  not        {other.strategy}: {what}")
        return "\n".join(lines)


def explain(product: LinearProblem, by: Dispatcher) -> Explanation:
    """How a problem would run on its device. Raises KernelError if it cannot."""
    choice, whole = by.choose(product), space(product)
    there, others = choice.source, list[Other]()
    asked = product.m, product.n, product.k, product.scheme, product.dtype
    here = there is not None and (there.m, there.n, there.k, there.scheme, there.dtype) == asked
    for us, candidate, where in by.expected(product) if here else ():
        if where == there and candidate.strategy != choice.candidate.strategy:
            others.append(Other(candidate.strategy, candidate.name, us, f"{us / choice.us - 1:.0%} slower"))
    runner_up = f"{others[0].strategy}, {others[0].us:.2f} us ({others[0].reason})" if others else "not measured"
    why = "nothing near was measured: it is what its kernel takes by default"
    if there is not None:
        why = f"its expected time is the least, by the times of {there}"
        why = f"it was the fastest at M = {there.m}" if here else why
    origin = next((policy.origin for policy in by.policies), None)
    if there is not None and origin is not None:
        why += f" ({origin.gpu}, driver {origin.driver}, anybit {origin.library}, {origin.date})"
    others += [Other(name, "", None, reason) for name, reason in whole.excluded.items()]
    return Explanation(
        product=str(product),
        gpu=product.device.name,
        strategy=choice.candidate.strategy,
        config=choice.candidate.name,
        us=choice.us if here else None,
        expected_us=round(choice.us, 2) if there is not None and not here else None,
        why=why,
        runner_up=runner_up,
        floor_us=round(floor_us(product), 3),
        others=tuple(dict.fromkeys(others)),
        candidates=len(whole.candidates),
        families=dict(Counter(candidate.kernel for candidate in whole.candidates)),
    )
