"""anybit: large language models at any bit-width, at the speed the hardware allows.

    from transformers import AutoModelForCausalLM
    from anybit import AnyBitConfig

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=AnyBitConfig("w4a16g128"))

Importing anybit touches no GPU, reads no environment variable and makes no folder; it registers anybit with
transformers, so that a saved model loads by its name alone.
"""

__version__ = "0.1.0"

from anybit.errors import AnyBitError
from anybit.integrations.cache import AnyBitCache
from anybit.integrations.fuse import accelerate, fuse, unfuse
from anybit.integrations.transformers import AnyBitConfig
from anybit.kvcache import KVCache
from anybit.linear import QuantLinear, use_backend
from anybit.packing import QuantizedWeight
from anybit.quantize.rtn import quantize_weight
from anybit.scheme import ActivationFormat, KVFormat, Scheme, WeightFormat

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
    "quantize_weight",
    "unfuse",
    "use_backend",
]
