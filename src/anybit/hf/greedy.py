"""Greedy generation without a device sync per token: each step's CUDA graph feeds its argmax token to the next.

transformers' loop syncs after every token to check stopping criteria, which can cost a small model more than the step.
Here tokens are checked eight at a time while the next eight are computed. The output is the same: tokens after a row's
end become padding, and generation ends when all rows have ended.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from anybit.hf.cache import AnyBitCache
from anybit.hf.cache_name import CACHE, cache_of

TOGETHER = 8
_KNOWN_STOPS = ("MaxLengthCriteria", "EosTokenCriteria")
_OTHERS = (
    "return_dict_in_generate", "penalty_alpha", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp",
    "constraints", "force_words_ids", "dola_layers", "speculation_type", "prefill_chunk_size", "stop_strings",
    "token_healing",
)  # fmt: skip
"""Settings that ask for more than tokens, or for another way to them (the last two need the tokenizer)."""
_KNOWN_INPUTS = ("attention_mask", "position_ids", "past_key_values", "cache", "use_cache", "logits_to_keep")


def setting(model: PreTrainedModel, kwargs: Mapping[str, object], name: str) -> Any:
    """A setting of a ``generate`` call: the keyword's, else its generation_config's, else the model's."""
    found = kwargs.get(name)
    for config in (kwargs.get("generation_config"), model.generation_config):
        found = getattr(config, name, None) if found is None else found
    return found


def wanted(model: PreTrainedModel, kwargs: Mapping[str, object]) -> bool:
    """Whether a ``generate`` call is greedy, over a static cache, and returns only tokens."""
    value = functools.partial(setting, model, kwargs)
    plain = not value("do_sample") and (value("num_beams") or 1) == 1 and (value("num_return_sequences") or 1) == 1
    extra = any(map(value, _OTHERS))
    given = any(kwargs.get(name) is not None for name in ("custom_generate", "assistant_model", "synced_gpus"))
    given = given or cache_of(kwargs) is not None
    return value("cache_implementation") == "static" and plain and not extra and not given


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    steps: Callable[[AnyBitCache, Tensor, Tensor, Tensor | None], Iterator[Tensor]],
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Tensor:
    """A decoding method for transformers (``custom_generate``). Returns tokens [rows, length], prompts included.

    steps: yields the tokens [rows, 1] of each step, given the cache, the first tokens, their positions and the mask.
    """
    if streamer is not None:
        streamer.put(input_ids.cpu())
    cache = cache_of(model_kwargs)
    unknown = {name for name, value in model_kwargs.items() if value is not None} - set(_KNOWN_INPUTS)
    stops = {type(criterion).__name__ for criterion in stopping_criteria} - set(_KNOWN_STOPS)
    if unknown or stops or len(logits_processor) or synced_gpus or not isinstance(cache, AnyBitCache):
        usual: Tensor = type(model)._sample(
            model, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
            generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
        )  # fmt: skip
        return usual
    ends, padding = generation_config._eos_token_tensor, generation_config._pad_token_tensor
    ends = set() if ends is None else set(ends.flatten().tolist())
    room = generation_config.max_length - input_ids.shape[1]
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    fewer = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    logits = model(
        input_ids=input_ids.to(model.device), attention_mask=mask,
        position_ids=positions, use_cache=True, **{CACHE: cache}, **fewer,
    ).logits  # fmt: skip
    first = logits[:, -1].float().argmax(-1, keepdim=True)
    last = torch.full_like(first, cache.seen - 1) if positions is None else positions[:, -1:]
    ended = [False] * len(first)
    answer: list[list[int]] = []
    waiting: list[Tensor] = []

    def look(tokens: list[Tensor]) -> bool:
        """Append tokens to the answer. Returns whether all rows have ended."""
        for column in torch.cat(tokens, 1).t().tolist() if tokens else []:
            if all(ended):
                return True
            filled = []
            for row, token in enumerate(column):
                filled.append(int(padding) if ended[row] and padding is not None else token)
                ended[row] = ended[row] or token in ends
            answer.append(filled)
            if streamer is not None:
                streamer.put(torch.tensor(filled))
        return all(ended)

    fresh: list[Tensor] = []
    source, made = steps(cache, first, last + 1, mask), 1
    done = look([first])  # stream the first token at once
    while not done and made < room:
        fresh.append(next(source).clone())
        made += 1
        if len(fresh) >= TOGETHER:
            done = look(waiting)
            waiting, fresh = fresh, []
    if not done and not look(waiting):
        look(fresh)
    if streamer is not None:
        streamer.end()
    tail = torch.tensor(answer, dtype=input_ids.dtype, device=input_ids.device).t()
    return torch.cat((input_ids, tail), 1) if answer else input_ids
