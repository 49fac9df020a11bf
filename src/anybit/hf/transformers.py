"""anybit in transformers: ``from_pretrained(model, quantization_config=AnyBitConfig("w4a16g128"))``, save and reload.

Importing this module (or anybit) registers the quantizer. transformers selects it by ``quant_method: "anybit"``;
checkpoints in compressed-tensors format select it by an ``anybit`` section in their ``quantization_config``.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightTransform
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import auto
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from anybit.checkpoints.configuration import (
    COMPRESSED_TENSORS,
    METHOD,
    Overrides,
    Quantization,
    parse_overrides,
    settings_of,
)
from anybit.checkpoints.expert_parts import traps
from anybit.checkpoints.folder import check_index, read_entries, read_json, refuse_not_finite
from anybit.checkpoints.safetensors import Entry, read_tensor
from anybit.checkpoints.shared import shared_ignore
from anybit.checkpoints.verify import TRAP, check_config, check_layers, check_model, check_values, names_in
from anybit.codes.rtn import quantize_weight
from anybit.errors import AnyBitError, CheckpointError, KernelError, LayerError, OptionError
from anybit.hf import graph
from anybit.hf.model_methods import give_back, take_over
from anybit.layers.embedding import QuantEmbedding, put_embedding
from anybit.layers.experts import Experts
from anybit.layers.linear import QuantLinear
from anybit.models import modules
from anybit.models.experts import HubNames, conversions, unfuse, warn_of_left
from anybit.models.modules import is_linear, untie
from anybit.ops import backends
from anybit.scheme import Scheme, nested_widths


@register_quantization_config(METHOD)
class AnyBitConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How a transformers model is quantized.

    scheme: for example "w4a16g128" (see ``anybit.scheme``).
    modules_to_not_convert: names or patterns of linear layers to leave unquantized; by default the output head. A head
        tied to the embedding is never quantized by default.
    backend: the backend that runs the layers; by default the first one that supports a layer on its device. On a CPU,
        "reference-decoded" (the default) is fast and keeps float32 weights; "reference-packed" keeps them packed.
        Not saved. transformers ignores it for checkpoints that are already quantized: there, call
        ``anybit.use_backend(model, name)``.
    group_index: the checkpoint stores an activation order (``weight_g_idx``) for every layer.
    hadamard: names of the layers whose inputs are rotated at run time (``anybit.quantization.methods.rotate``).
    nested: widths that a loaded folder can be sliced to (``anybit.load``).
    overrides: per-layer schemes, keyed by layer name or by a pattern such as "*.down_proj". An exact name wins over
        patterns; among patterns the last match wins. Naming a head quantizes it; a tied head then gets codes of its
        own, and the embedding is unchanged.
    Raises SchemeError for an invalid scheme, KernelError for an unknown backend, OptionError for an unknown argument.
    """

    def __init__(
        self,
        scheme: str | Scheme = "w4a16g128",
        modules_to_not_convert: list[str] | None = None,
        backend: str | None = None,
        group_index: bool = False,
        hadamard: list[str] | None = None,
        overrides: Mapping[str, str | Scheme] | None = None,
        nested: Sequence[int] = (),
        **unknown: object,
    ) -> None:
        self.quant_method = METHOD
        self.scheme = str(Scheme.parse(scheme))
        self.modules_to_not_convert = modules_to_not_convert
        self.backend = backend
        self.group_index = group_index
        self.hadamard, self.nested = list(hadamard or ()), list(nested)
        self.overrides = {layer: str(other) for layer, other in parse_overrides(overrides).items()}
        self.ignore: list[str] | None = None
        self.names = HubNames()
        if backend is not None and backend not in backends:
            raise KernelError(f"backend {backend!r} is unknown; there are {', '.join(backends)}")
        # Saved configurations also carry the method and the version that wrote them; neither changes anything here.
        unexpected = set(unknown) - {"quant_method", "version"}
        if unexpected:
            known = "scheme, modules_to_not_convert, backend, group_index, hadamard, overrides and nested"
            raise OptionError(f"AnyBitConfig takes no {', '.join(sorted(unexpected))}; it takes {known}")

    @classmethod
    def from_dict(cls, config_dict: dict[str, object], return_unused_kwargs: bool = False, **kwargs: object) -> Self:
        """Parse anybit's settings, alone or in compressed-tensors' entry. Raises CheckpointError if there are none."""
        if Quantization.of({"quantization_config": config_dict}) is None:
            raise CheckpointError(f"anybit's quantization_config needs quant_method {METHOD!r} and a scheme")
        made: Self = super().from_dict(settings_of(config_dict), return_unused_kwargs, **kwargs)
        return made

    def to_dict(self) -> dict[str, object]:
        """The ``quantization_config`` for config.json; it describes the checkpoint, so it omits the backend.

        Where compressed-tensors can hold the model, this is its entry plus an ``anybit`` section.
        """
        saved = self.quantization.renamed(self.names.hub)
        return saved.entry(None if self.ignore is None else self.names.both(self.ignore))

    @property
    def quantization(self) -> Quantization:
        """The same settings as the ``Quantization`` that ``anybit.checkpoints`` works with."""
        scheme, overrides = Scheme.parse(self.scheme), parse_overrides(self.overrides)
        kept, nested = self.modules_to_not_convert, nested_widths(scheme.weights, self.nested)
        return Quantization(scheme, kept, self.group_index, self.hadamard, overrides, nested)


