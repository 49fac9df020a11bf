"""The quantization methods, one module each; ``METHODS`` and ``quantize_folder`` are those of ``registry``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybit.quantization.methods.registry import METHODS, Method, quantize_folder

__all__ = ["METHODS", "Method", "quantize_folder"]


def __getattr__(name: str) -> Any:
    """A name of the registry, loaded when it is first asked for: a method's module is imported without it."""
    if name not in __all__:
        raise AttributeError(f"module 'anybit.quantization.methods' has no attribute {name!r}")
    from anybit.quantization.methods import registry

    return getattr(registry, name)
