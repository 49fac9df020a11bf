"""Folders of quantized layers that transformers would fill with random weights, refused once anybit is there.

transformers asks a quantizer only where config.json names a method that it knows. Where that name is damaged, or gone,
it warns, makes the weights up, and reports those that it has no place for. Importing this module ends both. It also
says what to call for a folder of another tool's that is given an ``AnyBitConfig``.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers import auto

from anybit.checkpoints.configuration import METHOD, settings_of
from anybit.errors import CheckpointError, one_line

_CODES = ("weight_packed", "qweight")
"""What layers of compressed-tensors (and anybit), GPTQ and AWQ keep instead of a weight."""


def _refusing_damage(theirs: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """What transformers asks of a method: where it does not know one, it warns and makes the weights up."""

    @functools.wraps(theirs)
    def supports_quant_method(entry: Any) -> bool:
        method = entry.get("quant_method")
        ours = isinstance(entry.get(METHOD), Mapping) or "scheme" in entry
        if ours and not (isinstance(method, str) and method in auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
            raise CheckpointError(
                f"quantization_config has anybit's words in it, and a quant_method that nothing knows: {method!r:.80}; "
                "config.json is damaged"
            )
        try:
            return theirs(entry)
        except ValueError as error:  # of an entry that names no method
            raise CheckpointError(f"quantization_config cannot be used: {one_line(error)}") from None

    return supports_quant_method


def _refusing_others(theirs: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """What transformers asks where a model is quantized and a configuration is given, too."""

    @functools.wraps(theirs)
    def merge_quantization_configs(entry: Any, given: Any) -> Any:
        ours = getattr(given, "quant_method", None) == METHOD
        if ours and isinstance(entry, Mapping) and settings_of(entry) is None:
            raise CheckpointError(
                f"the model is quantized already, by {entry.get('quant_method')}: anybit.load(MODEL) gives it with its "
                "codes on anybit's kernels, and a scheme needs the original model"
            )
        return theirs(entry, given)

    return merge_quantization_configs


def _refusing_codes(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """What transformers does once it has read a checkpoint; weights that it lacks are made up here."""

    @functools.wraps(theirs)
    def finalize(model: Any, load_config: Any, loading_info: Any) -> Any:
        base = f"{model.base_model_prefix}."  # which a model and the folder need not both have
        surplus = {name.removeprefix(base): name for name in loading_info.unexpected_keys}
        for name in sorted(loading_info.missing_keys):
            layer = name.removeprefix(base).removesuffix(".weight")
            codes = next((surplus[f"{layer}.{code}"] for code in _CODES if f"{layer}.{code}" in surplus), None)
            if codes is not None and name.endswith(".weight"):
                raise CheckpointError(
                    f"{load_config.pretrained_model_name_or_path} has {codes}, codes of a quantized layer, and "
                    "its config.json no quantization_config that can be used: restore that entry"
                )
        return theirs(model, load_config, loading_info)

    return finalize


auto.AutoHfQuantizer.supports_quant_method = staticmethod(_refusing_damage(auto.AutoHfQuantizer.supports_quant_method))
auto.AutoHfQuantizer.merge_quantization_configs = staticmethod(
    _refusing_others(auto.AutoHfQuantizer.merge_quantization_configs)
)
if hasattr(PreTrainedModel, "_finalize_model_loading"):  # transformers' own, which a version to come may not have
    PreTrainedModel._finalize_model_loading = staticmethod(_refusing_codes(PreTrainedModel._finalize_model_loading))
