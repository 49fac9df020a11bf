"""The ``quantization_config`` of a config.json: who quantized a model, and how.

If compressed-tensors can represent the model, the entry is a compressed-tensors one, so that any program that reads
that format loads the folder, with anybit's settings nested under ``anybit``. Otherwise the entry is anybit's own.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from anybit.errors import CheckpointError, SchemeError
from anybit.models.patterns import LONGEST_PATTERN, MOST_REPETITIONS, check_pattern, is_wild
from anybit.scheme import CODES, Scheme, WeightFormat, nested_widths
from anybit.version import __version__

METHOD = "anybit"
COMPRESSED_TENSORS = "compressed-tensors"
FORMAT = "pack-quantized"
"""compressed-tensors' name for the tensor format that anybit uses."""

_SETTINGS = {
    "version", "scheme", "overrides", "modules_to_not_convert", "group_index", "hadamard", "backend", "nested",
}  # fmt: skip
_KINDS = ("checkpoint_format", "packing_format", "version", "quant_algo", "format")
"""Keys by which other tools name a method's layout."""


class Overrides(dict[str, Scheme]):
    """Schemes of single layers, by name or shell pattern. Not to be changed: patterns are sorted out once."""

    @cached_property
    def _patterns(self) -> list[str]:
        return [pattern for pattern in self if is_wild(pattern)]  # of a mixture's names there may be thousands

    def of(self, layer: str) -> Scheme | None:
        """A layer's scheme: by its name, else by the last pattern that matches it; None if none does."""
        if layer in self:
            return self[layer]
        return next((self[pattern] for pattern in reversed(self._patterns) if fnmatchcase(layer, pattern)), None)

    def in_any_order(self, layers: Collection[str]) -> "Overrides":
        """The same in any order, as transformers sorts config.json: by name where patterns disagree."""
        patterns = self.keys() - set(layers)
        matches = ({self[pattern] for pattern in patterns if fnmatchcase(name, pattern)} for name in layers)
        if all(len(found) < 2 for found in matches):
            return self
        return Overrides((name, found) for name in layers if (found := self.of(name)) is not None)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a saved model is quantized, according to its config.json.

    kept: names or patterns of unquantized modules; None: the output head.  group_index: whether every layer stores an
    activation order.  hadamard: layers whose inputs are rotated at run time.
    overrides: per-layer schemes, by name or shell pattern.
    nested: widths that the weights in ``scheme``'s format can be sliced to.
    """

    scheme: Scheme
    kept: list[str] | None = None
    group_index: bool = False
    hadamard: list[str] = field(default_factory=list)
    overrides: Overrides = field(default_factory=Overrides)
    nested: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, config: Mapping[str, object], where: object = "config.json") -> "Quantization | None":
        """Read a config.json that anybit wrote; None for a model that it did not quantize.

        Raises CheckpointError, naming ``where`` and the entry, for settings that are missing, unknown or of the wrong
        type, a newer version, patterns with catastrophic backtracking, and compressed-tensors settings that contradict
        anybit's.
        """
        entry = config.get("quantization_config")
        settings = settings_of(entry)
        if settings is None:
            return None
        place = f"{where}: quantization_config"
        text, group_index = settings.get("scheme"), settings.get("group_index", False)
        if not isinstance(text, str):
            raise CheckpointError(f"{place} names anybit, but no scheme")
        if "input_scale" in settings:
            raise CheckpointError(
                f"{place} has input_scale: the model was written by method onebit, which is gone: quantize the "
                "original model again, for example to w1a16 with method gptq"
            )
        unknown = sorted(set(settings) - _SETTINGS)
        if unknown:
            raise CheckpointError(
                f"{place} has {unknown[0]}, which this version of anybit does not know; "
                f"it knows {', '.join(sorted(_SETTINGS))}"
            )
        if not isinstance(group_index, bool):
            raise CheckpointError(f"{place}.group_index must be true or false, not {group_index!r}")
        kept, hadamard = (_names(settings, name, place) for name in ("modules_to_not_convert", "hadamard"))
        if not isinstance(settings.get("backend"), str | None):
            raise CheckpointError(f"{place}.backend must be a name, not {_short(settings['backend'])}")
        nested = settings.get("nested", [])
        if not isinstance(nested, list):
            raise CheckpointError(f"{place}.nested must be a list of widths, not {_short(nested)}")
        try:
            scheme = Scheme.parse(text)
            nested = nested_widths(scheme.weights, nested)
        except SchemeError as error:
            raise CheckpointError(f"{place}: {error}") from None
        _check_version(settings.get("version"), place)
        for pattern in kept or ():
            check_pattern(pattern, f"{place}.modules_to_not_convert")
        if isinstance(entry, Mapping) and entry.get("quant_method") == COMPRESSED_TENSORS:
            _check_agreement(entry, scheme, place)
        overrides = _overrides(settings.get("overrides"), place)
        return cls(scheme, kept, group_index, hadamard or [], overrides, nested)

    def scheme_of(self, layer: str) -> Scheme:
        """The scheme of one layer."""
        return self.overrides.of(layer) or self.scheme

    def renamed(self, rename: Callable[[str], str]) -> "Quantization":
        """The same with other names of layers."""
        kept = [*map(rename, self.kept)] if isinstance(self.kept, list) else self.kept
        overrides = Overrides((rename(name), scheme) for name, scheme in self.overrides.items())
        return replace(self, kept=kept, hadamard=[*map(rename, self.hadamard)], overrides=overrides)

    def entry(self, ignore: list[str] | None = None) -> dict[str, object]:
        """The ``quantization_config`` of such a model.

        ignore: all unquantized Linears, if compressed-tensors can represent the model; None if it cannot.
        """
        settings = {
            "version": __version__,
            "scheme": str(self.scheme),
            "overrides": {name: str(scheme) for name, scheme in self.overrides.items()},
            "modules_to_not_convert": self.kept,
            "group_index": self.group_index,
            "hadamard": self.hadamard,
            "nested": self.nested,
        }
        settings = {name: value for name, value in settings.items() if value or name == "modules_to_not_convert"}
        if ignore is None:
            return {"quant_method": METHOD, **settings}
        return {**compressed_tensors_settings(self.scheme.weights, ignore), METHOD: settings}


def parse_overrides(overrides: Mapping[str, str | Scheme] | None) -> Overrides:
    """Parse and check per-layer schemes. Raises SchemeError for one that a saved model cannot have."""
    found = Overrides()
    for pattern, text in (overrides or {}).items():
        if len(pattern) > LONGEST_PATTERN or pattern.count("*") > MOST_REPETITIONS:
            raise SchemeError(
                f"{_short(pattern)} is not a valid pattern of layers: at most {LONGEST_PATTERN} characters and "
                f"{MOST_REPETITIONS} stars are allowed"
            )
        try:
            found[pattern] = Scheme.parse(text)
        except SchemeError as error:
            raise SchemeError(f"{pattern}: {error}") from None
        if found[pattern].kv is not None:
            raise SchemeError(f"{pattern}: a layer has no KV cache, and {text} names one")
    return found


def settings_of(quantization: object) -> dict[str, object] | None:
    """Anybit's own settings in a ``quantization_config``, unchecked; None if there are none."""
    if not isinstance(quantization, Mapping):
        return None
    if quantization.get("quant_method") == METHOD:
        return {name: value for name, value in quantization.items() if name != "quant_method"}
    settings = quantization.get(METHOD)
    if quantization.get("quant_method") == COMPRESSED_TENSORS and isinstance(settings, Mapping):
        return dict(settings)
    return None


