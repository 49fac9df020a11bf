"""Attention of a few new tokens over a quantized KV cache, and its exact reference in plain torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit import jit
from anybit.device import Device
from anybit.errors import KernelError, LayerError
from anybit.kernels.attention import decode as kernels
from anybit.kernels.attention import kv_page
from anybit.kvcache import KVCache


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
    *,
    split: int = 0,
    debug: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the newest tokens, already written to the cache, over everything before and among them.

    q: [len(sequences), tokens, heads, head_dim] in the cache's dtype. On a GPU 1 to 16 tokens: longer ones are prompts
    (``prefill``), and KernelError says so; elsewhere the exact reference takes any number.
    split: 0 shares the work evenly among the multiprocessors, so that results depend on the whole batch in their last
    bits; a multiple of the layout's block (say 1024) cuts every sequence into pieces of so many tokens, and results
    are the same bit for bit whatever else is in the batch.
    debug: check tables, lengths and sequences on the device too, and wait for the outcome (default: whether the
    environment has ANYBIT_DEBUG=1); raises KernelError with what is wrong.
    Returns the output in q's shape and dtype, and the log-sum-exp float32 [len(sequences), tokens, heads].
    """
    check(q, cache, layer, sequences, masks)
    if not q.is_cuda:
        return decode_reference(q, cache, layer, sequences, masks)
    debug = kv_page.debugging() if debug is None else debug
    run = decode_checked if debug else decode_kernel
    if cache.rotation is None:
        return run(q, cache, layer, sequences, masks, split=split)
    out, total = run(q @ cache.rotation, cache, layer, sequences, masks, split=split)
    return out @ cache.rotation, total


def prefill(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int, sequence: int, masks: Masks = NO_MASKS
) -> Tensor:
    """Write a prompt's (or a prompt's next part's) K and V, and attend over its 16-bit values and all before it.

    q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim], already counted by ``cache.extend``. Returns q's shape.
    """
    tokens = q.shape[0]
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    if cache.length(sequence) > tokens:
        old = (x.to(k.dtype) for x in cache.read_before(layer, sequence, tokens))
        keys, values = (torch.cat((before, new), 1) for before, new in zip(old, (keys, values), strict=True))
    cache.write(layer, [sequence], k[None], v[None])
    plain = masks.softcap is None and masks.sinks is None and masks.alibi is None
    if plain and keys.shape[1] == tokens and (masks.window is None or masks.window >= tokens):
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, scale=masks.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    parts = []
    for begin in range(0, tokens, 256):  # logits of all queries at once would not fit
        end = min(begin + 256, tokens)
        seen = keys.shape[1] - tokens + end
        parts.append(attend(q[begin:end].float(), keys[:, :seen].float(), values[:, :seen].float(), masks)[0])
    return torch.cat(parts).to(q.dtype)


def check(q: Tensor, cache: KVCache, layer: int, sequences: Sequence[int], masks: Masks = NO_MASKS) -> None:
    """Refuse, in words, what the cache cannot answer; nothing has been launched then."""
    cache.check_layer(layer)
    if q.dim() != 4 or q.shape[0] != len(sequences) or q.shape[3] != cache.head_dim:
        raise LayerError(
            f"q is {tuple(q.shape)}, and must be [{len(sequences)} sequences, tokens, heads, {cache.head_dim}]"
        )
    if q.shape[2] % cache.kv_heads:
        raise LayerError(f"{q.shape[2]} query heads cannot share {cache.kv_heads} KV heads evenly")
    if q.dtype != cache.dtype:
        raise LayerError(f"q is {q.dtype}, and the KV cache holds {cache.dtype}: convert one of them")
    if q.device != cache.pages.device:
        raise LayerError(f"q is on {q.device}, and the KV cache on {cache.pages.device}: move one of them")
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


def problem_of(q: Tensor, cache: KVCache, masks: Masks = NO_MASKS, split: int = 0) -> kernels.Problem:
    """What ``decode`` asks of the kernel."""
    return kernels.Problem(
        layout=cache.layout,
        batch=q.shape[0],
        heads=q.shape[2],
        kv_heads=cache.kv_heads,
        queries=q.shape[1],
        ring=cache.ledger.ring,
        window=cache.window,
        capacity=cache.ledger.capacity,
        bf16=cache.dtype == torch.bfloat16,
        sliding=masks.window is not None,
        softcap=masks.softcap is not None,
        alibi=masks.alibi is not None,
        split=split,
    )


@dataclass(frozen=True)
class Launch:
    """One launch of the kernel, ready: what it is, what it is given, and where its results will be."""

    kernel: jit.Kernel
    params: kernels.Params
    grid: tuple[int, int, int]
    out: Tensor
    lse: Tensor


