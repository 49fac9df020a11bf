"""A griffe extension for the API reference: lines such as ``name: description`` in docstrings become lists."""

import re
from typing import Any

from griffe import Extension, Object

_ENTRY = re.compile(r"[a-z_]\w*(, [a-z_]\w*)*: ")
_NEXT = re.compile(r"(?<=[.)\]])  (?=[a-z_]\w*(?:, [a-z_]\w*)*: )")


def listed(text: str) -> str:
    """The docstring as Markdown: an item per parameter, a paragraph for what is returned or raised."""
    lines: list[str] = []
    inside = False  # whether the last line belongs to an item
    for line in text.splitlines():
        if _ENTRY.match(line):
            for entry in _NEXT.split(line):
                name, _, words = entry.partition(": ")
                lines += [*([] if inside else [""]), f"- `{name}`: {words}"]
                inside = True
        elif inside and line.strip() and not line.startswith(("Returns ", "Raises ", "Tensors ")):
            lines.append(f"  {line.strip()}")
        else:
            lines += ["", line] if inside and line.strip() else [line]
            inside = False
    return "\n".join(lines)


class Parameters(Extension):
    """Applies ``listed`` to every docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite a parsed docstring."""
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
