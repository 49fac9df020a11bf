"""Self-generated training text, for when calibration text is scarce (LLM-QAT; Liu et al., 2023).

The student imitates the teacher's predictions, so text sampled from the teacher will do; there is no limit to it, which
prevents overfitting.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Most sequences generated at once, and the share of a GPU's free memory that their KV caches may take.
_ROWS, _SHARE = 2048, 0.4
# Memory that growing caches need, relative to their final size.
_SLACK = 1.25


@torch.no_grad()
def continued(
    model: Any, sequences: Sequence[Tensor], tokens: int, length: int, device: torch.device, seed: int = 0
) -> Tensor:
    """Continue pieces of a text by sampling from a causal language model: int64 [tokens // length, length].

    sequences: token ids that pieces of ``length`` // 8 tokens are taken from. Empty if none is that long.
    """
    piece = max(length // 8, 1)
    long_enough = [sequence for sequence in sequences if len(sequence) >= piece]
    count = tokens // length
    if not count or not long_enough:
        return torch.empty(0, length, dtype=torch.int64)
    writer = copy.deepcopy(model).to(device)
    for parameter in writer.parameters():  # not buffers: rotary frequencies stay float32
        parameter.data = parameter.data.to(torch.bfloat16)
    picks = torch.Generator().manual_seed(seed)
    dice = torch.Generator(device).manual_seed(seed)
    row = _cache_bytes(model.config.get_text_config(), length)
    rows = min(count, _rows(row, device))
    if device.type == "cuda":
        # A growing cache is reallocated, a little larger, at each token. This block, freed at once to the caching
        # allocator, gives old and new ones room; else each size would be a new driver allocation.
        torch.empty(int(_SLACK * rows * row), dtype=torch.uint8, device=device)
    parts = [
        _written(writer, long_enough, min(rows, count - i), piece, length, picks, dice) for i in range(0, count, rows)
    ]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return torch.cat(parts)


def _written(
    writer: Any,
    sequences: Sequence[Tensor],
    rows: int,
    piece: int,
    length: int,
    picks: torch.Generator,
    dice: torch.Generator,
) -> Tensor:
    """Generate a batch of sequences."""
    written = torch.empty(rows, length, dtype=torch.int64, device=dice.device)
    for row in written:
        chosen = sequences[int(torch.randint(len(sequences), (), generator=picks))]
        start = int(torch.randint(len(chosen) - piece + 1, (), generator=picks))
        row[:piece] = chosen[start : start + piece]
    cache = None
    # The prompt, too, runs token by token: logits of a whole prefill would not fit.
    for i in range(length - 1):
        out = writer(input_ids=written[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        if i + 1 >= piece:
            likely = out.logits[:, -1].float().softmax(-1)
            written[:, i + 1] = torch.multinomial(likely, 1, generator=dice)[:, 0]
    return written.cpu()


def _cache_bytes(config: Any, length: int) -> int:
    """Bytes of a sequence's keys and values in 16 bits."""
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
