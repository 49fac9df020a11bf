"""How close chosen configs are to the best, in random problems whose whole spaces were once timed on an H200.

    python tools/tuning/check_policy.py replay [--without-own]

It rates the choices of today's map; with ``--without-own`` as if the problem's layer had not been measured. A problem
is a layer of one of eleven models, one of five schemes and a number of tokens between 1 and 8192. Its row has the best
of every legal config of every family, and three choices of that day: ``map``, by the policy map; ``tuned``, by a search
at the token count that stands for the problem's; ``built in``.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anybit.choose.builtin import step
from anybit.choose.dispatch import Dispatcher
from anybit.choose.policy import SHIPPED, Policy, file_name, read
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "dispatch_check.json"
KEY = ("seed", "scheme", "m", "n", "k")
CHOICES = ("map", "tuned", "built in")
JUDGE = Path(__file__).with_name("judge.json")


class Judge:
    """What is known of the compared problems, frozen: scores depend on no estimate or map that may change.

    judge.json was written at commit 2d4891d. It has for each problem the ratios, in thousandths, of configs that no row
    names: ``times``, by times of that commit's map at a nearby token count, and ``estimates``, by that commit's cost
    model beside a config that the row names (up to 1.3). defaults: of config fields, which names leave out.
    """

    def __init__(self, path: Path = JUDGE) -> None:
        frozen = json.loads(path.read_text())
        self._defaults: dict[str, dict[str, object]] = frozen["defaults"]
        self._names = {name: i for i, name in enumerate(frozen["configs"])}
        self._known = {
            tuple(key): [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in (times, estimates)]
            for *key, times, estimates in frozen["problems"]
        }

    def ratio(self, row: dict[str, Any], name: str) -> tuple[float, str]:
        """The ratio of a config, by name, to the best of a row's problem, and its source.

        A config that cannot be scored is taken to be as slow as the slowest named one.
        """
        named = {row["best"]: 1.0} | {row["chosen"][choice]: row["ratios"][choice] for choice in CHOICES}
        named = {self.short(one): ratio for one, ratio in named.items()}
        mine = self.short(name)
        if mine in named:
            return named[mine], "named"
        known = self._known.get(tuple(row[part] for part in KEY), [{}, {}])
        for ratios, how in zip(known, ("map times", "estimate"), strict=True):
            if (found := ratios.get(self._names.get(mine))) is not None:
                return found / 1000, how
        return max(named.values()), "unscored"

    def short(self, name: str) -> str:
        """A config's name, its fields sorted, without those at their default."""
        kernel, fields = name.partition("(")[0], fields_of(name)
        defaults = self._defaults.get(kernel, {})
        kept = (f"{key}={value}" for key, value in sorted(fields.items()) if defaults.get(key) != value)
        return f"{kernel}({', '.join(kept)})"


def fields_of(name: str) -> dict[str, object]:
    """Parse the fields of a config's name."""
    pairs = (pair.split("=") for pair in name[name.index("(") + 1 : -1].split(", ") if pair)
    words = {"True": True, "False": False}
    return {key: words.get(value, int(value) if value.isdigit() else value) for key, value in pairs}


def without(policy: Policy, n: int, k: int) -> Policy:
    """A map without the points of layers of this shape, of any scheme."""
    return replace(policy, layers={key: points for key, points in policy.layers.items() if key[2:] != (n, k)})


def replay(options: argparse.Namespace) -> None:
    """Print how far the choices of a map are from the best of the compared problems."""
    device, judge = Device.named("sm_90a"), Judge()
    map_, found = read(options.map or SHIPPED / file_name(device.name)), list[tuple[float, str, str]]()
    whole = Dispatcher(device.name, [map_])
    for row in json.loads(options.rows.read_text()):
        scheme, n, k = Scheme.parse(row["scheme"]), row["n"], row["k"]
        m = step(row["m"])  # as layers round it
        product = LinearProblem(m, n, k, scheme.weights, scheme.activations, device=device)
        by = Dispatcher(device.name, [without(map_, n, k)]) if options.without_own else whole
        chosen = by.choose(product).candidate
        found.append((*judge.ratio(row, chosen.name), str(product)))
    print(f"{summary([ratio for ratio, *_ in found])}; {dict(Counter(how for _, how, _ in found))}")
    print(f"those that can be scored: {summary([ratio for ratio, how, _ in found if how != 'unscored'])}")
    for ratio, how, name in sorted(found, reverse=True)[: options.worst]:
        print(f"    {ratio:.3f} ({how}) {name}")


def summary(ratios: Sequence[float]) -> str:
    """Summarize ratios."""
    ordered = sorted(ratios)
    mean = math.exp(sum(map(math.log, ordered)) / len(ordered))
    tenth = ordered[int(0.9 * (len(ordered) - 1))]
    return f"{len(ordered)} problems, geometric mean {mean:.4f}, 90th percentile {tenth:.3f}, worst {ordered[-1]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["replay"])
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--map", type=Path, help="by default the shipped one")
    parser.add_argument("--worst", type=int, default=5, help="how many to show")
    parser.add_argument("--without-own", action="store_true", help="leave out the points of a problem's layer")
    replay(parser.parse_args())


if __name__ == "__main__":
    main()
