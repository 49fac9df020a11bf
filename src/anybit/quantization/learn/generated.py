"""Text that a model writes itself (LLM-QAT; Liu et al., 2023): the student imitates the teacher's predictions, so text
sampled from the teacher will do, and there is no limit to it.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anybit.errors import TextError
from anybit.quantization.learn.student import placed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Most sequences generated at once, and the share of a GPU's free memory that their KV caches may take.
_ROWS, _SHARE = 2048, 0.4
# Memory that growing caches need, relative to their final size.
_SLACK = 1.25


def written(
    model: "PreTrainedModel",
    sequences: Sequence[Tensor],
    tokens: int,
    length: int,
    device: torch.device,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Sample ``tokens`` tokens from a causal language model, int64 [rows, length] at a time.

    sequences: token ids; rows continue pieces of ``length`` // 16 tokens of them, or begin with the BOS token if none
    is that long.  Raises TextError without either.
    """
    piece = max(length // 16, 1)
    starts = [sequence for sequence in sequences if len(sequence) >= piece] or [torch.tensor([_bos(model)])]
    picks = torch.Generator().manual_seed(seed)
    dice = torch.Generator(device).manual_seed(seed)
    writer = placed(model, device)
    if device.type == "cuda":
        for parameter in writer.parameters():  # not buffers: rotary frequencies stay float32
            parameter.data = parameter.data.to(torch.bfloat16)
    row = _cache_bytes(model, length)
    most = _rows(row, device)
    if device.type == "cuda":
        # A growing cache is reallocated, a little larger, at each token. This block, freed at once to the caching
        # allocator, gives old and new ones room; else each size would be a new driver allocation.
        torch.empty(int(_SLACK * min(most, tokens // length) * row), dtype=torch.uint8, device=device)
    for done in range(0, tokens // length, most):
        rows = min(most, tokens // length - done)
        prompts = [_piece(starts, piece, picks) for _ in range(rows)]
        yield _continued(writer, torch.stack(prompts).to(device), length, dice)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _piece(sequences: Sequence[Tensor], length: int, picks: torch.Generator) -> Tensor:
    """A random piece of a random sequence, of at most ``length`` tokens."""
    chosen = sequences[int(torch.randint(len(sequences), (), generator=picks))]
    start = int(torch.randint(max(len(chosen) - length, 0) + 1, (), generator=picks))
    return chosen[start : start + length]


@torch.no_grad()
def _continued(writer: "PreTrainedModel", prompts: Tensor, length: int, dice: torch.Generator) -> Tensor:
    """Sample up to ``length`` tokens after prompts int64 [rows, piece]."""
    rows, piece = prompts.shape
    text = torch.empty(rows, length, dtype=torch.int64, device=prompts.device)
    text[:, :piece] = prompts
    cache, name = None, "cache" if "cache" in inspect.signature(writer.forward).parameters else "past_key_values"
    # The prompt, too, runs token by token: logits of a whole prefill would not fit.
    for i in range(length - 1):
        out = writer(input_ids=text[:, i : i + 1], use_cache=True, **{name: cache})
        cache = getattr(out, name)
        if i + 1 >= piece:
            likely = out.logits[:, -1].float().softmax(-1)
            text[:, i + 1] = torch.multinomial(likely, 1, generator=dice)[:, 0]
    return text.cpu()


def _bos(model: "PreTrainedModel") -> int:
    config = model.config.get_text_config(decoder=True)
    for token in (config.bos_token_id, config.eos_token_id):
        first = token[0] if isinstance(token, list) else token
        if first is not None:
            return int(first)
    raise TextError("this model's config.json names no BOS token to begin a text with: name a text with --text")


def _cache_bytes(model: "PreTrainedModel", length: int) -> int:
    """Bytes of a sequence's keys and values in 16 bits."""
    config = model.config.get_text_config(decoder=True)
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = (getattr(config, "num_key_value_heads", None) or heads) * (
        getattr(config, "head_dim", None) or hidden // heads
    )
    return int(4 * width * config.num_hidden_layers * length)


def _rows(row: int, device: torch.device) -> int:
    """How many sequences, with a cache of ``row`` bytes each, fit."""
    if device.type != "cuda":
        return 64
    free, _ = torch.cuda.mem_get_info(device)
    return min(max(int(_SHARE * free / row), 1), _ROWS)
