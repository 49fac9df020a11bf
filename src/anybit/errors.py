"""The errors that anybit raises on purpose; each message names the thing, its value, and what is allowed."""


class AnyBitError(Exception):
    """The root of every error that anybit raises on purpose."""


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
