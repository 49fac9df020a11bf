"""Attention of a few new tokens over a quantized KV cache, and its exact reference in plain torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.errors import LayerError
from anybit.kvcache import KVCache

MOST_QUERIES = 16


@dataclass(frozen=True)
class Masks:
    """What a model does to its logits; all off by default.

    scale: factor of q.k (default 1 / sqrt(head_dim)).  window: each token sees itself and the ``window - 1`` before it.
    softcap: logits become softcap * tanh(logit / softcap).  sinks: float32 [heads], a logit a head that only adds to
    the denominator.  alibi: float32 [heads], slopes; the logit of a key gains slope * (key position - query position).
    Order as in the models that have them: scale, softcap, alibi, mask, sink.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise LayerError(f"a sliding window has at least 1 token, not {self.window}")
        if self.softcap is not None and not self.softcap > 0:
            raise LayerError(f"softcap must be positive, not {self.softcap}")


NO_MASKS = Masks()


def attend(q: Tensor, k: Tensor, v: Tensor, masks: Masks = NO_MASKS) -> tuple[Tensor, Tensor]:
    """Exact causal attention of the newest tokens of one sequence, in the precision of q.

    q: [tokens, heads, dim].  k, v: [kv_heads, length, dim] with the new tokens last.
    Returns the output [tokens, heads, dim] and the log-sum-exp [tokens, heads]; an empty sum gives 0 and -inf.
    """
    tokens, heads, dim = q.shape
    kv_heads, length, _ = k.shape
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)  # [kv_heads, group, tokens, dim]
    scale = 1.0 / math.sqrt(dim) if masks.scale is None else masks.scale
    logits = grouped @ k.to(q.dtype)[:, None].transpose(-1, -2) * scale
    if masks.softcap is not None:
        logits = masks.softcap * torch.tanh(logits / masks.softcap)
    query = torch.arange(length - tokens, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None]
    if masks.alibi is not None:
        slopes = masks.alibi.to(q.dtype).reshape(kv_heads, -1, 1, 1)
        logits = logits + slopes * (key - query)
    hidden = key > query
    if masks.window is not None:
        hidden = hidden | (key <= query - masks.window)
    logits = logits.masked_fill(hidden, -torch.inf)
    if masks.sinks is not None:
        sinks = masks.sinks.to(q.dtype).reshape(kv_heads, -1, 1, 1).expand(*logits.shape[:3], 1)
        total = torch.cat((logits, sinks), -1).logsumexp(-1, keepdim=True)
    else:
        total = logits.logsumexp(-1, keepdim=True)
    weights = torch.exp(logits - total.nan_to_num(neginf=0.0))
    out = weights @ v.to(q.dtype)[:, None]
    return out.permute(2, 0, 1, 3).reshape(q.shape), total.squeeze(-1).permute(2, 0, 1).reshape(tokens, heads)


def decode(
    q: Tensor,
    cache: KVCache,
    layer: int,
    sequences: Sequence[int],
    masks: Masks = NO_MASKS,
) -> tuple[Tensor, Tensor]:
    """Attention of the newest tokens, already written to the cache, over everything before and among them.

    q: [len(sequences), tokens, heads, head_dim] in the cache's dtype.
    Returns the output in q's shape and dtype, and the log-sum-exp float32 [len(sequences), tokens, heads].
    """
    check(q, cache, sequences)
    return decode_reference(q, cache, layer, sequences, masks)


def check(q: Tensor, cache: KVCache, sequences: Sequence[int]) -> None:
    """Refuse, in words, what the cache cannot answer."""
    if q.dim() != 4 or q.shape[0] != len(sequences) or q.shape[3] != cache.head_dim:
        raise LayerError(
            f"q is {tuple(q.shape)}, and must be [{len(sequences)} sequences, tokens, heads, {cache.head_dim}]"
        )
    if q.shape[2] % cache.kv_heads:
        raise LayerError(f"{q.shape[2]} query heads cannot share {cache.kv_heads} KV heads evenly")
    if q.dtype != cache.dtype:
        raise LayerError(f"q is {q.dtype}, and the KV cache holds {cache.dtype}: convert one of them")
    for sequence in sequences:
        if q.shape[1] > cache.length(sequence):
            raise LayerError(
                f"sequence {sequence} holds {cache.length(sequence)} tokens, fewer than the {q.shape[1]} queries: the "
                "queries are those of its newest tokens"
            )


def decode_reference(
    q: Tensor,
    cache: KVCache,
    layer: int,
    sequences: Sequence[int],
    masks: Masks = NO_MASKS,
    precision: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """``decode`` in plain torch over the dequantized cache: the oracle of the kernel and the CPU's own path."""
    outs, totals = [], []
    for row, sequence in enumerate(sequences):
        query = q[row].to(precision)
        if cache.rotation is not None:
            query = query @ cache.rotation.to(precision)
        k, v = cache.read(layer, sequence, newest=q.shape[1])
        out, total = attend(query, k.to(precision), v.to(precision), masks)
        if cache.rotation is not None:
            out = out @ cache.rotation.to(precision)
        outs.append(out)
        totals.append(total)
    return torch.stack(outs).to(q.dtype), torch.stack(totals).float()
