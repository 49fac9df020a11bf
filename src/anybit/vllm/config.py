"""The quantization method "anybit" for vLLM: which layers are quantized, and how."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.quantizers.quantizers_utils import should_convert_module
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from anybit.checkpoints.configuration import Overrides, Quantization, method_of
from anybit.checkpoints.folder import read_json
from anybit.checkpoints.safetensors import read_header
from anybit.checkpoints.sidecars import with_quantization
from anybit.checkpoints.source import from_hub
from anybit.errors import AnyBitError, CheckpointError, LayerError, OptionError, one_line
from anybit.hf.check import check_folder
from anybit.models.families import ROUTER_NAMES
from anybit.scheme import Scheme
from anybit.vllm import fusion, streams
from anybit.vllm.experts import AnyBitExpertsMethod, AnyBitOnlineExpertsMethod, names_of
from anybit.vllm.head import (
    EMBEDDINGS,
    AnyBitEmbeddingMethod,
    AnyBitHeadMethod,
    AnyBitOnlineHeadMethod,
    HeadBesideCodes,
)
from anybit.vllm.linear import AnyBitLinearMethod, AnyBitOnlineLinearMethod, Part
from anybit.vllm.warmup import WarmUp

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.model_executor.models.utils import WeightsMapper

METHOD, COMPRESSED = "anybit", "compressed-tensors"
HEADS = ("lm_head", "embed_out")
_DRAFT = "draft_model."
"""Prefix that vLLM adds to the layer names of a draft model; checkpoints do not have it."""
_TEXT_DRAFTERS = (None, "ngram", "ngram_gpu", "suffix", "draft_model")
"""How vLLM drafts without the model's hidden states."""
_OF_ROTATED = {"down_proj"}
"""The layers whose inputs method ``rotate`` leaves to be rotated at run time; smooth_rotate leaves all of a block's."""
_logger = init_logger("vllm.anybit")
_HOW = (
    'name a scheme: --hf-overrides \'{"quantization_config": {"quant_method": "anybit", "scheme": '
    '"w4a16g128"}}\', or `anybit serve MODEL --scheme w4a16g128`'
)


