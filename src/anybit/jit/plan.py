"""Plans: an op's launches, worked out once for a signature and repeated with other addresses.

A plan is data until it runs: making one needs neither a GPU nor tensors, so that all kernels of a model can be compiled
before its first step. It holds no tensor of a call: each run supplies the addresses of its slots.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from anybit.jit.launch import Grid, Launch, Launcher, launcher
from anybit.jit.params import Slot
from anybit.jit.source import Kernel
from anybit.jit.tensor_map import Matrix


class _Step(NamedTuple):
    """A launch that is ready: its constant fields, and (field, slot, offset) of those that each run fills in."""

    launcher: Launcher
    grid: Grid
    values: list[Any]
    pointers: list[tuple[int, int, int]]
    maps: list[tuple[int, int, int, Matrix]]


class Plan:
    """Launches on one device. slots: the names that their parameters may use, in the order in which ``run`` gets
    addresses.
    """

    __slots__ = ("_slots", "_steps", "device", "launches")

    def __init__(self, launches: Iterable[Launch], slots: Sequence[str], device: int) -> None:
        self.launches, self.device = tuple(launches), device
        self._slots = {name: place for place, name in enumerate(slots)}
        self._steps: list[_Step] | None = None

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels to compile before the plan runs."""
        return [launch.kernel for launch in self.launches]

    def run(self, addresses: Sequence[int]) -> None:
        """Launch on the device's current stream. addresses: of the slots, 0 for tensors that a call does not have."""
        for step in self._steps or self._load():
            values = step.values.copy()
            for place, slot, offset in step.pointers:
                values[place] = addresses[slot] + offset
            for place, slot, offset, matrix in step.maps:
                values[place] = matrix.encoded(addresses[slot] + offset)
            step.launcher.start(values, step.grid)

    def _load(self) -> list[_Step]:
        steps = list[_Step]()
        for launch in self.launches:
            found = launcher(launch.kernel, self.device, launch.pdl)
            step = _Step(found, launch.grid, found.values(launch.params), [], [])
            for place, value in enumerate(step.values):
                slot = value.at if isinstance(value, Matrix) else value
                if isinstance(slot, Slot):
                    where = place, self._slots[slot.name], slot.offset
                    if isinstance(value, Matrix):
                        step.maps.append((*where, value))
                    else:
                        step.pointers.append(where)
            steps.append(step)
        self._steps = steps
        return steps
