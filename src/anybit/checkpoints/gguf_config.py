"""transformers' config and tokenizer of a GGUF file, with what its reader leaves out: RoPE, experts, windows.

A file describes RoPE in metadata (base, width, linear scaling, YaRN), or by tensors of divisors per frequency:
``rope_freqs`` (Llama 3), or ``rope_factors_long`` and ``rope_factors_short`` (LongRoPE). The scale of Gemma's queries
is not stored: like llama.cpp, this recognizes the model by its number of layers.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, AutoTokenizer, MixtralConfig

from anybit.checkpoints.gguf import GgufHeader
from anybit.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_Rope = dict[str, Any]
"""``rope_parameters`` of a config, or what a file says of RoPE."""
_Factors = NDArray[np.float64]
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of a file that are not model parameters."""
_FLOAT32 = 0
_BEGUN = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
"""Pre-tokenizers (``tokenizer.ggml.pre``) whose tokenizers add a BOS token unless the file says otherwise."""
_ALL_WINDOWS = ("phi3", "starcoder2")
"""Models in which a sliding window, if any, applies to all layers."""
_LARGE_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, whose queries are scaled by hidden_size / heads instead of head_dim."""
_SIZES = {"ffn_gate_exps.weight": "moe_intermediate_size", "ffn_gate_shexp.weight": "shared_expert_intermediate_size"}
"""Tensors of a block -> the entry of a config that says how many outputs they have an expert."""


def config_of(folder: Path, file: Path, header: GgufHeader) -> "PretrainedConfig":
    """The config of a file. folder: holds a link to it.

    Raises CheckpointError for what transformers misreads.
    """
    if header.metadata["general.architecture"] == "gpt-oss":  # its rotary embedding is read wrong, or not at all
        raise CheckpointError("transformers does not read its settings; use the model's own folder, in MXFP4")
    config = AutoConfig.from_pretrained(folder, gguf_file=file.name, trust_remote_code=False)
    scale_rotary(config, file, header)
    if config.model_type in ("llama", "mistral") and header.metadata.get("llama.expert_count"):
        # transformers takes it for a Llama without experts.
        counts = (header.metadata.get(f"llama.{name}") for name in ("expert_count", "expert_used_count"))
        experts = dict(zip(("num_local_experts", "num_experts_per_tok"), counts, strict=True))
        known = MixtralConfig().to_dict().keys() - {"architectures", "model_type", "sliding_window"}
        config = MixtralConfig(**{name: value for name, value in config.to_dict().items() if name in known} | experts)
    if config.model_type == "minimax_m2":  # without which vLLM's router has no bias
        config.use_routing_bias = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
    for name, tensor in header.tensors.items():
        entry = _SIZES.get(name.split(".", 2)[-1])
        if entry is not None and hasattr(config, entry) and len(tensor.shape) > 1:
            setattr(config, entry, tensor.shape[1])
    return config


def scale_rotary(config: "PretrainedConfig", file: Path, header: GgufHeader) -> None:
    """Set RoPE, query scale and sliding window of a config as the file has them.

    Raises CheckpointError for an unknown RoPE scaling or invalid factors.
    """
    text, architecture = config.get_text_config(decoder=True), header.metadata.get("general.architecture")
    if architecture in _LARGE_GEMMAS:
        large = text.num_hidden_layers == _LARGE_GEMMAS[architecture]
        text.query_pre_attn_scalar = text.hidden_size // text.num_attention_heads if large else text.head_dim
    _bound(text, file, header.metadata.get(f"{architecture}.attention.sliding_window"))
    known = getattr(text, "rope_parameters", None) or {}
    prefix = f"{architecture}.rope."
    said: _Rope = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    if "scale_linear" in said:  # files of 2023
        said.setdefault("scaling.factor", said["scale_linear"])
    kind = said.setdefault("scaling.type", "linear" if "scaling.factor" in said else "none")
    if not known:  # no RoPE (Mamba), or a position table
        return
    if any(isinstance(value, dict) for value in known.values()):  # layers of several kinds
        text.rope_parameters = _of_kinds(known, said, file)
        return
    if "rope_theta" in known and "freq_base" in said:
        known = text.rope_parameters = {**known, "rope_theta": float(said["freq_base"])}
    if "partial_rotary_factor" in known and "dimension_count" in said:
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        known = text.rope_parameters = {**known, "partial_rotary_factor": min(1.0, said["dimension_count"] / head)}
    if known.get("rope_type", "default") != "default":
        return
    said = {key.removeprefix("scaling."): value for key, value in said.items() if key.startswith("scaling.")}
    most = int(said.get("original_context_length", 0)) or int(text.max_position_embeddings)
    found: _Rope = {}
    freqs, long, short = (_factors(file, header, name) for name in FACTORS)
    if long is not None and short is not None:
        found = _long_rope(long, short, most)
        if "attn_factor" in said:
            found["attention_factor"] = float(said["attn_factor"])
        else:
            found["factor"] = max(1.0, text.max_position_embeddings / most)
            del found["attention_factor"]
    elif freqs is not None:
        theta = float(known.get("rope_theta", 10000.0))
        found = _llama3(freqs, theta) or _long_rope(freqs, freqs, most)
    elif kind == "linear":
        found = {"rope_type": "linear", "factor": float(said["factor"])}
    elif kind == "yarn":
        found = {"rope_type": "yarn", "factor": float(said["factor"]), "original_max_position_embeddings": most}
    elif kind != "none":
        raise CheckpointError(f"{file} scales its rotary embedding by {kind!r}; known are linear, yarn and factors")
    if found:
        text.rope_parameters = {**known, **found}


def _bound(text: "PretrainedConfig", file: Path, window: object) -> None:
    """Set the file's sliding window; warn if transformers' model has none."""
    has = getattr(text, "sliding_window", None)
    if not isinstance(window, int) or not 0 < window < text.max_position_embeddings or window == has:
        return
    if has or text.model_type in _ALL_WINDOWS:
        text.sliding_window = window
        return
    warnings.warn(
        f"{file} has a sliding window of {window} tokens, but transformers' {text.model_type} has none: output for "
        "longer texts may differ from the original model's",
        stacklevel=2,
    )


def _of_kinds(known: _Rope, said: _Rope, file: Path) -> _Rope:
    """RoPE of Gemma 3's layer types: sliding-window layers have their own base, and are never scaled."""
    kind, full = said["scaling.type"], known.get("full_attention") or {}
    if kind == "none" or full.get("rope_type", "default") != "default":
        return known
    if kind != "linear":
        raise CheckpointError(f"{file} scales the rotary embedding of some layers by {kind!r}; linear is known")
    return {**known, "full_attention": {**full, "rope_type": kind, "factor": float(said["scaling.factor"])}}