def prepare(
    q: Tensor,
    cache: KVCache,
    layer: int,
    sequences: Sequence[int],
    masks: Masks,
    device: Device,
    config: kernels.Config | None = None,
    out: Tensor | None = None,
    errors: Tensor | None = None,
    split: int = 0,
) -> Launch:
    """The launch that answers ``decode`` on ``device``; raises KernelError, in words, where there is none.

    config: how (default: the kernel's own choice).  out: where the output goes, dense, in q's shape and dtype.
    errors: int32, where checked kernels leave what was wrong, and stamped ones their clocks.
    """
    problem = problem_of(q, cache, masks, split)
    if config is None:
        config = kernels.default(problem, device)
    elif (reason := kernels.why_not(problem, config, device)) is not None:
        raise KernelError(reason)
    q = q if q.stride(3) == 1 and q.data_ptr() % 8 == 0 and all(s % 4 == 0 for s in q.stride()[:3]) else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    space = _workspace(q.device, *kernels.workspace(problem, config, device))
    scale = 1.0 / math.sqrt(cache.head_dim) if masks.scale is None else masks.scale
    identity = list(sequences) == list(range(len(sequences)))
    params = kernels.Params(
        pages=cache.pages[layer],
        residual=cache.residual[layer],
        table=cache.table,
        lengths=cache.lengths,
        sequences=None if identity else cache.row_index(sequences, torch.int32),
        q=q,
        out=out,
        lse=lse,
        sinks=None if masks.sinks is None else _log2(masks.sinks, q),
        slopes=None if masks.alibi is None else _log2(masks.alibi, q),
        partial=space[0],
        partial_state=space[1],
        arrivals=space[2],
        errors=space[3] if errors is None else errors,
        q_batch_stride=q.stride(0),
        q_token_stride=q.stride(1),
        q_head_stride=q.stride(2),
        batch=problem.batch,
        kv_heads=problem.kv_heads,
        table_width=cache.table.shape[1],
        ring=problem.ring,
        window=problem.window,
        sliding=masks.window or 0,
        pages_count=cache.pages.shape[1],
        sequences_count=cache.table.shape[0],
        scale=kernels.log2_scale(scale),
        cap=kernels.log2_scale(masks.softcap or 0.0),
        uncap=2.0 / masks.softcap if masks.softcap else 0.0,
    )
    return Launch(kernels.kernel(config, cache.layout), params, kernels.grid(problem, config, device), out, lse)


def decode_kernel(
    q: Tensor,
    cache: KVCache,
    layer: int,
    sequences: Sequence[int],
    masks: Masks = NO_MASKS,
    config: kernels.Config | None = None,
    out: Tensor | None = None,
    errors: Tensor | None = None,
    split: int = 0,
) -> tuple[Tensor, Tensor]:
    """``decode`` by the GPU's kernel, without the checks and without rotation; see ``prepare`` for the rest."""
    device = Device.of(q)
    launch = prepare(q, cache, layer, sequences, masks, device, config, out, errors, split)
    # Pages may be read before the previous kernel has ended, unless it is one that writes a prompt's.
    overlaps = cache.newest_are_few and device.capability >= 90
    jit.launch(launch.kernel, launch.params, launch.grid, pdl=overlaps, device=launch.out.get_device())
    return launch.out, launch.lse


def decode_checked(
    q: Tensor, cache: KVCache, layer: int, sequences: Sequence[int], masks: Masks = NO_MASKS, *, split: int = 0
) -> tuple[Tensor, Tensor]:
    """``decode_kernel`` with every length, table entry and sequence checked on the device; it waits for the outcome."""
    problem = problem_of(q, cache, masks, split)
    config = kernels.default(problem, Device.of(q), checked=True)
    errors = torch.zeros(1, dtype=torch.int32, device=q.device)
    results = decode_kernel(q, cache, layer, sequences, masks, config, errors=errors, split=split)
    kv_page.report(int(errors), layer)
    return results


def _log2(values: Tensor, like: Tensor) -> Tensor:
    return (values.to(like.device, torch.float32) * math.log2(math.e)).contiguous()


_spaces: dict[tuple[object, ...], tuple[Tensor, Tensor, Tensor, Tensor]] = {}


def _workspace(device: torch.device, partial: int, states: int, arrivals: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What blocks leave for one another: kept for each stream and size, so that its addresses stay fixed."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream, partial, states, arrivals)
    if key in _spaces:
        return _spaces[key]
    space = (
        torch.empty(partial, dtype=torch.float32, device=device),
        torch.empty(states, dtype=torch.float32, device=device),
        torch.zeros(arrivals, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    # What a graph capture allocates is zeroed by the graph's replays, not now: it belongs to that graph alone.
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _spaces[key] = space
    return space
