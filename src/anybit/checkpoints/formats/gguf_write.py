"""Write a quantized model as one GGUF file, with its codes unchanged, by the ``gguf`` package.

Names and row order invert those of ``gguf_file``. The file also holds the tokenizer: its tokens, merges, and the name
of its pre-tokenizer, whose rules readers hard-code. So only the architectures and pre-tokenizers listed here are
written; others raise ConversionError.
"""

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from anybit.checkpoints.formats.gguf_encode import encode
from anybit.checkpoints.formats.gguf_file import NotNative, names_of, row_order
from anybit.checkpoints.formats.translate import Translation
from anybit.codes.packing import stack
from anybit.errors import ConversionError, dtype_name
from anybit.models.families import FAMILIES

if TYPE_CHECKING:
    from gguf import GGUFWriter

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {rf"{_LETTERS}\p{{N}}{{1,3}}{_REST}": "llama-bpe", rf"{_LETTERS}\p{{N}}{_REST}": "qwen2"}
"""Pre-tokenizer regular expressions -> llama.cpp's names."""


def write_gguf(source: Translation, empty: PreTrainedModel, folder: Path, file: Path) -> dict[str, str]:
    """Write a model to ``file``; returns the type of each tensor, by its name in the file.

    empty: transformers' model on the meta device.  folder: of the tokenizer's files.
    Raises ConversionError, naming the layer or the part, for what GGUF cannot represent.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConversionError("writing GGUF files needs gguf: pip install 'anybit[gguf]'")
    import gguf

    config = empty.config
    known = {kind: family.gguf for kind, family in FAMILIES.items() if family.gguf is not None}
    architecture = known.get(config.model_type)
    if architecture is None:
        there = ", ".join(known)
        raise ConversionError(f"GGUF files can be written for {there} models, not for {config.model_type}")
    writer = gguf.GGUFWriter(file, architecture)
    _describe(writer, config)
    _add_tokenizer(writer, folder, config.vocab_size)
    tensors = _Tensors(source, empty, architecture)
    kinds: dict[str, str] = {}
    # Two passes: the tensor table comes first, and only one layer is held in memory.
    for name in tensors.names:
        kind, data = tensors.read(name)
        kinds[name] = kind
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw if data.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in tensors.names:
        writer.write_tensor_data(tensors.read(name)[1])
    writer.close()
    return kinds


class _Tensors:
    """The tensors of a model by their names in a GGUF file, with the file's row order.

    names: in the file -> those in the model, one or every expert's.
    """

    def __init__(self, source: Translation, empty: PreTrainedModel, architecture: str) -> None:
        self._source = source
        self._processor, known = names_of(architecture, empty)
        self._modules = dict(empty.named_modules())
        stored = {*source.plain, *(f"{layer}.weight" for layer in source.layers)}
        self.names = {name: models for name, models in known.items() if stored.issuperset(models)}
        lost = stored.difference(*self.names.values())
        if lost:
            raise ConversionError(f"GGUF has no name for tensor {min(lost)} of {type(empty).__name__}")

    def read(self, name: str) -> tuple[str, NDArray[np.generic]]:
        """(GGML type, data) of a tensor by its name in the file; blocks and bfloat16 as bytes."""
        models = self.names[name]
        stems = (model.removesuffix(".weight") for model in models if model.endswith(".weight"))
        layers = [stem for stem in stems if stem in self._source.layers]
        if not layers:
            plain = [self._plain(name, model) for model in models]
            return _floats(plain[0] if len(plain) == 1 else torch.stack(plain))
        schemes = {self._source.layers[layer] for layer in layers}
        if len(schemes) > 1 or len(layers) < len(models):
            found = ", ".join(sorted(map(str, schemes))) + " and 16 bits" * (len(layers) < len(models))
            raise ConversionError(f"{name} holds all experts in one type, and they are in {found}: such as {layers[0]}")
        module = self._modules.get(layers[0])
        if isinstance(module, Conv1D) or not isinstance(module, nn.Linear):
            raise ConversionError(f"layer {layers[0]} is not a plain linear layer, as GGUF expects")
        weights = [self._source.read(layer) for layer in layers]
        rows = self._rows(name, weights[0].shape[0]) if len(layers) == 1 else None
        try:
            kind, data = encode(stack(weights) if rows is None else weights[0].rows(rows))
        except ConversionError as error:
            raise ConversionError(f"gguf cannot express layer {layers[0]} in {schemes.pop()}: {error}") from None
        return kind, (data if len(layers) == 1 else data.unflatten(0, (len(layers), -1))).numpy()

    def _plain(self, name: str, model: str) -> Tensor:
        tensor = self._source.read_plain(model)
        if tensor.ndim == 2 and (rows := self._rows(name, tensor.shape[0])) is not None:
            return tensor[rows]
        if tensor.ndim == 1:
            values = tensor.float().numpy()
            done = self._processor.process(weights=values, name=name, tensor_key_mapping={}, parsed_parameters={})
            if not np.array_equal(done.weights, values):
                raise ConversionError(f"GGUF stores {model} with other values, which anybit does not compute")
        return tensor

    def _rows(self, name: str, count: int) -> Tensor | None:
        """The model's row for each row of the file, int64 [N]; None for the same order."""
        try:
            rows = row_order(self._processor, name, count, False)
        except NotNative as reason:
            raise ConversionError(str(reason)) from None
        return None if rows is None else torch.argsort(rows)


