"""Plans: an op's launches, worked out once for a signature and repeated with other addresses.

A plan is data until it runs: making one needs neither a GPU nor tensors, so that all kernels of a model can be compiled
before its first step. It holds no tensor of a call: each run supplies the addresses of its slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anybit.jit.launch import Grid, Launch, Launcher, Ready, Value, launcher
from anybit.jit.params import Slot
from anybit.jit.source import Kernel
from anybit.jit.tensor_map import Matrix


class _Ready(NamedTuple):
    """A launch that is ready: its constant fields, and (field, slot, offset) of those that each run fills in.

    config: the driver's; of its own, since launches of one kernel in turn would have to change a shared one each time.
    """

    launcher: Launcher
    config: Ready
    grid: Grid
    pdl: bool
    values: list[Value]
    pointers: list[tuple[int, int, int]]
    maps: list[tuple[int, int, int, Matrix]]


@dataclass(eq=False)
class Plan:
    """Launches on one device, complete before the first run. slots: the names that their parameters may use, in the
    order in which ``run`` gets addresses.
    """

    launches: list[Launch]
    slots: Sequence[str]
    device: int
    _ready: list[_Ready] = field(default_factory=list, init=False, repr=False)

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels to compile before the plan runs."""
        return [launch.kernel for launch in self.launches]

    def run(self, addresses: Sequence[int]) -> None:
        """Launch on the device's current stream. addresses: of the slots, 0 for tensors that a call does not have."""
        for one in self._ready or self._load():
            values = one.values.copy()
            for place, slot, offset in one.pointers:
                values[place] = addresses[slot] + offset
            for place, slot, offset, matrix in one.maps:
                values[place] = matrix.encoded(addresses[slot] + offset)
            one.launcher.start(values, one.grid, one.pdl, one.config)

    def _load(self) -> list[_Ready]:
        found, places = list[_Ready](), {name: place for place, name in enumerate(self.slots)}
        for launch in self.launches:
            loaded = launcher(launch.kernel, self.device)
            one = _Ready(loaded, Ready(), launch.grid, launch.pdl, loaded.values(launch.params), [], [])
            for place, value in enumerate(one.values):
                slot = value.at if isinstance(value, Matrix) else value
                if isinstance(slot, Slot):
                    where = place, places[slot.name], slot.offset
                    if isinstance(value, Matrix):
                        one.maps.append((*where, value))
                    else:
                        one.pointers.append(where)
            found.append(one)
        self._ready = found
        return found