class AnyBitConfig(QuantizationConfig):  # type: ignore[misc]
    """How a model is quantized, for vLLM.

    scheme: of the quantized layers; None until it is read from another tool's files.  kept: names or patterns of
    layers that are not quantized.  group_index: whether every layer stores an activation order.  hadamard: layers whose
    inputs are rotated at run time.  overrides: per-layer schemes, by name or shell pattern.
    """

    def __init__(
        self, scheme: Scheme | str | None = None, kept: list[str] | None = None, group_index: bool = False,
        hadamard: list[str] | None = None, overrides: dict[str, Scheme] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scheme, self.overrides = None if scheme is None else Scheme.parse(scheme), Overrides(overrides or {})
        self.kept, self.hadamard = list(kept or ()), list(hadamard or ())
        self.group_index = group_index
        self.stored: list[str] | None = None
        self.warmup = WarmUp({name for name in self.overrides if name.rpartition(".")[2] in HEADS})
        self.coded_embedding = False
        self._taken: set[str] = set()
        self._on_hub: tuple[str, bool, str | None] | None = None
        self._source: streams.Source | None = None
        self._mapper: WeightsMapper | None = None
        self._engine_checked = False
        self._words = _stored_words(self)

    def __repr__(self) -> str:
        return f"AnyBitConfig({self.scheme})"

    @classmethod
    def get_name(cls) -> str:
        """The method's name."""
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """float16 and bfloat16; float32 too without a GPU."""
        return [torch.float16, torch.bfloat16, *([] if torch.cuda.is_available() else [torch.float32])]

    @classmethod
    def get_min_capability(cls) -> int:
        """sm_80."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: everything is in config.json."""
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, object], user_quant: str | None, hf_config: "PretrainedConfig | None" = None
    ) -> str | None:
        """Claim compressed-tensors folders that anybit wrote, and any folder under ``--quantization anybit``."""
        method = hf_quant_cfg.get("quant_method")
        mine = method == METHOD or (method == COMPRESSED and isinstance(hf_quant_cfg.get(METHOD), dict))
        return METHOD if user_quant == METHOD or (mine and user_quant is None) else None

    @classmethod
    def from_config(cls, config: dict[str, object]) -> "AnyBitConfig":
        """Parse a ``quantization_config``: anybit's own, compressed-tensors' with an anybit section, or another tool's.

        Another tool's settings are read later, with its files. Raises CheckpointError.
        """
        try:
            if config.get("quant_method") == METHOD and "scheme" not in config:
                raise CheckpointError(f"the quantization_config of config.json names anybit, but no scheme; {_HOW}")
            own = Quantization.of({"quantization_config": config})
        except (AnyBitError, MemoryError):
            raise
        except Exception as error:  # values of unexpected types can raise anything
            raise CheckpointError(f"quantization_config cannot be used: {one_line(error)}") from error
        return cls() if own is None else cls(own.scheme, own.kept, own.group_index, own.hadamard, own.overrides)

    def maybe_update_config(
        self, model_name: str, hf_config: "PretrainedConfig | None" = None, revision: str | None = None
    ) -> None:
        """Check the folder and find its quantized layers by the tensors in its headers, not by patterns."""
        trusted, folder = type(hf_config).__module__.startswith("transformers_modules"), Path(model_name)
        if not folder.exists():  # vLLM 0.26 does not pass the revision
            self._on_hub = model_name, trusted, revision or getattr(hf_config, "_commit_hash", None)
            if self.scheme is None:
                return
        elif self.scheme is None or streams.gguf_in(folder) is not None:
            self._stream(folder, trusted)
            return
        elif any(folder.glob("*.safetensors")):
            self._check(folder, trusted)
        names, mark = _tensor_names(model_name, revision), ".weight_packed"
        self.stored = names and sorted(name.removesuffix(mark) for name in names if name.endswith(mark))

    def _check(self, folder: Path, trusted: bool) -> None:
        """Check a folder; raises OptionError if ``--hf-overrides`` contradicts its config.json about stored tensors."""
        own = Quantization.of(with_quantization(read_json(folder / "config.json"), folder, read_json))
        stored_words = {} if own is None else _stored_words(own)
        for name, stored in stored_words.items():
            if stored != (asked := self._words[name]):
                raise OptionError(
                    f"{folder} is quantized with {name} {stored}, and the quantization_config of --hf-overrides says "
                    f"{asked}. Leave that out, or serve the unquantized model; for a KV format alone, use "
                    '--additional-config \'{"anybit_kv_cache": "kv4"}\''
                )
        check_folder(folder, trusted)

    def _stream(self, folder: Path, trusted: bool) -> None:
        """Read layers, schemes and (later) tensors from another tool's files."""
        config = with_quantization(read_json(folder / "config.json"), folder, read_json)
        if streams.gguf_in(folder) is None and method_of(config) is None:
            raise OptionError(
                f"the model is not quantized, and --quantization anybit alone does not say how to quantize it: {_HOW}"
            )
        self._source = streams.Source(folder, trusted)
        source = self._source.opened
        for name in source.kv_scales[:1]:
            _logger.warning("anybit: scales for an 8-bit KV cache, such as %s, are ignored", name)
        self.scheme, self.group_index = source.scheme, source.group_index
        self.overrides = Overrides((name, scheme) for name, scheme in source.layers.items() if scheme != source.scheme)
        self.stored = sorted(source.layers)
        if self._mapper is not None:
            self.apply_vllm_mapper(self._mapper)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: "WeightsMapper") -> None:
        """Map checkpoint names to vLLM's, for models whose names differ."""
        self._mapper = hf_to_vllm_mapper
        self.kept = hf_to_vllm_mapper.apply_list(self.kept)
        self.overrides = Overrides(hf_to_vllm_mapper.apply_dict(self.overrides))
        self.hadamard = hf_to_vllm_mapper.apply_list(self.hadamard)
        if self.stored is not None:
            self.stored = hf_to_vllm_mapper.apply_list(self.stored)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method that runs a layer. Raises LayerError if vLLM fuses layers of which only some are quantized."""
        self._check_hub()
        self._check_engine()
        if self._source is not None:
            streams.note(self._source)
        prefix = prefix.removeprefix(_DRAFT)
        fusion.watch()
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        names = self._parts(prefix)
        self._taken.update(names)
        streams.check_with(self._check_taken)
        if isinstance(layer, ParallelLMHead):
            return self._head_method(prefix)
        if isinstance(layer, VocabParallelEmbedding):
            return self._embedding_method(prefix)
        if not isinstance(layer, LinearBase):
            return None
        kept = [name for name in names if not self._quantizes(name)]
        if kept == names:
            return UnquantizedLinearMethod()
        if kept:
            raise LayerError(
                f"vLLM fuses {' + '.join(names)}, of which {kept[0]} is not quantized: quantize all of them, or none"
            )
        fusion.install()
        parts = [Part(name, self._scheme_of(name), name in self.hadamard) for name in names]
        coded = {str(part.scheme.activations) for part in parts}
        if len(coded) != 1:
            raise LayerError(
                f"vLLM fuses {' + '.join(names)}, whose activation formats differ ({' and '.join(sorted(coded))}): "
                "give them one scheme"
            )
        if not self.stored:
            return AnyBitOnlineLinearMethod(parts, self.warmup)
        return AnyBitLinearMethod(parts, self.warmup, self.group_index)

    def _check_taken(self, model: nn.Module) -> None:
        """Raise LayerError for a layer of 16 bits that fuses layers of codes, as loaders of some models skip those."""
        plain = {
            name.rpartition(".")[0]: name
            for name, module in model.named_modules()
            if "." in name and type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod
        }
        for name in sorted({*(self.stored or ())} - self._taken):
            if (layer := plain.get(name.rpartition(".")[0])) is not None:
                raise LayerError(
                    f"no layer of vLLM's {type(model).__name__} takes the codes of {name}, beside which it has {layer} "
                    f"in 16 bits: quantize the model with `--keep {name}`"
                )

    def _scheme_of(self, name: str) -> Scheme:
        """The scheme of one layer."""
        found = self.overrides.of(name) or self.scheme
        assert found is not None, "a layer is built before its folder was read"
        return found

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        """The method for a layer's routed experts: of a quantized checkpoint, those of which it has all codes."""
        if not self.stored:
            return self._online_experts_method(layer, prefix)
        for known_as in (prefix, prefix.replace(".mlp.", ".block_sparse_moe.")):  # as vLLM calls MiniMax-M2's
            if stored := {name for name in self.stored if name.startswith(f"{known_as}.")}:
                prefix = known_as
                break
        else:
            _logger.info_once("anybit: experts of which the checkpoint has no codes stay in 16 bits")
            return UnquantizedFusedMoEMethod(layer.moe_config)
        names = {name for names in names_of(layer, prefix) for name in names}
        self._taken |= names
        if (odd := min(names ^ stored, default=None)) is not None:
            lacks = f"has codes of {min(stored)}, and none of {odd}" if odd in names else f"has codes of {odd}"
            raise LayerError(
                f"the checkpoint {lacks}, and vLLM runs {len(names)} projections, such as {min(names)}, as one layer: "
                "quantize all experts of a layer, each as layers of its own, or none"
            )
        if turned := sorted(names & set(self.hadamard)):
            raise LayerError(
                f"the inputs of {turned[0]} are to be rotated at run time, which anybit does not do in experts: "
                "quantize the model with another method than rotate"
            )
        return AnyBitExpertsMethod(layer, prefix, self._scheme_of, self.warmup, self.group_index)

    def _online_experts_method(self, layer: RoutedExperts, prefix: str) -> QuantizeMethodBase:
        """The method for a layer's routed experts of a checkpoint that is not quantized."""
        reason = None
        if all(self._quantizes(name) for names in names_of(layer, prefix) for name in names):
            try:
                return AnyBitOnlineExpertsMethod(layer, prefix, self._scheme_of, self.warmup)
            except LayerError as error:
                reason = error
        told = "some are to be left out" if reason is None else str(reason)
        _logger.info_once("anybit: the experts of %s stay in 16 bits: %s", prefix, told)
        return UnquantizedFusedMoEMethod(layer.moe_config)

    def _embedding_method(self, name: str) -> QuantizeMethodBase | None:
        """The method for an embedding, which is quantized if the checkpoint has codes for it.

        Some of vLLM's models pass no prefix for theirs; then the name comes from the overrides.
        """
        name = name or next((one for one in self.overrides if one.rpartition(".")[2] in EMBEDDINGS), "")
        if name in (self.stored or ()):
            self._taken.add(name)
            self.coded_embedding = True
            return AnyBitEmbeddingMethod(self._scheme_of(name), name, self.warmup, self.group_index)
        if name in self.overrides:
            raise LayerError(
                f"{name} is an embedding, which cannot be quantized while vLLM loads it: quantize the model first, "
                f"`anybit quantize MODEL --override {name}={self.overrides[name]}`"
            )
        return None

    def _check_hub(self) -> None:
        """Download a hub model to vLLM's own location and check it, before any layer is built."""
        if self._on_hub is None:
            return
        (name, trusted, revision), self._on_hub = self._on_hub, None
        load = get_current_vllm_config().load_config
        if self.scheme is None:
            self._stream(from_hub(name, trusted, revision, load.download_dir), trusted)
        elif str(load.load_format) in streams.OF_FILES and not envs.VLLM_USE_MODELSCOPE:
            self._check(from_hub(name, trusted, revision, load.download_dir), trusted)

    def _check_engine(self) -> None:
        """Raise OptionError for KV heads that the ranks cannot divide (vLLM would only assert), and for CPU offload.

        vLLM offloads parameters; anybit's prepared codes are buffers.
        """
        if self._engine_checked:
            return
        self._engine_checked, config = True, get_current_vllm_config()
        offload = config.offload_config
        if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
            raise OptionError(
                "--cpu-offload-gb and --offload-group-size do not work with anybit's layers, whose codes stay on the "
                "GPU: leave them out; a scheme with fewer bits takes less memory"
            )
        if envs.VLLM_BATCH_INVARIANT:
            _logger.warning(
                "anybit: results depend on the batch, although VLLM_BATCH_INVARIANT asks for others: quantized layers "
                "run other kernels for other numbers of tokens"
            )
        drafter = getattr(getattr(config, "speculative_config", None), "method", None)
        if drafter not in _TEXT_DRAFTERS and {name.rpartition(".")[2] for name in self.hadamard} == _OF_ROTATED:
            _logger.warning(
                "anybit: the model's hidden states are rotated (method rotate), and %s drafts from those of the model "
                "before: nearly all of its drafts will be refused. Use ngram or a draft model, or quantize with "
                "smooth_rotate or gptq",
                drafter,
            )
        ranks = config.parallel_config.tensor_parallel_size
        heads = 1 if config.model_config is None else config.model_config.get_total_num_kv_heads()
        if heads % ranks and ranks % heads:
            fits = [str(count) for count in range(1, heads + 1) if heads % count == 0]
            raise OptionError(
                f"--tensor-parallel-size {ranks} cannot share the {heads} KV heads of the model: choose one of "
                f"{', '.join(fits)} or a multiple of {heads}, or split the layers between GPUs: "
                f"--pipeline-parallel-size {ranks}"
            )

    def _head_method(self, name: str) -> QuantizeMethodBase | None:
        """The method for the output head: quantized if the checkpoint has codes for it, or if an override names it."""
        if name in (self.stored or ()):
            return AnyBitHeadMethod(self._scheme_of(name), name, self.warmup, self.group_index)
        if not self.stored and name in self.overrides:
            return AnyBitOnlineHeadMethod(self._scheme_of(name), name, self.warmup)
        if self.coded_embedding:
            return HeadBesideCodes()
        _logger.info_once(
            "anybit: the output head stays in 16 bits; --override lm_head=w8a16 makes decode steps faster"
        )
        return None

    def _parts(self, prefix: str) -> list[str]:
        """The checkpoint's layers that make up one layer of vLLM."""
        parent, _, last = prefix.rpartition(".")
        fused = self.packed_modules_mapping.get(last, [last])
        return [f"{parent}.{name}" if parent else name for name in fused]

    def _quantizes(self, name: str) -> bool:
        if self.stored:
            return name in self.stored
        return name.rpartition(".")[2] not in ROUTER_NAMES and should_convert_module(name, self.kept)


def _stored_words(of: AnyBitConfig | Quantization) -> dict[str, object]:
    """The settings that describe stored tensors, by name; without activations and KV format."""
    return {
        "scheme": None if of.scheme is None else _weights(of.scheme),
        "overrides": {name: _weights(scheme) for name, scheme in of.overrides.items()},
        "group_index": of.group_index,
        "hadamard": sorted(of.hadamard),
    }


def _weights(scheme: Scheme) -> str:
    """The scheme with the same weights, 16-bit activations and no KV format."""
    return str(replace(scheme, activations=Scheme.parse("w4a16").activations, kv=None))


def _tensor_names(model: str, revision: str | None) -> list[str] | None:
    """Names of a checkpoint's tensors, from its headers; None if it has no safetensors files."""
    folder = Path(model)
    if folder.is_dir():
        files = sorted(folder.glob("*.safetensors"))
        return [entry.name for file in files for entry in read_header(file)] if files else None
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    found = get_safetensors_params_metadata(model, revision=revision)
    return list(found) or None
