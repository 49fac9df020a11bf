"""The errors that anybit raises on purpose; each message names the thing, its value, and what is allowed."""

from collections.abc import Sequence

_LONGEST = 2500


class AnyBitError(Exception):
    """The base class of every error that anybit raises on purpose.

    Messages are made ``printable`` and bounded in length, whatever names from files they quote.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_message(item) if isinstance(item, str) else item for item in arguments))


def _message(text: str) -> str:
    shown = printable(text, keep="\n\t")
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 500]} ... {shown[-400:]}"


class SchemeError(AnyBitError, ValueError):
    """A scheme that cannot be parsed, or an unsupported combination."""


class LayerError(AnyBitError, ValueError):
    """A scheme, a tensor or a shape that does not fit a layer."""


class CheckpointError(AnyBitError, ValueError):
    """A checkpoint that is corrupt, incomplete, or in an unknown format."""


class ConversionError(AnyBitError, ValueError):
    """A layer that the target format cannot represent."""


class TextError(AnyBitError, ValueError):
    """A text that is missing, unreadable, or too short."""


class KernelError(AnyBitError, RuntimeError):
    """A problem that no kernel on this device supports, or a kernel that failed."""


class CalibrationError(AnyBitError, ValueError):
    """A calibration that cannot continue: a layer that no token reaches, NaN or infinity, an unusable Hessian."""


class OptionError(AnyBitError, ValueError):
    """An option of a quantization method that is unknown or has an impossible value."""


def dtype_name(dtype: object) -> str:
    """A dtype's name in messages and files: "float16"."""
    return str(dtype).removeprefix("torch.")


def sixteen_bits(what: str, dtype: object) -> str:
    """The message for a dtype that kernels do not support, with what to do about it."""
    advice = "load the model with dtype=torch.float16 or torch.bfloat16"
    return f"{what} float16 or bfloat16, not {dtype_name(dtype)}: {advice}"


def printable(text: object, keep: str = "") -> str:
    r"""Text from a file, safe for a terminal: unprintable characters become escapes such as ``\x1b``.

    Names of tensors, model types and paths may hold control characters that move the cursor or colour the screen, and
    bidirectional marks.  keep: characters to leave as they are, such as "\n\t".
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in shown
    )


def counted(names: Sequence[str], most: int = 1) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def duration(seconds: float) -> str:
    """A time in messages: 75 s, 4 min, 2.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def one_line(error: BaseException, first: bool = False) -> str:
    """Another library's error as part of a sentence: its text, or only its first line, 300 characters at most."""
    text = str(error).strip()
    text = " ".join((text.splitlines() or [""])[0].split() if first else text.split())
    # These need their type to make sense: the text of KeyError('x') is 'x'.
    if not text or isinstance(error, LookupError | TypeError | AttributeError | RecursionError | ArithmeticError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= 300 else f"{text[:297]}..."