def compressed_tensors_settings(fmt: WeightFormat, ignore: list[str]) -> dict[str, Any]:
    """compressed-tensors' ``quantization_config`` for weights in a format: all Linear layers except ``ignore``."""
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": FORMAT,
        "quantization_status": "compressed",
        # transformers 5.23 allocates unpacked zero points, and so rejects packed ones unless it dequantizes the model.
        **({"dequantize": True} if fmt.code == "asym" else {}),
        "ignore": ignore,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights_settings(fmt),
                "input_activations": None,
                "output_activations": None,
                "format": FORMAT,
            }
        },
    }


def why_not(scheme: Scheme) -> str | None:
    """What part of a scheme integers with integer zeros cannot represent, in a sentence, or None.

    These are compressed-tensors' pack-quantized format, and GPTQ's.
    """
    if scheme.weights.code == "bipolar":
        return "bipolar codes: their zero points are not integers"
    if scheme.weights.code not in CODES:
        return f"{scheme.weights.code} codes: it has integers with integer zeros"
    if scheme.weights.sparse:
        return "2:4 sparse weights: it stores whole rows"
    if scheme.activations.quantized:
        return f"{scheme.activations.bits}-bit activations: it has 16 bits, or rounds them differently"
    if scheme.kv is not None and scheme.kv.quantized:
        return f"the KV format {scheme.kv}: it has no groups for KV caches"
    return None


