"""Checks of serving_kv.py inside an engine: inputs of anybit's attention, cache contents, and drafts."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anybit.kernels.attention.kv_page import PageLayout
from anybit.vllm.kv_step import Batch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from anybit.vllm.kv_backend import RowImpl
    from serving_kv import Requests

TOLERANCE = 2e-3
"""Of attention, relative to its mean size: that of tests/kernels/attention/test_decode_gpu.py, with 16-bit outputs."""


class Watch:
    """Records inputs of an engine's attention: the last batch, and prompts' keys and values of some layers."""

    def __init__(self) -> None:
        from anybit.vllm.kv_backend import RowBuilder, RowImpl

        self.batch: Batch | None = None
        self.layers: dict[str, tuple[RowImpl, Tensor]] = {}
        self.tokens: dict[tuple[str, int], list[list[Tensor]]] = {}  # by layer and first residual block
        self.names, self.prompt, self.calls = tuple[str, ...](), 0, 0
        build, forward = RowBuilder.build, RowImpl.forward

        def built(*args: Any, **kw: Any) -> Batch:
            self.batch = build(*args, **kw)
            return self.batch

        def forwarded(
            impl: RowImpl, layer: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, cache: Tensor,
            batch: Batch | None, *rest: Any, **kw: Any,
        ) -> Tensor:  # fmt: skip
            self.calls += 1
            if layer.layer_name in self.names and batch is not None and (batch.groups or batch.rows):
                self._note(layer.layer_name, impl, cache, k, v, batch)
            return forward(impl, layer, q, k, v, cache, batch, *rest, **kw)

        RowBuilder.build, RowImpl.forward = built, forwarded

    def _note(self, name: str, impl: "RowImpl", cache: Tensor, k: Tensor, v: Tensor, batch: Batch) -> None:
        self.layers[name] = (impl, cache)
        shape = (-1, impl.num_kv_heads, impl.head_size)
        starts, first = batch.starts.tolist(), batch.table[:, 0].tolist()
        for block, a, z in zip(first, starts, starts[1:], strict=False):
            if (name, block) not in self.tokens and sum(known == name for known, _ in self.tokens) == 2:
                continue  # two requests suffice
            have = self.tokens.setdefault((name, block), [])
            if z > a and sum(len(x[0]) for x in have) < self.prompt:
                have.append([x.reshape(shape)[a:z].clone() for x in (k, v)])

    def begin(self, layers: list[str], prompt: int) -> None:
        """Record prompts of ``prompt`` tokens from here on, in the first and last layer."""
        self.names, self.prompt = (layers[0], layers[-1]), prompt
        self.tokens.clear()

    def check(self) -> str:
        """Compare two requests' cache contents with recorded keys and values, and attention over the cache.

        Raises SystemExit for a mismatch.
        """
        from anybit.cache.attention import attend
        from anybit.cache.blocks import PAGE, Pool, Row
        from anybit.kernels.attention import kv_page
        from anybit.ops import kv, kv_rows
        from timing import worst_of

        batch, worst, compared, requests, prompt = self.batch, 0.0, 0, 0, self.prompt
        table, lengths = batch.table, batch.lengths  # left by the last step
        count = int((lengths > 0).sum())
        for name, (impl, cache) in self.layers.items():
            rows, pages = impl.layout, cache.view(torch.uint8)[:, :, 0]
            q = 2 * torch.randn(count, impl.num_heads, impl.head_size, device=pages.device, dtype=torch.float16)
            out = torch.empty_like(q)
            seen = kv_rows.view(rows, pages, table[:count], lengths[:count], q.dtype, impl.capacity)
            if q.is_cuda:
                kv.run(kv_rows.decode(q, seen, impl.masks, out=out, overlaps=False), 0)
            for i, given in [(i, self.tokens.get((name, int(table[i, 0])))) for i in range(count)]:
                if given is None:
                    continue
                length = int(lengths[i])
                last = (length - 1) // PAGE
                used = table[i, : rows.front + last].long()
                pool = Pool(rows, pages[used].cpu(), q.dtype)
                row = Row(torch.arange(len(used)), 0, 1, length - 1)
                k, v = (torch.cat([x[half] for x in given]).transpose(0, 1) for half in (0, 1))
                if k.shape[1] != prompt or length <= prompt:
                    raise SystemExit(f"{k.shape[1]} tokens were noted of a prompt of {prompt}, now {length}")
                full = prompt // PAGE
                for page in sorted({0, full // 2, full - 1}) if full else ():
                    tokens = slice(page * PAGE, page * PAGE + PAGE)
                    wanted = kv_page.encode(rows.layout, k[:, tokens].cpu(), v[:, tokens].cpu()).flatten(1)
                    codes = wanted.unflatten(-1, (rows.layout.blocks, -1))[..., : _codes(rows.layout)]
                    got = pool.pages[pool.page(row, page)].unflatten(-1, (rows.layout.blocks, -1))
                    if not torch.equal(codes, got[..., : _codes(rows.layout)]):
                        raise SystemExit(f"page {page} of request {i} in {name} is not what the reference packs")
                    compared += 1
                requests += 1
                first = last * PAGE
                ring = pool.read_ring(row, first, length)
                if prompt > first and not torch.equal(ring[0][:, : prompt - first], k[:, first:].to("cpu", q.dtype)):
                    raise SystemExit(f"the tokens in 16 bits of request {i} in {name} are not those that were given")
                both = [torch.cat((far, x.float()), 1) for far, x in zip(pool.read_pages(row, last), ring, strict=True)]
                expected = attend(q[i : i + 1].float(), *(x.to(q.device) for x in both), impl.masks)[0]
                if q.is_cuda:
                    error = (out[i].float() - expected[0]).abs().mean() / expected.abs().mean()
                    worst = worst_of((worst, float(error)))
        if not requests:
            raise SystemExit("nothing was compared: no request whose prompt was noted is in the last batch")
        if not worst < TOLERANCE:
            raise SystemExit(f"attention over the cache is off by {worst:.1e} of its mean size, {compared} pages")
        self.names = ()
        self.tokens.clear()
        return f"{compared} pages as the reference packs them, attention within {worst:.1e} of exact"


def _codes(layout: PageLayout) -> int:
    """Bytes of a block that are written; the rest is padding."""
    return int(layout.key_bytes + layout.value_bytes)


class LastTime:
    """Replaces vLLM's n-gram drafter, which needs numba: proposes what last followed the last token.

    faults: draws which drafts are corrupted or truncated, so that steps differ; None: none.
    """

    faults: "random.Random | None" = None

    def __init__(self, config: "VllmConfig") -> None:
        self.count = config.speculative_config.num_speculative_tokens

    def propose(
        self, count: int, sampled: Sequence[Sequence[int]], lengths: np.ndarray, tokens: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:  # fmt: skip
        """Draft tokens of each request that has sampled a token."""
        found = list[list[int]]()
        for i, new in enumerate(sampled):
            known = tokens[i, : lengths[i]]
            places = np.flatnonzero(known[: -count - 1] == known[-1]) if len(new) else ()
            first = places[-1] + 1 if len(places) else len(known) - count
            drafts = known[first : first + count].tolist() if len(new) else []
            if self.faults is not None:
                drafts = [token if self.faults.random() < 0.8 else 10 for token in drafts]
                drafts = drafts[: self.faults.randrange(count)] if self.faults.random() < 0.1 else drafts
            found.append(drafts)
        return found

    def load_model(self, *_: object, **__: object) -> None:
        """Do nothing."""


def check_drafted(requests: "Requests", count: int = 6, prompt: int = 300, new: int = 150) -> str:
    """Generate, then compute logits of prompt and output as one prompt: the output must be their greedy tokens.

    Some drafts are wrong and some missing. Raises SystemExit if outputs are not those tokens. Rounding
    flips a token now and then, at near-ties.
    """
    from vllm import SamplingParams

    core, LastTime.faults = requests.core, random.Random(2)
    draw, asked = random.Random(1), dict[str, list[int]]()
    plain = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    again = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    for i in range(count):
        asked[f"drafted{i}"] = [draw.randint(10, 9999) for _ in range(prompt)]
        core.add_request(f"drafted{i}", {"prompt_token_ids": asked[f"drafted{i}"]}, plain)
    requests.finish()
    LastTime.faults = None
    for name, tokens in asked.items():
        core.add_request("again" + name, {"prompt_token_ids": tokens + requests.answers[name]}, again)
    gaps = list[float]()
    while core.has_unfinished_requests():
        for answer in core.step():
            answered = zip(answer.prompt_token_ids, answer.prompt_logprobs, strict=True)
            for token, logprobs in list(answered)[prompt:]:
                gaps.append(max(entry.logprob for entry in logprobs.values()) - logprobs[token].logprob)
    near = sum(gap < 0.1 for gap in gaps) / len(gaps)
    said = f"{near:.1%} of {len(gaps)} drafted tokens are greedy ones, {max(gaps):.2f} the largest gap"
    if near < 0.9:
        raise SystemExit(said)
    return said
