"""A kernel as a value, and the source that it is compiled from."""

import dataclasses
import enum
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol

from anybit.jit.params import KERNELS, layout_assertions


class Config(Protocol):
    """A kernel's config: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]


@dataclass(frozen=True)
class Kernel:
    """One instantiation of a kernel: everything that decides its machine code except the architecture.

    The header defines `struct Params` (the C twin of `params`, by the same name) and
    `template <class Config> __global__ void entry(const __grid_constant__ Params p)`.

    header: the .cuh file, a path below the package's kernels folder or an absolute one.  entry: the template's name,
    with its namespace, and with its arguments behind the config: "sum" or "sum<float>".  config: its fields become the
    constants of `struct Config`.  params: the class of its parameters, see ``Params``.  threads: of a block.
    shared_bytes: dynamic shared memory of a block.  cluster: blocks of a cluster, along x.  The last three are
    constants of Config on the device, too.
    """

    header: str
    entry: str
    config: Config
    params: type
    threads: int
    shared_bytes: int = 0
    cluster: int = 1

    def __hash__(self) -> int:  # computed once: every launch looks its kernel up
        if (found := self.__dict__.get("_hash")) is None:
            parts = self.header, self.entry, self.config, self.params, self.threads, self.shared_bytes, self.cluster
            found = self.__dict__["_hash"] = hash(parts)
        return int(found)

    def __getstate__(self) -> dict[str, object]:  # string hashes differ between processes
        return {key: value for key, value in self.__dict__.items() if key != "_hash"}

    @property
    def path(self) -> Path:
        """The header's file."""
        path = Path(self.header)
        return path if path.is_absolute() else KERNELS / path

    @property
    def include(self) -> str:
        """The header as #include names it: relative to the kernels folder, or the bare file name outside it."""
        return self.path.name if Path(self.header).is_absolute() else self.header

    @property
    def expression(self) -> str:
        """The template instantiation in C++."""
        name, _, more = self.entry.partition("<")
        return f"{name}<Config, {more}" if more else f"{name}<Config>"

    @cached_property
    def source(self) -> str:
        """The C++ source: the header, the config struct, the layout assertions, and one instantiation."""
        constants = {"threads": self.threads, "shared_bytes": self.shared_bytes, "cluster": self.cluster}
        return (
            f'#include "{self.include}"\n'
            f"{config_struct(self.config, constants)}"
            f"{layout_assertions(self.params)}"
            f"template __global__ void {self.expression}(const __grid_constant__ {self.params.__name__});\n"
        )


def config_struct(config: Config, constants: dict[str, int] | None = None, name: str = "Config") -> str:
    """A dataclass as a C++ struct of constants.

    int, bool and float become `static constexpr` members; an Enum member becomes the enumerator of the same name in the
    C++ enum of the same name; a str names a type (`using field = text;`); a nested dataclass becomes a nested struct.
    `constants` are added; raises ValueError if the dataclass has a field of that name with another value.
    """
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for key, value in (constants or {}).items():
        if values.setdefault(key, value) != value:
            raise ValueError(f"the kernel says {key} = {value}, its config says {values[key]}: give the same value")
    members = "".join(f"    {_member(key, value)}\n" for key, value in values.items())
    return f"struct {name} {{\n{members}}};\n"


def _member(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"static constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, enum.Enum):
        return f"static constexpr {type(value).__name__} {name} = {type(value).__name__}::{value.name};"
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"config field {name} = {value} does not fit an int; allowed are -2^31 to 2^31 - 1")
        return f"static constexpr int {name} = {value};"
    if isinstance(value, float):
        return f"static constexpr float {name} = {value.hex()}f;"
    if isinstance(value, str):
        return f"using {name} = {value};"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return config_struct(value, name=name).replace("\n", " ").strip()
    raise TypeError(
        f"config field {name} = {value!r} has no C++ form; "
        f"allowed are int, bool, float, Enum members, the name of a type, and dataclasses of these"
    )
