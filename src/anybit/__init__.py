"""anybit: large language models at any bit-width, at the speed the hardware allows.

    from transformers import AutoModelForCausalLM
    from anybit import AnyBitConfig

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=AnyBitConfig("w4a16g128"))

Importing anybit touches no GPU, reads no environment variable, creates no folder, and imports neither torch nor
transformers: each public name is imported on first use. It does register anybit with transformers, now or as soon as
transformers is imported, so that saved models load with ``from_pretrained(name)`` alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

from anybit.registration import register_in_time

if TYPE_CHECKING:
    from anybit.errors import AnyBitError
    from anybit.functional import matmul, quantize
    from anybit.integrations.cache import AnyBitCache
    from anybit.integrations.fuse import accelerate, fuse, unfuse
    from anybit.integrations.loading import load
    from anybit.integrations.transformers import AnyBitConfig
    from anybit.kvcache import KVCache
    from anybit.linear import QuantLinear, use_backend
    from anybit.packing import QuantizedWeight
    from anybit.quantization.methods.rtn import quantize_weight
    from anybit.scheme import ActivationFormat, KVFormat, Scheme, WeightFormat

__version__ = "0.1.0"

__all__ = [
    "ActivationFormat",
    "AnyBitCache",
    "AnyBitConfig",
    "AnyBitError",
    "KVCache",
    "KVFormat",
    "QuantLinear",
    "QuantizedWeight",
    "Scheme",
    "WeightFormat",
    "accelerate",
    "fuse",
    "load",
    "matmul",
    "quantize",
    "quantize_weight",
    "unfuse",
    "use_backend",
]

_HOMES = {
    "ActivationFormat": "scheme",
    "AnyBitCache": "integrations.cache",
    "AnyBitConfig": "integrations.transformers",
    "AnyBitError": "errors",
    "KVCache": "kvcache",
    "KVFormat": "scheme",
    "QuantLinear": "linear",
    "QuantizedWeight": "packing",
    "Scheme": "scheme",
    "WeightFormat": "scheme",
    "accelerate": "integrations.fuse",
    "fuse": "integrations.fuse",
    "load": "integrations.loading",
    "matmul": "functional",
    "quantize": "functional",
    "quantize_weight": "quantization.methods.rtn",
    "unfuse": "integrations.fuse",
    "use_backend": "linear",
}
"""The module that defines each public name."""


def __getattr__(name: str) -> Any:
    """Import a public name or a subpackage (``anybit.ops``) on first use."""
    if name in _HOMES:
        value = getattr(importlib.import_module(f"anybit.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"anybit.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"anybit.{name}":
                raise
    raise AttributeError(f"module 'anybit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_in_time()
