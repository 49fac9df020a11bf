"""Linear layers that GPTQ's, AWQ's and auto-round's tools stored, inside vLLM on anybit's kernels.

vLLM hands over whole tensors of a checkpoint. Once those of a layer are together, they are read as ``convert`` reads
them, and go on to the loaders of anybit's own tensors: fused layers and ranks are theirs to cut.
"""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method

from anybit.checkpoints.formats import Format, Source, StoredLayer, format_of
from anybit.errors import CheckpointError, LayerError
from anybit.integrations.vllm import warmup
from anybit.integrations.vllm.linear import AnyBitLinearMethod, Part
from anybit.integrations.vllm.parameters import empty
from anybit.linear import QuantLinear
from anybit.packing import QuantizedWeight
from anybit.scheme import GROUPS, Code, Scheme, WeightFormat

MARK = "qweight"
"""The tensor that such layers have."""


@dataclass
class _Received:
    """Tensors by their names, in the place of a folder."""

    entries: dict[str, Tensor]

    def read(self, name: str) -> Tensor:
        return self.entries[name]


@dataclass(frozen=True)
class Foreign:
    """How another tool stored a model.

    scheme: of its layers.  overrides: of those that have another one, by name.  ordered: in activation order.
    """

    config: dict[str, Any]
    scheme: Scheme
    overrides: dict[str, Scheme]
    ordered: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Foreign | None":
        """What a quantization_config says; None for other formats. CheckpointError for what anybit cannot run."""
        format = format_of({"quantization_config": config})
        if format is None or MARK not in format.MARKS:
            return None
        own = {**(config.get("dynamic") or {}), **(config.get("extra_config") or {})}
        quantized = {name: words for name, words in own.items() if words.get("bits", 16) < 16}
        patterns = [name for name in quantized if not re.fullmatch(r"[\w.]+", name)]
        if patterns:
            raise CheckpointError(
                f"layers of the model that match {patterns[0]!r} have words of their own, which anybit does not read "
                "inside vLLM: convert the model first, `anybit convert FOLDER --to anybit -o OUT`"
            )
        scheme = _scheme(format, config)
        overrides = {name: _scheme(format, {**config, **words}) for name, words in quantized.items()}
        ordered = bool(config.get("desc_act")) and scheme.weights.group is not None
        return cls(config, scheme, overrides, ordered)

    @property
    def format(self) -> Format:
        """The reader of its layers; a module, which does not go to another process."""
        found = format_of({"quantization_config": self.config})
        assert found is not None
        return found

    def read(self, name: str, tensors: dict[str, Tensor], scheme: Scheme, dtype: torch.dtype) -> QuantizedWeight:
        """A layer's weight, scales in ``dtype``. CheckpointError where it is not in ``scheme``."""
        source = _Received({f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()})
        try:
            weight = self.format.read(StoredLayer(cast(Source, source), name, self.config)).with_scales(dtype)
        except LayerError as error:
            raise CheckpointError(f"layer {name}: {error}") from None
        wanted = scheme.weights
        if wanted.code == "asym" and weight.format == replace(wanted, code="sym"):  # zeros that are all in the middle
            zero = torch.full(weight.scale.shape, 1 << (wanted.bits - 1), dtype=torch.uint8)
            weight = replace(weight, format=wanted, zero=zero)
        if weight.format != wanted:
            raise CheckpointError(
                f"layer {name} holds {Scheme(weight.format)}, and the model's configuration says {scheme}: leave "
                "out --quantization anybit, or convert the model first, `anybit convert FOLDER --to anybit -o OUT`"
            )
        if self.ordered and weight.group_index is None:
            weight = replace(weight, group_index=weight.groups().to(torch.int32))
        return weight


def _scheme(format: Format, words: dict[str, Any]) -> Scheme:
    """What words of a quantization_config say of a layer."""
    code: Code = "asym" if format.NAME == "awq" or not words.get("sym", True) else "sym"
    size = words.get("group_size") or -1
    fitting = [group for group in GROUPS if size > 0 and size % group == 0]
    if size > 0 and not fitting:
        raise CheckpointError(f"the model has groups of {size} inputs; anybit's have {GROUPS} or a multiple of these")
    return Scheme(WeightFormat(int(words.get("bits", 4)), code, max(fitting) if fitting else None))


@register_weight_loader_v2_supported_method
class AnyBitForeignLinearMethod(AnyBitLinearMethod):
    """Layers of a checkpoint that another tool wrote."""

    def __init__(self, foreign: Foreign, scheme: Scheme, parts: list[Part], ledger: warmup.Ledger) -> None:
        super().__init__(scheme, parts, ledger, foreign.ordered, False)
        self.foreign = foreign
        self.needed = {MARK, "qzeros", "scales"} | ({"g_idx"} if foreign.ordered else set())

    def create_weights(self, layer: Any, *args: Any, **words: Any) -> None:
        """Room for this rank's part of anybit's tensors, and a place where the checkpoint's arrive."""
        super().create_weights(layer, *args, **words)
        layer.anybit_received = {}
        for suffix in self.foreign.format.TENSORS:
            place = torch.nn.Parameter(empty(0, dtype=torch.uint8), requires_grad=False)
            place.weight_loader = partial(self._receive, layer, suffix)  # type: ignore[attr-defined]
            layer.register_parameter(suffix, place)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Codes as vLLM loaded them -> the layout of a backend."""
        for shard, tensors in getattr(layer, "anybit_received", {}).items():
            missing = ", ".join(sorted(self.needed - tensors.keys()))
            raise CheckpointError(f"layer {self._named(shard)}: the checkpoint has no {missing}")
        super().process_weights_after_loading(layer)

    def _receive(self, layer: Any, suffix: str, parameter: Tensor, loaded: Tensor, *shard: Any) -> None:
        if suffix not in self.needed:
            if suffix == "g_idx" and bool((loaded.int().diff() < 0).any()):
                raise CheckpointError(
                    f"layer {self._named(shard)} is in activation order, and the model's configuration does not say "
                    "desc_act: leave out --quantization anybit"
                )
            return
        tensors = layer.anybit_received.setdefault(shard, {})
        tensors[suffix] = loaded
        if not self.needed <= tensors.keys():
            return
        del layer.anybit_received[shard]
        weight = self.foreign.read(self._named(shard), tensors, self.scheme, layer.weight_scale.dtype)
        for name, tensor in QuantLinear.tensors_of(weight).items():
            own = getattr(layer, name)
            own.weight_loader(own, tensor, *shard)

    def _named(self, shard: tuple[Any, ...]) -> str:
        index = {"q": 0, "k": 1, "v": 2}.get(shard[0], shard[0]) if shard else None
        return self.parts[index].name if isinstance(index, int) and index < len(self.parts) else self.name