def _factors(file: Path, header: GgufHeader, name: str) -> _Factors | None:
    tensor = header.tensors.get(name)
    if tensor is None:
        return None
    if tensor.kind != _FLOAT32 or len(tensor.shape) != 1:
        raise CheckpointError(f"{file}: tensor {name} must be a row of float32")
    with file.open("rb") as stream:
        stream.seek(header.start + tensor.begin)
        data = stream.read(4 * tensor.shape[0])
    found = np.frombuffer(data[: len(data) // 4 * 4], dtype="<f4").astype(np.float64)
    if found.size != tensor.shape[0] or not (np.isfinite(found) & (found > 0)).all():
        raise CheckpointError(f"{file}: tensor {name} must hold finite factors above 0")
    return found


def _llama3(factors: _Factors, theta: float) -> _Rope | None:
    """Fit the parameters of Llama 3's RoPE scaling to these factors; None if none reproduce them.

    Between two bounds that scaling interpolates the inverse factor linearly in the frequency, from 1 / factor to 1. Of
    its three bound parameters only two are independent: low_freq_factor is set to 1, as in Llama.
    """
    size = factors.size
    turns = theta ** -(np.arange(size) / size) / (2 * math.pi)  # per position
    factor = float(factors.max())
    if factor <= 1:
        return None
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    if between.sum() < 2:
        return None
    slope, offset = np.polyfit(turns[between], smooth[between], 1)
    if not (slope > 0 and offset < 0):
        return None
    high, most = 1 - 1 / offset, round(-slope / offset)
    found = {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(float(high), 3),
        "original_max_position_embeddings": most,
    }
    again = np.clip((turns * most - 1) / (found["high_freq_factor"] - 1), 0, 1)
    inverse = again + (1 - again) / found["factor"]
    return found if np.allclose(inverse, 1 / factors, rtol=1e-4) else None


def _long_rope(long: _Factors, short: _Factors, most: int) -> _Rope:
    return {
        "rope_type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "original_max_position_embeddings": most,
        "attention_factor": 1.0,
    }


@contextmanager
def linked_alone(file: Path, folder: Path) -> Iterator[None]:
    """Link a file into an empty folder for transformers, which would also read configs and code beside the file.

    Any exception in the context becomes a CheckpointError: a corrupt file can make parsers fail in any way.
    """
    (folder / file.name).symlink_to(file.resolve())
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        why = one_line(error).replace(str(folder), str(file.parent))
        raise CheckpointError(
            f"{file} cannot be read; it is corrupt, or of a kind that is not supported: {why}"
        ) from error


def tokenizer_of(folder: Path, name: str, header: GgufHeader) -> "PreTrainedTokenizerBase":
    """The tokenizer of a GGUF file, with the file's BOS and EOS tokens: transformers 5.17 uses one for both.

    As in llama.cpp, pre-tokenizers of Llama 3's kind add BOS even if the file does not say so.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
    for part in ("bos", "eos"):
        number = header.metadata.get(f"tokenizer.ggml.{part}_token_id")
        known = isinstance(number, int) and 0 <= number < len(tokenizer)
        if known and getattr(tokenizer, f"{part}_token_id") != number:
            setattr(tokenizer, f"{part}_token", tokenizer.convert_ids_to_tokens(number))
    unsaid = "tokenizer.ggml.add_bos_token" not in header.metadata
    if unsaid and header.metadata.get("tokenizer.ggml.pre") in _BEGUN and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True
    return tokenizer