_Theirs: Any = auto.AUTO_QUANTIZATION_CONFIG_MAPPING[COMPRESSED_TENSORS]


class CompressedTensorsOrAnyBit(_Theirs):  # type: ignore[misc]
    """compressed-tensors' configuration class, made to return AnyBitConfig where there is an anybit section."""

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, object], *arguments: object, **options: object
    ) -> QuantizationConfigMixin:
        """Parse a ``quantization_config``."""
        kind: Any = _Theirs if settings_of(config_dict) is None else AnyBitConfig
        return kind.from_dict(config_dict, *arguments, **options)


# transformers looks the class up by quant_method alone, one class per name.
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[COMPRESSED_TENSORS] = CompressedTensorsOrAnyBit


@register_quantizer(METHOD)
class AnyBitQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replaces the linear layers of a transformers model by QuantLinear and loads or quantizes their weights."""

    requires_calibration = False
    is_trainable = True  # adapters around the layers: gradients flow through them, though codes have none
    is_compileable = True  # every layer is one custom op with a fake (meta) implementation
    tied: Collection[str] = ()
    embeddings: Collection[str] = ()
    quantized: Collection[str] = ()
    shared: Sequence[str] = ()
    experts: Collection[str] = ()
    waiting: Mapping[str, QuantLinear] = MappingProxyType({})
    entries: Mapping[str, Entry] | None = None
    loading: PreTrainedModel | None = None
    renamed: Mapping[str, torch.dtype] = MappingProxyType({})
    fault: AnyBitError | None = None
    quantization_config: AnyBitConfig

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Check config.json and the checkpoint index: the first hook that runs, before transformers relies on them."""
        folder = Path(str(getattr(config, "name_or_path", "") or ""))
        place = folder / "config.json"
        if place.is_file():
            check_config(read_json(place), place)
            check_index(folder)
        return config

    def validate_environment(self, *args: object, device_map: object = None, **kwargs: object) -> None:
        """Raise OptionError if ``device_map`` offloads quantized layers (known only once the model is built).

        A layer on the CPU counts as offloaded if another device computes: it would be copied over at every call.
        """
        if not isinstance(device_map, Mapping):
            return
        places = {name: str(place) for name, place in device_map.items()}
        away = {"disk"} if set(places.values()) <= {"cpu", "disk"} else {"cpu", "disk"}
        for layer in self.quantized:
            parts = [name for name in places if not name or f"{layer}.".startswith(f"{name}.")]
            part = max(parts, key=len, default=None)
            if part is not None and places[part] in away:
                raise OptionError(
                    f"device_map puts {part or 'the model'} on {places[part]}, which would offload layer {layer}: "
                    "quantized layers cannot be offloaded. Keep them on a GPU (device_map='cuda', or more memory for "
                    "'auto'), choose fewer bits, or load the whole model with device_map='cpu'"
                )

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        """Bytes per element, by which device_map="auto" places layers: of codes, for a weight to be quantized."""
        layer = self.waiting.get(param_name.removesuffix(".weight"))
        if layer is None or not param_name.endswith(".weight"):
            return param.element_size()
        return sum(own.nbytes for name, own in layer.named_parameters() if name != "bias") / param.numel()

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        checkpoint_files: list[str] | None = None,
        device_map: object = None,
        **kwargs: object,
    ) -> None:
        config = self.quantization_config
        unfuse(model)
        self.loading = model
        entries = self.entries = read_entries(list(map(Path, checkpoint_files or ())), Path(model.name_or_path or ""))
        whole = None if kwargs.get("whole") else partial(self._check_whole, model, checkpoint_files or [])
        if not self.pre_quantized:
            warn_of_left(model)
            if entries is not None:
                check_model(model, entries, model.name_or_path, check_whole=whole)
        elif entries is not None:
            self._take_names(model, check_layers(config.quantization, entries))
        names = config.names = HubNames.of(model)
        own = config.quantization.renamed(names.own)
        if not self.pre_quantized:
            modules.check_kept(model, own.kept)
        config.modules_to_not_convert, config.hadamard = own.kept, own.hadamard
        config.overrides = {name: str(each) for name, each in own.overrides.items()}
        keep = modules.kept_modules(model, config.modules_to_not_convert, config.overrides)
        config.modules_to_not_convert = keep
        modules.without_rescaling(model)
        scheme, overrides = config.quantization.scheme, config.quantization.overrides
        linears = [layer.name for layer in modules.linear_layers(model, keep)]
        self.embeddings = [layer.name for layer in modules.embedding_layers(model, overrides)]
        self.shared = modules.shared_heads(model, overrides)
        self.quantized = [*self.embeddings, *linears]
        if not self.pre_quantized:
            modules.check_overrides(model, overrides, linears)
        same = overrides.in_any_order(self.quantized)
        config.overrides = {name: str(each) for name, each in same.items()}
        if names.blocks:  # saved by names alone: patterns may be of the model's names
            every, known = [layer.name for layer in modules.linear_layers(model, [])], set(linears)
            config.modules_to_not_convert = [name for name in every if name not in known]
            found = {name: overrides.of(name) for name in self.quantized}
            config.overrides = {name: str(each) for name, each in found.items() if each is not None}
        self.validate_environment(device_map=device_map)
        # A tied head is loaded as an ordinary one and quantized once its weight is there.
        self.tied = sorted(set(linears) & set(modules.tied_heads(model)))
        keep = [*keep, *self.tied]
        if not config.group_index and not config.overrides:
            config.ignore = shared_ignore(model, scheme, linears, bool(config.hadamard))
        layers = quantized_layers(
            model, scheme, keep, config.backend, config.group_index, config.hadamard, overrides=overrides
        )
        if self.pre_quantized:
            for name, layer in layers.items():
                model.set_submodule(name, layer)
        else:
            self.waiting = layers
        experts = {name for name, module in model.named_modules() if isinstance(module, Experts)}
        self.experts = experts & {name.rsplit(".", 2)[0] for name in self.waiting}
        for name in self.embeddings if self.pre_quantized else ():
            old = model.get_submodule(name)
            n, k = old.weight.shape
            new = QuantEmbedding(
                n, k, overrides[name], padding_idx=old.padding_idx, group_index=config.group_index,
                dtype=old.weight.dtype, device="meta", backend=config.backend,
            )  # fmt: skip
            put_embedding(model, name, new, self.shared)
        if self.pre_quantized and entries is not None:
            check_model(model, entries, model.name_or_path, self, whole)
            self.renamed = {name: each.dtype for name, each in model.named_parameters() if names.hub(name) != name}
        # The empty tensors that keep other programs from loading the folder (``TRAP``) are expected here.
        trap = rf"({'|'.join(map(re.escape, [*linears, *self.embeddings]))})\.{TRAP}$"
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), trap}

    def _take_names(self, model: PreTrainedModel, layers: list[str]) -> None:
        """Name quantized layers as a class other than the folder's does (a base model's); all others stay floats."""
        if type(model).__name__ in (model.config.architectures or ()):
            return
        config, saved = self.quantization_config, self.quantization_config.quantization
        found = names_in(model, [f"{layer}.weight" for layer in layers], model.state_dict(), self)[1]
        names = {layer: found.get(f"{layer}.weight", layer).removesuffix(".weight") for layer in layers}
        schemes = {name: str(saved.scheme_of(layer)) for layer, name in names.items()}
        named = {names.get(layer) for layer in config.overrides}
        config.overrides = {name: each for name, each in schemes.items() if each != config.scheme or name in named}
        config.hadamard = [names[layer] for layer in config.hadamard]
        linears = {name for name, module in model.named_modules() if is_linear(module)}
        config.modules_to_not_convert = sorted(linears - set(names.values()))

    def _check_whole(self, model: PreTrainedModel, files: list[str]) -> None:
        """Check the checkpoint against the model that its config.json names; ``model`` may be a part of that."""
        folder = Path(files[0]).parent
        whole = modules.described_model(folder, type(model).__module__.startswith("transformers_modules."))
        if self.pre_quantized:
            own = AnyBitQuantizer(AnyBitConfig.from_dict(whole.config.quantization_config), pre_quantized=True)
            own._process_model_before_weight_loading(whole, files, whole=True)
        else:
            check_model(whole, self.entries or {}, folder)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> PreTrainedModel:
        self.loading, self.waiting = None, {}
        if self.fault is not None:
            raise self.fault
        for name, dtype in self.renamed.items():  # which transformers 5.18 leaves in the folder's dtype
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(dtype)
        if any(isinstance(module, Experts) for module in model.modules()):
            model._weight_conversions = []  # save by the names that the quantization_config has
        for name in (*self.tied, *(() if self.pre_quantized else self.embeddings)):
            self._quantize_late(model, name)
        for name, module in model.named_modules():
            if isinstance(module, QuantLinear):
                check_values(name, dict(module.named_parameters()))
        for name, module in model.named_modules():
            if isinstance(module, Experts):
                module.freeze_biases()
            if isinstance(module, QuantLinear | Experts):  # experts first: they prepare their layers
                try:
                    module.prepare()
                except LayerError as error:
                    raise LayerError(f"layer {name}: {error}") from None
        check_finite(model)
        take_over(model)
        if (kv := self.quantization_config.quantization.scheme.kv) is not None:
            graph.install(model, kv)
        return model

    def _quantize_late(self, model: PreTrainedModel, name: str) -> None:
        """Quantize (RTN) an embedding, whose codes tied heads share, or a tied head, which gets codes of its own."""
        old, config = model.get_submodule(name), self.quantization_config
        scheme = config.quantization.scheme_of(name)
        try:
            weight = quantize_weight(old.weight.detach(), scheme.weights)
        except LayerError as error:
            raise LayerError(f"layer {name}: {error}") from None
        if name in self.embeddings:
            new = QuantEmbedding.of_weight(weight, scheme, old.padding_idx, config.backend)
            put_embedding(model, name, new, self.shared)
        else:
            bias = None if old.bias is None else old.bias.detach()
            model.set_submodule(name, QuantLinear.from_weight(weight, scheme, bias, config.backend))
            untie(model, name, model.config)

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], model: PreTrainedModel | None = None
    ) -> list[WeightTransform]:
        """Transformers' conversions of a checkpoint, with experts as linear layers. model: 5.19 does not give it."""
        model = model or self.loading
        return weight_conversions if model is None else conversions(model, weight_conversions)

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """What to save: where compressed-tensors cannot hold the model, with an empty tensor per layer (``TRAP``)."""
        names, plain = self.quantization_config.names, self.quantization_config.ignore is not None
        if plain and not names.blocks:
            return None, {}
        state = model.state_dict()
        layers = [name.removesuffix(".weight_packed") for name in state if name.endswith(".weight_packed")]
        empties = dict.fromkeys([] if plain else traps(model, layers), torch.empty(0, dtype=torch.uint8))
        return {names.hub(name): tensor for name, tensor in {**state, **empties}.items()}, {}

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: object) -> bool:
        """Whether a checkpoint tensor is the weight of a layer to quantize while loading.

        Of experts all weights count if some are quantized: a checkpoint may store them as one tensor.
        """
        layer, _, tensor_name = param_name.rpartition(".")
        return tensor_name == "weight" and (layer in self.waiting or layer.rsplit(".", 2)[0] in self.experts)

    def get_quantize_ops(self) -> ConversionOps:
        """The op that turns a weight into the tensors of its QuantLinear."""
        return _Quantize(self)

    def is_serializable(self, **kwargs: object) -> bool:
        """Quantized models can be saved."""
        return True

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        if graph.installed(model):  # fused layers call methods of QuantLinear that nn.Linear lacks
            from anybit.hf.fuse import unfuse

            unfuse(model)
            graph.uninstall(model)
        give_back(model)
        for name, module in list(model.named_modules()):
            if isinstance(module, QuantEmbedding):
                plain = module.dequantized(dtype or torch.float32)
                model.set_submodule(name, plain)
                for head in self.shared:
                    model.set_submodule(head, model.get_submodule(head).dequantized(plain))
                    model.all_tied_weights_keys[f"{head}.weight"] = f"{name}.weight"
            elif isinstance(module, QuantLinear):
                with torch.device("meta"):
                    linear = nn.Linear(module.in_features, module.out_features, bias=False)
                weight = module.effective_weight().to(dtype or torch.float32)
                linear.weight = nn.Parameter(weight, requires_grad=False)
                linear.bias = module.bias  # type: ignore[assignment]
                model.set_submodule(name, linear)
        return model


