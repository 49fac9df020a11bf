"""transformers' attention implementation "anybit", and its mask, over an ``AnyBitCache``; registered on import."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from anybit.errors import LayerError
from anybit.hf.cache_name import CACHE
from anybit.ops.kv import Masks

NAME = "anybit"


class NotCausalError(LayerError):
    """A mask is neither causal nor causal with a sliding window, or hides tokens after visible ones."""


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention implementation "anybit"; LayerError names each argument that it does not support."""
    cache = getattr(key, "anybit_cache", None)
    if cache is None:
        raise LayerError(
            f"attention 'anybit' needs an AnyBitCache: pass {CACHE}=AnyBitCache('kv4', config=model.config)"
        )
    new = cache.taken()  # before any check, so that an error leaves nothing pending in the cache
    if dropout:
        raise LayerError(f"attention 'anybit' does not support dropout, and dropout is {dropout}: call model.eval()")
    if position_bias is not None:
        raise LayerError("attention 'anybit' does not support a learned position bias")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise LayerError("attention 'anybit' is causal, and this layer is not")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise LayerError(f"attention 'anybit' takes padding masks [batch, keys], not {tuple(attention_mask.shape)}")
    masks = Masks(scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    return cache.attend(query, new, attention_mask, masks), None


def mask(
    *args: object,
    attention_mask: Tensor | None = None,
    kv_length: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    **kwargs: object,
) -> Tensor | None:
    """The mask for "anybit": the padding mask, or None without padding; attention itself is causal and windowed."""
    if not torch.compiler.is_compiling() and not _is_causal(mask_function):
        raise NotCausalError(
            f"attention {NAME!r} is causal, with or without a sliding window, and this model's mask is of another kind "
            "(chunked, or bidirectional within images): use another attention implementation, and create AnyBitCache "
            "without config"
        )
    if attention_mask is None:
        return None
    if attention_mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # some models (OPT) create a mask if none is given; rows of a captured step have no padding
    attention_mask = attention_mask[:, -kv_length:] if kv_length else attention_mask
    if bool(attention_mask.all()):
        return None
    check_padding(attention_mask)
    return attention_mask


def check_padding(padding: Tensor) -> None:
    """Raise NotCausalError unless a padding mask [batch, keys] pads on the left."""
    if bool((padding[:, 1:] < padding[:, :-1]).any()):
        raise NotCausalError(
            f"attention {NAME!r} supports left padding only, and this attention_mask hides tokens after visible ones "
            "(generate builds such a mask from pad tokens inside a prompt: pass attention_mask)"
        )


def _is_causal(function: object) -> bool:
    """Whether a mask function of transformers is plainly causal, with or without a sliding window."""
    if function is None or function is causal_mask_function:
        return True
    kind, inside = getattr(function, "__qualname__", "").partition(".")[0], getattr(function, "__closure__", None)
    values = [cell.cell_contents for cell in inside or ()]
    if kind == "blockwise_overlay":  # -1: token in no block
        return not bool((values[0] >= 0).any())
    return kind == "sliding_window_overlay" or (kind in ("and_masks", "or_masks") and all(map(_is_causal, *values)))


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask)
