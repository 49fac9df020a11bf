"""anybit: large language models at any bit-width, at the speed the hardware allows.

    from transformers import AutoModelForCausalLM
    from anybit import AnyBitConfig

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=AnyBitConfig("w4a16g128"))

Importing anybit touches no GPU, creates no folder, and imports neither torch nor transformers: each public name is
imported on first use. It registers anybit with transformers, now or as soon as transformers is imported, so that saved
models load with ``from_pretrained(name)`` alone, and sets ``GOMP_SPINCOUNT``, unless it is set.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from anybit.registration import register_in_time
from anybit.version import __version__ as __version__

if TYPE_CHECKING:
    from anybit.cache.kvcache import KVCache
    from anybit.codes.packing import QuantizedWeight
    from anybit.codes.rtn import quantize_weight
    from anybit.errors import AnyBitError
    from anybit.hf.cache import AnyBitCache
    from anybit.hf.fuse import accelerate, fuse, unfuse
    from anybit.hf.loading import load
    from anybit.hf.transformers import AnyBitConfig
    from anybit.layers.functional import matmul, quantize
    from anybit.layers.linear import QuantLinear, use_backend
    from anybit.scheme import ActivationFormat, KVFormat, Scheme, WeightFormat

__all__ = [
    "ActivationFormat", "AnyBitCache", "AnyBitConfig", "AnyBitError", "KVCache", "KVFormat", "QuantLinear",
    "QuantizedWeight", "Scheme", "WeightFormat", "accelerate", "fuse", "load", "matmul", "quantize", "quantize_weight",
    "unfuse", "use_backend",
]  # fmt: skip

_DEFINED = {
    "cache.kvcache": ["KVCache"],
    "codes.packing": ["QuantizedWeight"],
    "codes.rtn": ["quantize_weight"],
    "errors": ["AnyBitError"],
    "hf.cache": ["AnyBitCache"],
    "hf.fuse": ["accelerate", "fuse", "unfuse"],
    "hf.loading": ["load"],
    "hf.transformers": ["AnyBitConfig"],
    "layers.functional": ["matmul", "quantize"],
    "layers.linear": ["QuantLinear", "use_backend"],
    "scheme": ["ActivationFormat", "KVFormat", "Scheme", "WeightFormat"],
}
"""The public names that each module defines."""
_HOMES = {name: module for module, names in _DEFINED.items() for name in names}
_MODULES = {"attention": "cache.attention", "evaluate": "hf.evaluate", "functional": "layers.functional"}
"""Modules that are public names themselves."""


def __getattr__(name: str) -> Any:
    """Import a public name or a subpackage (``anybit.ops``) on first use."""
    if name in _HOMES:
        value = getattr(importlib.import_module(f"anybit.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"anybit.{_MODULES.get(name, name)}")
        except ModuleNotFoundError as error:
            if error.name != f"anybit.{name}":
                raise
    raise AttributeError(f"module 'anybit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# On shared cores, torch's OpenMP threads waste time spinning: a millisecond after every small op before they sleep.
# Spinning for microseconds is 16 times as fast there, and as fast on idle cores. Read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
register_in_time()