def quantized_layers(
    model: PreTrainedModel, scheme: Scheme, keep: list[str], backend: str | None = None, group_index: bool = False,
    hadamard: Collection[str] = (), *, overrides: Overrides,
) -> dict[str, QuantLinear]:  # fmt: skip
    """Empty layers for the Linear and Conv1D ones of a model on the meta device, except those in ``keep``, by name.

    Raises LayerError if a layer does not fit the scheme, or if no layer is left to quantize.
    """
    made = {}
    for found in modules.linear_layers(model, keep):
        plain, name = model.get_submodule(found.name), found.name
        try:
            made[name] = QuantLinear(
                found.k, found.n, overrides.of(name) or scheme, plain.bias is not None, group_index=group_index,
                hadamard=name in hadamard, dtype=plain.weight.dtype, device="meta", backend=backend,
            )  # fmt: skip
        except LayerError as error:
            advice = "name it in modules_to_not_convert to keep it in 16 bits"
            raise LayerError(f"layer {name}: {error}; {advice}") from None
    return made


def check_finite(model: nn.Module) -> None:
    """Raise CheckpointError, naming the tensor, if an unquantized parameter holds NaN or infinity."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if tensor.is_meta or not tensor.is_floating_point():
            continue
        # A finite sum proves all terms finite, in one pass.
        if not bool(torch.isfinite(tensor.sum(dtype=torch.float32))) and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"tensor {name} has a value that is not finite")


class _Quantize(ConversionOps):  # type: ignore[misc]
    """Quantizes one weight while it is loaded, so that only one layer is ever held unquantized."""

    def __init__(self, quantizer: AnyBitQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Tensor | list[Tensor]],
        full_layer_name: str = "",
        model: PreTrainedModel | None = None,
        missing_keys: set[str] | None = None,
        **kwargs: object,
    ) -> dict[str, Tensor]:
        """The weights of layers -> the tensors that QuantLinear stores for them; others stay as they are."""
        found: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            if missing_keys is not None:
                missing_keys.discard(name)
            layer = self.quantizer.waiting.get(name.removesuffix(".weight"))
            found |= {name: weight} if layer is None else self._tensors(model, layer, name, weight)
        return found

    def _tensors(
        self, model: PreTrainedModel | None, layer: QuantLinear, full_name: str, weight: Tensor
    ) -> dict[str, Tensor]:
        assert model is not None
        name = full_name.removesuffix(".weight")
        plain = model.get_submodule(name)
        weight = weight.T if isinstance(plain, Conv1D) else weight
        try:
            quantized = quantize_weight(weight, layer.scheme.weights)
        except LayerError as error:
            # transformers would replace an exception raised here by its own report, so it is raised after loading.
            self.quantizer.fault = self.quantizer.fault or self._fault(name, error)
            quantized = quantize_weight(torch.zeros_like(weight), layer.scheme.weights, search=False)
        layer.bias = plain.bias
        model.set_submodule(name, layer)
        return {f"{name}.{suffix}": tensor for suffix, tensor in QuantLinear.tensors_of(quantized).items()}

    def _fault(self, name: str, error: LayerError) -> AnyBitError:
        """The error to raise for a layer's weight, naming file and tensor where possible."""
        entry = (self.quantizer.entries or {}).get(f"{name}.weight")
        try:
            if entry is not None:
                refuse_not_finite(read_tensor(entry), entry)
        except CheckpointError as named:
            return named
        return LayerError(f"layer {name}: {error}")
