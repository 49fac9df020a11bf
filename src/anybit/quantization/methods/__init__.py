"""The quantization methods, one module each; ``METHODS`` and ``quantize_folder`` come from ``registry``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anybit.quantization.methods.registry import METHODS, Method, quantize_folder

__all__ = ["METHODS", "Method", "quantize_folder"]


def __getattr__(name: str) -> Any:
    """Import a name from the registry on first use, so that importing one method does not import the registry."""
    if name not in __all__:
        raise AttributeError(f"module 'anybit.quantization.methods' has no attribute {name!r}")
    from anybit.quantization.methods import registry

    return getattr(registry, name)
