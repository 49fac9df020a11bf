"""Kernel parameters: a frozen dataclass that mirrors a C struct field by field, read from its header (``Params``).

The kernel's generated source asserts the size of the C struct and the offset and size of each field
(``layout_assertions``).
"""

import dataclasses
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, get_type_hints

import torch

KERNELS = Path(__file__).parent.parent / "kernels"
"""The folder of the .cuh files."""


class CType(NamedTuple):
    """A C type: its code for the `struct` module and its size, which is also its alignment."""

    code: str
    size: int


@dataclasses.dataclass(frozen=True)
class Slot:
    """A pointer that each run of a plan supplies: ``offset`` bytes behind the address given for ``name``."""

    name: str
    offset: int = 0


Pointer = Annotated[torch.Tensor | int | Slot | None, CType("P", 8)]
"""A device pointer: a tensor (its first element), an address, a plan's slot, or None for a null pointer."""
Int32 = Annotated[int, CType("i", 4)]
Int64 = Annotated[int, CType("q", 8)]
Float32 = Annotated[float, CType("f", 4)]
TensorMap = Annotated[Any, CType("128s", 128)]
"""A `ptx::TensorMap`: a ``Matrix``, or the map's bytes."""
_TYPES = {"int": Int32, "int32_t": Int32, "int64_t": Int64, "float": Float32, "ptx::TensorMap": TensorMap}


class Params:
    """The parameters of a launch. A subclass has the fields of the C struct of its name in ``header``, in order.

        class Params(jit.Params, header="experts/combine/combine.cuh"): ...

    header: below the kernels' folder, or an absolute path.  The struct's base, if it has one, is the subclass's.
    Raises TypeError for a struct that is not there, or a field of an unknown type.
    """

    def __init_subclass__(cls, header: str) -> None:
        found = re.search(rf"^struct {cls.__name__}\b[^{{]*{{\n(.*?)^}};", (KERNELS / header).read_text(), re.M | re.S)
        if found is None:
            raise TypeError(f"{header} has no struct {cls.__name__}")
        cls.__annotations__ = {}
        for kind, star, names in re.findall(r"^    (?:const )?([\w:]+)(\*?) (\w+(?:, \w+)*);", found[1], re.M):
            if not star and kind not in _TYPES:
                raise TypeError(f"{cls.__name__} of {header} has {kind} {names}: use a pointer or {', '.join(_TYPES)}")
            cls.__annotations__ |= dict.fromkeys(names.split(", "), Pointer if star else _TYPES[kind])
        dataclasses.dataclass(frozen=True)(cls)

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

        def __init__(self, *fields: Any, **by_name: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...


class Field(NamedTuple):
    """One field of the C struct: its name, type and offset in bytes."""

    name: str
    type: CType
    offset: int


class Layout(NamedTuple):
    """The C struct of a Params class: its fields, its size in bytes, and its packer."""

    fields: tuple[Field, ...]
    size: int
    packer: struct.Struct


def layout_of(params: type) -> Layout:
    """The C layout of a Params dataclass. Raises TypeError for a field not annotated with this module's types."""
    if not dataclasses.is_dataclass(params):
        raise TypeError(f"params must be a dataclass, got {params!r}")
    hints = get_type_hints(params, include_extras=True)
    fields, code, offset, alignment = [], "<", 0, 1
    for field in dataclasses.fields(params):
        types = [m for m in getattr(hints[field.name], "__metadata__", ()) if isinstance(m, CType)]
        if not types:
            raise TypeError(
                f"{params.__qualname__}.{field.name} is annotated {hints[field.name]!r}; "
                f"use Pointer, Int32, Int64 or Float32 of anybit.jit"
            )
        (c_type,) = types
        padding = -offset % c_type.size
        code += f"{padding}x" * bool(padding) + ("Q" if c_type.code == "P" else c_type.code)
        fields.append(Field(field.name, c_type, offset + padding))
        offset += padding + c_type.size
        alignment = max(alignment, c_type.size)
    padding = -offset % alignment
    packer = struct.Struct(code + f"{padding}x" * bool(padding))
    return Layout(tuple(fields), packer.size, packer)


def layout_assertions(params: type) -> str:
    """C++ static assertions that the C struct of the same name has the layout of `params`."""
    layout, name = layout_of(params), params.__name__
    lines = [
        "#ifdef __CUDACC_RTC__",
        f"#define ANYBIT_OFFSET(field) __INTADDR__(&static_cast<{name}*>(0)->field)",
        "#else",
        f"#define ANYBIT_OFFSET(field) __builtin_offsetof({name}, field)",
        "#endif",
        "#define ANYBIT_FIELD(field, offset, size) \\",
        f"    static_assert(ANYBIT_OFFSET(field) == offset && sizeof({name}::field) == size, \\",
        f'                  "{name}::" #field " is not at byte " #offset " with size " #size ", as its twin says")',
        f'static_assert(sizeof({name}) == {layout.size}, "{name} is not {layout.size} bytes, as its twin says");',
        *(f"ANYBIT_FIELD({f.name}, {f.offset}, {f.type.size});" for f in layout.fields),
    ]
    return "\n".join(lines) + "\n"
