"""Refuse quantized checkpoints that transformers would load with random weights.

If config.json names no quantization method, or one that transformers does not know, transformers only warns,
initializes the missing weights randomly and reports the codes as unexpected keys. Importing this module turns that
into a CheckpointError. It also says what to call instead when an ``AnyBitConfig`` is passed for another tool's folder.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from transformers import PreTrainedModel
from transformers.quantizers import auto

from anybit.checkpoints.configuration import METHOD, settings_of
from anybit.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils.loading_report import LoadStateDictInfo
    from transformers.utils.quantization_config import QuantizationConfigMixin

_CODES = ("weight_packed", "qweight")
"""Tensors that quantized layers hold instead of a weight: compressed-tensors (and anybit), GPTQ and AWQ."""


_supports, _merge = auto.AutoHfQuantizer.supports_quant_method, auto.AutoHfQuantizer.merge_quantization_configs
_finalize = getattr(PreTrainedModel, "_finalize_model_loading", None)


@functools.wraps(_supports)
def _refuse_damage(entry: Mapping[str, object]) -> bool:
    """``supports_quant_method``: transformers ignores an unknown method and initializes weights randomly."""
    method = entry.get("quant_method")
    ours = isinstance(entry.get(METHOD), Mapping) or "scheme" in entry
    if ours and not (isinstance(method, str) and method in auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        raise CheckpointError(
            f"quantization_config has anybit's settings but an unknown quant_method, {method!r:.80}: config.json is "
            "damaged"
        )
    try:
        supported: bool = _supports(entry)
        return supported
    except ValueError as error:  # the entry names no method
        raise CheckpointError(f"quantization_config cannot be used: {one_line(error)}") from None


@functools.wraps(_merge)
def _refuse_others(entry: object, given: object) -> "QuantizationConfigMixin":
    """``merge_quantization_configs``, called when a quantized model is also given a configuration."""
    ours = getattr(given, "quant_method", None) == METHOD
    if ours and isinstance(entry, Mapping) and settings_of(entry) is None:
        raise CheckpointError(
            f"the model is already quantized by {entry.get('quant_method')}: anybit.load(MODEL) runs its codes on "
            "anybit's kernels; to quantize to another scheme, start from the original model"
        )
    return _merge(entry, given)


def _refuse_codes(
    model: PreTrainedModel, load_config: "LoadStateDictConfig", loading_info: "LoadStateDictInfo"
) -> "LoadStateDictInfo":
    """``_finalize_model_loading``, in which transformers initializes missing weights."""
    base = f"{model.base_model_prefix}."  # may be on the model's names or the folder's only
    surplus = {name.removeprefix(base): name for name in loading_info.unexpected_keys}
    for name in sorted(loading_info.missing_keys):
        layer = name.removeprefix(base).removesuffix(".weight")
        codes = next((surplus[f"{layer}.{code}"] for code in _CODES if f"{layer}.{code}" in surplus), None)
        if codes is not None and name.endswith(".weight"):
            raise CheckpointError(
                f"{load_config.pretrained_model_name_or_path} has {codes}, codes of a quantized layer, but its "
                "config.json has no usable quantization_config: restore that entry"
            )
    return _finalize(model, load_config, loading_info)  # type: ignore[misc]


auto.AutoHfQuantizer.supports_quant_method = staticmethod(_refuse_damage)
auto.AutoHfQuantizer.merge_quantization_configs = staticmethod(_refuse_others)
if _finalize is not None:  # private to transformers: later versions may lack it
    PreTrainedModel._finalize_model_loading = staticmethod(_refuse_codes)