def _floats(tensor: Tensor) -> tuple[str, NDArray[np.generic]]:
    """(GGML type, data) of an unquantized tensor; vectors become float32, as readers expect."""
    if tensor.ndim == 1:
        tensor = tensor.float()
    if tensor.dtype == torch.bfloat16:
        return "BF16", tensor.contiguous().view(torch.uint8).numpy()
    if tensor.dtype not in (torch.float16, torch.float32):
        raise ConversionError(f"GGUF has no type for tensors of {dtype_name(tensor.dtype)}")
    return ("F16" if tensor.dtype == torch.float16 else "F32"), tensor.contiguous().numpy()


def _describe(writer: "GGUFWriter", config: PretrainedConfig) -> None:
    """Write a model's hyperparameters."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ConversionError(
            f"the model's RoPE has scaling of type {rope['rope_type']}, with which no GGUF files are written"
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ConversionError(
            f"the model has a sliding window of {config.sliding_window} tokens, which GGUF's llama has not"
        )
    experts = getattr(config, "num_experts", None)
    if experts and not config.norm_topk_prob:
        raise ConversionError(
            "readers of GGUF norm the weights of a token's experts, and the model does not (norm_topk_prob)"
        )
    if experts and (config.mlp_only_layers or config.decoder_sparse_step != 1):
        raise ConversionError("readers of GGUF expect experts in all blocks, and some of the model have none")
    if config.hidden_act != "silu":
        raise ConversionError(f"the model's MLPs use {config.hidden_act}, and readers of GGUF files compute silu")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(Path(str(config.name_or_path)).name or config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(config.vocab_size)
    writer.add_quantization_version(2)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_tokenizer(writer: "GGUFWriter", folder: Path, size: int) -> None:
    """Write a byte-level tokenizer: tokens, merges, special tokens, and the chat template."""
    import gguf

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConversionError(f"{folder} has no tokenizer.json, which a GGUF file needs")
    found = json.loads(path.read_text(encoding="utf-8"))
    model = found.get("model") or {}
    decoder = (found.get("decoder") or {}).get("type")
    if model.get("type") != "BPE" or model.get("byte_fallback") or decoder != "ByteLevel":
        raise ConversionError("the model's tokenizer is not a byte-level BPE, the only kind that can be written")
    if found.get("normalizer"):
        raise ConversionError(
            f"the model's tokenizer normalizes text ({found['normalizer'].get('type')}), and readers do not"
        )
    tokens: list[str | None] = [None] * size
    types = [gguf.TokenType.UNUSED] * size
    for token, number in model["vocab"].items():
        if number < size:  # others are beyond the model's embedding
            tokens[number], types[number] = token, gguf.TokenType.NORMAL
    for added in found.get("added_tokens") or ():
        if added["id"] < size:
            kind = gguf.TokenType.CONTROL if added.get("special") else gguf.TokenType.USER_DEFINED
            tokens[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_rule(found.get("pre_tokenizer") or {}))
    writer.add_token_list([f"[PAD{i}]" if token is None else token for i, token in enumerate(tokens)])
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=size)
    template = folder / "chat_template.jinja"
    if special.chat_template is None and template.is_file():
        special.chat_template = template.read_text(encoding="utf-8")
    if not special.merges:
        raise ConversionError(
            f"{folder}: its tokenizer has no merges, so readers of GGUF files would take it for another kind; other "
            "formats hold it (--to anybit)"
        )
    special.add_special_token.setdefault("bos", False)  # some pre-tokenizers default to true
    special.add_to_gguf(writer, quiet=True)


def _rule(found: dict[str, Any]) -> str:
    """llama.cpp's name of a pre-tokenizer. Raises ConversionError for one without a name here."""
    parts = found.get("pretokenizers") or [found]
    kinds = [part.get("type") for part in parts]
    if any(part.get("add_prefix_space") for part in parts):
        raise ConversionError("the model's tokenizer puts a space before the text, which readers of GGUF files do not")
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and parts[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        name = _SPLITS.get((parts[0].get("pattern") or {}).get("Regex", ""))
        if name is not None and parts[0].get("behavior") == "Isolated" and not parts[0].get("invert"):
            return name
    rule = ", ".join(map(str, kinds))
    raise ConversionError(
        f"the model's tokenizer splits text by a rule ({rule}) whose name in GGUF anybit does not know"
    )
