"""Decode attention over a quantized KV cache, and its exact reference in plain torch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anybit.cache.kvcache import KVCache
from anybit.device import Device
from anybit.errors import LayerError
from anybit.kernels.attention import kv_page
from anybit.ops import kv
from anybit.ops.kv import NO_MASKS, Masks


def attend(q: Tensor, k: Tensor, v: Tensor, masks: Masks = NO_MASKS) -> tuple[Tensor, Tensor]:
    """Exact causal attention of the newest tokens of one sequence, in q's dtype.

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
        logits = torch.cat((logits, sinks), -1)
    out = logits.softmax(-1)[..., :length] @ v.to(q.dtype)[:, None]
    total = logits.logsumexp(-1)
    return out.permute(2, 0, 1, 3).reshape(q.shape), total.permute(2, 0, 1).reshape(tokens, heads)


def decode(
    q: Tensor,
    cache: KVCache,
    layer: int,
    sequences: Sequence[int],
    masks: Masks = NO_MASKS,
    *,
    split: int = 0,
    debug: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the newest tokens, which ``cache.write`` has stored, over their whole sequences.

    q: [len(sequences), tokens, heads, head_dim] in the cache's dtype. On a GPU 1 to 16 tokens, else KernelError: longer
    ones are prompts (``prefill``). On a CPU the exact reference takes any number.
    split: 0 (split-KV) divides the batch's work evenly among the SMs, so the last bits of a result depend on the rest
    of the batch; a multiple of the layout's block (say 1024) cuts every sequence into splits of that many tokens, and
    results are bitwise independent of the batch.
    debug: also check page table, lengths and sequences on the device, synchronously (default: whether ANYBIT_DEBUG=1
    in the environment); raises KernelError with what is wrong.
    Raises LayerError, before anything is launched, if q does not fit the cache or its sequences.
    Returns the output in q's shape and dtype, and the log-sum-exp float32 [len(sequences), tokens, heads].
    """
    check(q, cache, layer, sequences, masks)
    if not q.is_cuda:
        return decode_reference(q, cache, layer, sequences, masks)
    turned, config, errors = cache.turn(q), None, None
    if debug or (debug is None and kv_page.debugging()):
        config = kv.default(kv.problem_of(turned, cache.view(layer), masks, split), Device.of(q), checked=True)
        errors = torch.zeros(1, dtype=torch.int32, device=q.device)
    out, total = decode_kernel(turned, cache, layer, sequences, masks, config, errors=errors, split=split)
    if errors is not None:
        kv_page.report(int(errors), layer)
    return cache.turn(out), total


def prefill(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, sequence: int, masks: Masks = NO_MASKS
) -> Tensor:
    """Write K and V of a prompt or its next chunk; attend over them, unquantized, and over all earlier tokens.

    q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], after ``cache.extend`` by ``tokens``; all in the
    cache's dtype and on its device, else LayerError. Returns the output in q's shape and dtype.
    """
    tokens = q.shape[0]
    whole = cache.length(sequence) == tokens
    if whole and is_plain(masks, tokens):
        cache.write(layer, [sequence], k[None], v[None])
        return attend_prompts(q[None], k[None], v[None], masks)[0]
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    if not whole:
        old = cache.read_before(layer, sequence, tokens)  # float32, as decode reads them
        keys, values = (torch.cat((before, new.float()), 1) for before, new in zip(old, (keys, values), strict=True))
    cache.write(layer, [sequence], k[None], v[None])
    parts = []
    for begin in range(0, tokens, 256):  # bounds the memory of the logits
        end = min(begin + 256, tokens)
        seen = keys.shape[1] - tokens + end
        parts.append(attend(q[begin:end].float(), keys[:, :seen].float(), values[:, :seen].float(), masks)[0])
    return torch.cat(parts).to(q.dtype)


def is_plain(masks: Masks, tokens: int) -> bool:
    """Whether attention among so many tokens is that of ``attend_prompts``."""
    plain = masks.softcap is None and masks.sinks is None and masks.alibi is None
    return plain and (masks.window is None or masks.window >= tokens)


def attend_prompts(q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> Tensor:
    """Causal attention of whole prompts of one length: q [batch, tokens, heads, dim]; k, v alike -> q's shape."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=masks.scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def check(q: Tensor, cache: KVCache, layer: int, sequences: Sequence[int], masks: Masks = NO_MASKS) -> None:
    """Raise LayerError if q or the masks do not fit the cache or its sequences."""
    cache.check_layer(layer)
    if q.dim() != 4 or q.shape[0] != len(sequences) or q.shape[3] != cache.head_dim:
        raise LayerError(
            f"q is {tuple(q.shape)}, and must be [{len(sequences)} sequences, tokens, heads, {cache.head_dim}]"
        )
    if q.shape[2] % cache.kv_heads:
        raise LayerError(f"{q.shape[2]} query heads cannot share {cache.kv_heads} KV heads evenly")
    cache.check_like("q", q)
    for name, values in (("sinks", masks.sinks), ("alibi", masks.alibi)):
        if values is not None and tuple(values.shape) != (q.shape[2],):
            raise LayerError(f"{name} is {tuple(values.shape)}, and must be a value for each of {q.shape[2]} heads")
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
    """``decode`` in plain torch over the dequantized cache: the kernel's oracle and the CPU path."""
    outs, totals = [], []
    for row, sequence in enumerate(sequences):
        k, v = (x.to(precision) for x in cache.read(layer, sequence, newest=q.shape[1]))
        out, total = attend(cache.turn(q[row].to(precision)), k, v, masks)
        outs.append(cache.turn(out))
        totals.append(total)
    return torch.stack(outs).to(q.dtype), torch.stack(totals).float()


def decode_kernel(
    q: Tensor,
    cache: KVCache,
    layer: int,
    sequences: Sequence[int],
    masks: Masks = NO_MASKS,
    config: kv.Config | None = None,
    out: Tensor | None = None,
    errors: Tensor | None = None,
    split: int = 0,
) -> tuple[Tensor, Tensor]:
    """``decode`` on the GPU without checks and without rotation; see ``ops.kv.prepare`` for the rest."""
    view, rows, gpu, early = cache.view(layer), cache.row_pointer(sequences), Device.of(q), cache.newest_are_few
    launch = kv.prepare(q, view, rows, masks, gpu, config, out, errors, split, overlaps=early)
    kv.run([launch], view.pages.get_device())
    assert launch.lse is not None
    return launch.out, launch.lse


kv.implement(decode)
