"""Why a product runs as it does: the choice, its time, the runner-up, the floor, and why the others lost or are out."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from anybit.tune.dispatch import Dispatcher, holds
from anybit.tune.registry import LinearProblem
from anybit.tune.roofline import floor_us
from anybit.tune.space import VENDOR, builtin, space


@dataclass(frozen=True)
class Other:
    """A strategy that does not run: its best time and how much slower that is, or why it cannot."""

    strategy: str
    config: str
    us: float | None
    reason: str


@dataclass(frozen=True)
class Explanation:
    """All that is known of how one product runs. us: measured for a call, quantization of activations included."""

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

    def json(self) -> dict[str, Any]:
        """As an object."""
        return asdict(self)

    def text(self) -> str:
        """For people."""
        time = "not measured"
        if self.us is not None:
            time = f"{self.us:.2f} us, {self.floor_us / self.us:.0%} of the floor's speed"
        own = "" if self.builtin_us is None else f", {self.builtin_us:.2f} us"
        families = ", ".join(f"{count} {name}" for name, count in self.families.items())
        lines = [
            f"{self.product} on {self.gpu}",
            f"  runs       {self.strategy}: {self.config}",
            f"  time       {time}",
            f"  because    {self.why}",
            f"  runner-up  {self.runner_up}",
            f"  built in   {self.builtin}{own}",
            f"  floor      {self.floor_us:.2f} us: operands read once, products issued at the tensor cores' rate",
            f"  space      {self.candidates} legal candidates: {families}",
        ]
        for other in self.others:
            what = other.reason if other.us is None else f"{other.us:.2f} us, {other.reason}: {other.config}"
            lines.append(f"  not        {other.strategy}: {what}")
        return "\n".join(lines)


def _slower(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%} {'slower' if ratio >= 1 else 'faster'}"


def explain(product: LinearProblem, by: Dispatcher, allow: Collection[str] = ()) -> Explanation:
    """How a product would run on the device that it names. Raises KernelError, in a sentence, if it cannot."""
    choice = by.choose(product, allow=allow)
    found = by.point(product)
    whole = space(product, allow)
    own = builtin(product)
    others: list[Other] = []
    runner_up = "not measured"
    if found is not None and found[0] < product.m:  # beyond all counts that maps have
        choice = replace(choice, origin="nearest", us=0.0, source=f"measured at {found[0]} tokens, by {choice.source}")
        found = None
    if found is not None:
        m, point, policy = found
        for name, measured in point.ordered():
            if name == choice.candidate.strategy:
                continue
            slower = _slower(measured.us / choice.us) if choice.us else "measured"
            if measured.activations and "a8" not in allow:
                slower = "not allowed (allow a8)"
            if measured.kernel == VENDOR:
                slower += ", and only compared"
            fields = ", ".join(f"{key}={value}" for key, value in measured.fields)
            others.append(Other(name, f"{measured.kernel}({fields})", measured.us, slower))
        if others:
            runner_up = f"{others[0].strategy}, {others[0].us:.2f} us ({others[0].reason})"
        origin = policy.origin
        what = f"was the fastest of {len(point.strategies)} strategies"
        why = f"it {f'is {choice.kept}' if choice.kept else what} at M = {m}, by {choice.source}"
        why += f" ({origin.gpu}, driver {origin.driver}, anybit {origin.library}, {origin.date})"
        if choice.origin != "map":
            why = f"{choice.source or 'none of what was measured decides here: it is the built-in choice'}"
    else:
        why = choice.source or "nothing was measured for it: it is the built-in choice"
    for excluded in whole.excluded:
        name = f"{excluded.strategy} ({excluded.kernel})" if excluded.kernel else excluded.strategy
        others.append(Other(name, "", None, excluded.reason))
    others = list(dict.fromkeys(others))  # what is out for each of several activations is said once
    families: dict[str, int] = {}
    for candidate in whole.candidates:
        families[candidate.kernel] = families.get(candidate.kernel, 0) + 1
    return Explanation(
        product=str(product),
        gpu=product.device.name,
        strategy=choice.candidate.strategy,
        config=choice.candidate.name,
        us=choice.us or None,
        why=why,
        runner_up=runner_up,
        builtin=own.name,
        builtin_us=found[1].default_us if found is not None and found[1].default and holds(product, found[1]) else None,
        floor_us=round(floor_us(product), 3),
        others=tuple(others),
        candidates=len(whole.candidates),
        families=families,
    )
