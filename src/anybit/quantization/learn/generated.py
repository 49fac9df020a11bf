"""Text that a model writes itself (LLM-QAT; Liu et al., 2023): the student imitates the teacher's predictions, so text
sampled from the teacher will do, and there is no limit to it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anybit.errors import TextError
from anybit.quantization.learn.static_step import StaticStep
from anybit.quantization.learn.student import placed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Most sequences generated at once, and the share of a GPU's free memory that their KV caches may take.
_ROWS, _SHARE = 2048, 0.4

Step = Callable[[Tensor, int], Tensor]
"""Logits [rows, V] after tokens int64 [rows, 1] at a position."""


@torch.no_grad()
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
    most = min(_rows(_cache_bytes(model, length), device), max(tokens // length, 1))
    static = StaticStep.of(writer, most, length)
    for done in range(0, tokens // length, most):
        prompts = torch.stack([_piece(starts, piece, picks) for _ in range(most)]).to(device)
        found = _continued(static or _growing(writer), prompts, length, dice)
        yield found[: tokens // length - done]
    if device.type == "cuda":
        del static
        torch.cuda.empty_cache()


def _piece(sequences: Sequence[Tensor], length: int, picks: torch.Generator) -> Tensor:
    """A random piece of a random sequence, of at most ``length`` tokens."""
    chosen = sequences[int(torch.randint(len(sequences), (), generator=picks))]
    start = int(torch.randint(max(len(chosen) - length, 0) + 1, (), generator=picks))
    return chosen[start : start + length]


def _continued(step: Step, prompts: Tensor, length: int, dice: torch.Generator) -> Tensor:
    """Sample up to ``length`` tokens after prompts int64 [rows, piece]."""
    rows, piece = prompts.shape
    text = torch.empty(rows, length, dtype=torch.int64, device=prompts.device)
    text[:, :piece] = prompts
    # The prompt, too, runs token by token: logits of a whole prefill would not fit.
    for i in range(length - 1):
        logits = step(text[:, i : i + 1], i)
        if i + 1 >= piece:
            # Gumbel's trick samples without waiting for the GPU, as torch.multinomial does to check its input.
            noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=dice)
            text[:, i + 1] = (logits - noise.log_()).argmax(-1)
    return text.cpu()


def _growing(writer: "PreTrainedModel") -> Step:
    """Steps over the model's own cache, which grows, for models that ``StaticStep`` cannot run."""
    kept: dict[str, object] = {}

    def step(ids: Tensor, position: int) -> Tensor:
        out = writer(input_ids=ids, use_cache=True, **kept)
        name = next(name for name in ("cache", "past_key_values", "cache_params") if getattr(out, name, None))
        kept.update({name: getattr(out, name)})
        logits: Tensor = out.logits[:, -1]
        return logits

    return step


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
