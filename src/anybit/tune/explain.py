"""Explain a choice: config, time, runner-up, and why the other strategies do not run."""

from collections import Counter
from dataclasses import dataclass

from anybit.choose.builtin import INTERPOLATE_FROM, builtin
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
    """Everything known about how a problem runs. us: measured time of a call, activation quantization included."""

    product: str
    gpu: str
    strategy: str
    config: str
    us: float | None
    why: str
    runner_up: str
    builtin: str
    builtin_us: float | None
    floor_us: float
    others: tuple[Other, ...]
    candidates: int
    families: dict[str, int]

    def text(self) -> str:
        """The explanation as lines for a terminal."""
        time = "not measured"
        if self.us is not None:
            time = f"{self.us:.2f} us, {self.floor_us / self.us:.0%} of the roofline's speed"
        own = "" if self.builtin_us is None else f", {self.builtin_us:.2f} us"
        families = ", ".join(f"{count} {name}" for name, count in self.families.items())
        lines = [
            f"{self.product} on {self.gpu}",
            f"  runs       {self.strategy}: {self.config}",
            f"  time       {time}",
            f"  because    {self.why}",
            f"  runner-up  {self.runner_up}",
            f"  built in   {self.builtin}{own}",
            f"  roofline   {self.floor_us:.2f} us: operands read once, MMAs issued at the tensor cores' rate",
            f"  space      {self.candidates} legal candidates: {families}",
        ]
        for other in self.others:
            what = other.reason if other.us is None else f"{other.us:.2f} us, {other.reason}: {other.config}"
            lines.append(f"  not        {other.strategy}: {what}")
        return "\n".join(lines)


def explain(product: LinearProblem, by: Dispatcher) -> Explanation:
    """How a problem would run on its device. Raises KernelError if it cannot."""
    choice, found, own = by.choose(product), by.point(product), builtin(product)
    whole = space(product)
    others: list[Other] = []
    at = product.m if found is None else found[0]
    within = at == product.m or product.m < at <= INTERPOLATE_FROM
    within = within and found is not None and choice.origin in ("map", "built in")
    for name, measured in found[1].ordered() if found and within else ():
        if name == choice.candidate.strategy:
            continue
        more = measured.us / choice.us - 1 if choice.us else 0.0
        slower = f"{abs(more):.0%} {'slower' if more >= 0 else 'faster'}" if choice.us else "measured"
        fields = ", ".join(f"{key}={value}" for key, value in measured.fields)
        others.append(Other(name, f"{measured.kernel}({fields})", measured.us, slower))
    runner_up = f"{others[0].strategy}, {others[0].us:.2f} us ({others[0].reason})" if others else "not measured"
    where = f" at M = {at}" if within else ""
    why = f"it is the built-in choice, and nothing is clearly faster{where}, by {choice.source}"
    if choice.origin == "map":
        why = f"it was the fastest at M = {at}, by {choice.source}"
    elif choice.origin == "expected":
        why = f"it is expected to be faster than the built-in choice, by {choice.source}"
    elif not choice.source:
        why = "nothing was measured for it: it is the built-in choice"
    if found is not None:
        origin = found[2].origin
        why += f" ({origin.gpu}, driver {origin.driver}, anybit {origin.library}, {origin.date})"
    for excluded in whole.excluded:
        name = f"{excluded.strategy} ({excluded.kernel})" if excluded.kernel else excluded.strategy
        others.append(Other(name, "", None, excluded.reason))
    return Explanation(
        product=str(product),
        gpu=product.device.name,
        strategy=choice.candidate.strategy,
        config=choice.candidate.name,
        us=choice.us if within and choice.us else None,
        why=why,
        runner_up=runner_up,
        builtin=own.name,
        builtin_us=found[1].default_us if found and within else None,
        floor_us=round(floor_us(product), 3),
        others=tuple(dict.fromkeys(others)),  # drops duplicates from several activation formats
        candidates=len(whole.candidates),
        families=dict(Counter(candidate.kernel for candidate in whole.candidates)),
    )