def method_of(config: Mapping[str, object]) -> str | None:
    """The quantization method of a model: "anybit", another one's name, or None if it is not quantized."""
    entry = config.get("quantization_config")
    if not entry:
        return None
    if settings_of(entry) is not None:
        return METHOD
    method = entry.get("quant_method") if isinstance(entry, Mapping) else None
    return method if isinstance(method, str) else "an unknown method"


def refuse_quantized(config: Mapping[str, object], what: str) -> None:
    """Raise CheckpointError if a model is quantized already."""
    method = method_of(config)
    if method is not None:
        entry = config["quantization_config"]
        settings = settings_of(entry) or entry
        scheme = settings.get("scheme") if isinstance(settings, Mapping) else None
        named = f"{method}, {scheme}" if isinstance(scheme, str) else method
        raise CheckpointError(f"{what} is quantized already ({named}): start from the original model")


def unreadable(config: Mapping[str, object], what: object, reason: str) -> CheckpointError:
    """The error for a model whose quantization method cannot be read: what it is, why it failed, what to do."""
    entry = config.get("quantization_config")
    settings = entry if isinstance(entry, Mapping) else {}
    kind = next((f" ({name} {settings[name]})" for name in _KINDS if isinstance(settings.get(name), str)), "")
    return CheckpointError(
        f"{what} is quantized by {method_of(config)}{kind}, which anybit does not read, and transformers cannot load "
        f"it here: {reason}; start from the original model"
    )


def _names(entry: Mapping[str, object], key: str, place: str) -> list[str] | None:
    """A list of names in a quantization_config; None without one."""
    value = entry.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{place}.{key} must be a list of names, not {_short(value)}")
    return value


def _overrides(value: object, place: str) -> Overrides:
    if value is None:
        return Overrides()
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for item in value.items() for text in item):
        raise CheckpointError(f"{place}.overrides must map layer names to schemes, not be {_short(value)}")
    try:
        return parse_overrides(value)
    except SchemeError as error:
        raise CheckpointError(f"{place}.overrides: {error}") from None


def _check_version(version: object, place: str) -> None:
    """Refuse newer versions, which may have changed what settings mean; older ones are compatible."""
    if version is None:
        return
    match = re.match(r"(\d{1,9})\.(\d{1,9})\b", version) if isinstance(version, str) else None
    if match is None:
        raise CheckpointError(f"{place}.version must be a version such as {__version__!r}, not {_short(version)}")
    if [*map(int, match.groups())] > [*map(int, __version__.split(".")[:2])]:
        raise CheckpointError(
            f"{place} was written by anybit {version}, and this is {__version__}: pip install --upgrade anybit"
        )


def weights_settings(fmt: WeightFormat) -> dict[str, object]:
    """compressed-tensors' settings of weights in a format."""
    return {
        "num_bits": fmt.bits,
        "type": "int",
        "symmetric": fmt.code == "sym",
        "strategy": "channel" if fmt.group is None else "group",
        "group_size": fmt.group,
        "dynamic": False,
    }


def _check_agreement(entry: Mapping[str, object], scheme: Scheme, place: str) -> None:
    """Raise CheckpointError if compressed-tensors' settings contradict anybit's."""
    groups = entry.get("config_groups")
    (group,) = groups.values() if isinstance(groups, Mapping) and len(groups) == 1 else (None,)
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or entry.get("format") != FORMAT:
        raise CheckpointError(f"{place} must describe one group of weights in the format {FORMAT}, and does not")
    for name, value in weights_settings(scheme.weights).items():
        if weights.get(name) != value:
            raise CheckpointError(
                f"{place} contradicts itself: its scheme is {scheme}, "
                f"and {name} of its weights {_short(weights.get(name))}"
            )
    _names(entry, "ignore", place)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
