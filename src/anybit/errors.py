"""The errors that anybit raises on purpose; each message names the thing, its value, and what is allowed."""

_LONGEST = 2500


class AnyBitError(Exception):
    """The root of every error that anybit raises on purpose.

    Its message is ``printable`` and bounded in length, whatever names from files it quotes.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_message(item) if isinstance(item, str) else item for item in arguments))


def _message(text: str) -> str:
    shown = printable(text, keep="\n\t")
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 500]} ... {shown[-400:]}"


class SchemeError(AnyBitError, ValueError):
    """A scheme that cannot be parsed, or that is impossible."""


class LayerError(AnyBitError, ValueError):
    """A scheme, a tensor or a shape that does not fit a layer."""


class CheckpointError(AnyBitError, ValueError):
    """A checkpoint that is corrupt, incomplete, or of an unknown kind."""


class ConversionError(AnyBitError, ValueError):
    """A layer that the format asked for cannot express."""


class TextError(AnyBitError, ValueError):
    """A text that is missing, unreadable, or too short."""


class KernelError(AnyBitError, RuntimeError):
    """A problem that no kernel on this device can take, or a kernel that failed."""


class CalibrationError(AnyBitError, ValueError):
    """A calibration that cannot continue: a layer that is never reached, NaN or infinity, an unusable Hessian."""


class OptionError(AnyBitError, ValueError):
    """An option of a quantization method that is unknown or has an impossible value."""


def dtype_name(dtype: object) -> str:
    """A dtype as messages and files name it: "float16"."""
    return str(dtype).removeprefix("torch.")


def sixteen_bits(what: str, dtype: object) -> str:
    """A sentence for values of another type than kernels take, and what to do about it."""
    advice = "load the model with dtype=torch.float16 or torch.bfloat16"
    return f"{what} float16 or bfloat16, not {dtype_name(dtype)}: {advice}"


def printable(text: object, keep: str = "") -> str:
    r"""Text from a file as a terminal may show it: what is not printable becomes an escape such as ``\x1b``.

    A name of a tensor, a model type or a path may hold control characters, which would move the cursor or colour the
    screen, and marks that turn the direction of writing.  keep: characters that stay, such as "\n\t" in a text.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in shown
    )


def one_line(error: BaseException, first: bool = False) -> str:
    """Another library's error within a sentence: its words or its first line, 300 characters at most."""
    text = str(error).strip()
    text = " ".join((text.splitlines() or [""])[0].split() if first else text.split())
    # Python's own words make no sentence alone: KeyError('x') says 'x'.
    if not text or isinstance(error, LookupError | TypeError | AttributeError | RecursionError | ArithmeticError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= 300 else f"{text[:297]}..."
