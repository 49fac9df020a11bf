"""Passes of a model over one static cache as CUDA graphs: a step of one token per row, a greedy one, a short prompt."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from anybit.hf.bypass import Bypassed, hooked
from anybit.hf.cache import AnyBitCache
from anybit.hf.cache_name import CACHE
from anybit.kernels.attention.kv_page import debugging
from anybit.layers.experts import Experts
from anybit.ops.capture import capture

BUCKET = 32
"""Prompts are padded to a multiple of so many tokens, which a cache's slack takes back exactly."""
CAPTURED = 512
"""Most tokens of a captured prompt, of all rows: beyond, a GPU takes longer than the host, and graphs more memory."""


class StepGraph:
    """A step of one token per row over one static cache: eager the first time (to compile), captured the second.

    ids, positions: int64 [rows, tokens], the graph's input buffers.
    """

    def __init__(
        self, model: PreTrainedModel, forward: Callable[..., ModelOutput], cache: AnyBitCache, tokens: int = 1
    ) -> None:
        store = cache._store()
        self.forward = forward
        self._cache = weakref.ref(cache)  # else no graph, and so no cache, would ever be freed
        self.rotary = _angles(model)
        with torch.inference_mode(False):
            self.ids = torch.zeros(len(cache.rows), tokens, dtype=torch.long, device=store.device)
            self.positions = torch.zeros_like(self.ids)
        self.more: dict[str, Tensor] = {}  # arguments of the pass besides
        self.stream, self.pool = torch.cuda.Stream(store.device), None  # type: torch.cuda.Stream, Any
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None
        self.parts = list(model.children())
        modules = [module for part in self.parts for module in part.modules()]
        self.attributes = [module.__dict__ for module in modules if not isinstance(module, Bypassed)]
        self.seen, self.hooked = (-1, -1), False

    def _has_hooks(self) -> bool:
        """Whether modules have hooks, or forwards set on instances, which a replay would not call."""
        seen = RemovableHandle.next_id, sum(map(len, self.attributes))  # both grow by what may be one
        if self.hooked or seen != self.seen:
            self.seen, self.hooked = seen, any(map(hooked, self.parts))
        return self.hooked

    @property
    def cache(self) -> AnyBitCache:
        """The cache, which whoever runs a step holds."""
        found = self._cache()
        assert found is not None
        return found

    def __call__(self, ids: Tensor, positions: Tensor | int) -> Tensor:
        """Logits [rows, 1, vocabulary] after tokens ``ids``; the next step overwrites them."""
        self.ids.copy_(ids)
        if isinstance(positions, int):
            self.positions.fill_(positions)
        else:
            self.positions.copy_(positions)
        return self._advance()

    def _advance(self) -> Tensor:
        tokens = self.ids.shape[1]
        self.cache.count(tokens)
        # By ``counted`` below: packing is not part of a step's graph, the same for all steps.
        self.cache.packs_later = tokens == 1
        try:
            logits = self._logits()
            self.cache.counted()
        except BaseException:
            self.cache.take_back()
            raise
        finally:
            self.cache.packs_later = False
        return logits

    def _logits(self) -> Tensor:
        if self._has_hooks():
            return self._run()
        if self.graph is None:
            self._first_steps()
        else:
            self.graph.replay()
        assert self.logits is not None
        return self.logits

    def _first_steps(self) -> None:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        if self.logits is None or debugging():  # checked kernels report to the host, which a capture forbids
            with torch.cuda.stream(self.stream):
                self.logits = self._run()
        else:
            graph = torch.cuda.CUDAGraph()
            with capture(graph, self.stream, self.pool):
                self.logits = self._run()
            self.graph = graph
        current.wait_stream(self.stream)
        if self.graph is not None:
            self.graph.replay()

    def _run(self) -> Tensor:
        # Positions in the cache are below its capacity, which tables of that size cover; a caller's own must be, too.
        if self.rotary is not None:
            self.rotary.in_tables = self.cache._store().ledger.capacity <= self.rotary.positions
        try:
            call = {"input_ids": self.ids, "position_ids": self.positions, "use_cache": True, CACHE: self.cache}
            logits: Tensor = self.forward(**call, **self.more).logits
        finally:
            if self.rotary is not None:
                self.rotary.in_tables = False
        return logits


class GreedyGraph(StepGraph):
    """A greedy step: it writes its argmax token and the next position into its own input buffers."""

    def tokens(self, first: Tensor, positions: Tensor) -> Iterator[Tensor]:
        """Yield the tokens of each step, int64 [rows, 1]; the next step overwrites them."""
        self.ids.copy_(first)
        self.positions.copy_(positions)
        while True:
            self._advance()
            yield self.ids

    def _run(self) -> Tensor:
        logits = super()._run()
        self.ids.copy_(logits[:, -1].float().argmax(-1, keepdim=True))
        self.positions.add_(1)
        return logits


class PromptGraph(StepGraph):
    """First prompts of up to ``tokens`` tokens of each row, padded on the right, where causal attention does not look.

    The cache takes the padding back. As with steps, the first prompt runs eagerly and the second is captured.
    tokens: 0 for prompts longer than ``CAPTURED``, of which all run eagerly, padded to a multiple of ``BUCKET``.
    others: of the cache; they run in turn and share memory.
    """

    def __init__(
        self, model: PreTrainedModel, forward: Callable[..., ModelOutput], cache: AnyBitCache, tokens: int,
        others: Mapping[int, "PromptGraph"],
    ) -> None:  # fmt: skip
        super().__init__(model, forward, cache, tokens)
        first = next(iter(others.values()), None)
        self.stream, self.pool = (
            (self.stream, torch.cuda.graph_pool_handle()) if first is None else (first.stream, first.pool)
        )
        self.held = (self.ids, self.positions) if tokens else (None, None)
        with torch.inference_mode(False):
            self.more["logits_to_keep"] = self.last = self.ids.new_zeros(1)

    def __call__(self, ids: Tensor, positions: Tensor | int) -> Tensor:
        """Logits [rows, 1, vocabulary] after ``ids``, up to ``tokens`` a row; the next prompt overwrites them."""
        tokens = ids.shape[1]
        if isinstance(positions, int):
            positions = torch.arange(tokens, device=ids.device)
        # By the last token: attention multiplies what it does not look at by zero, and another's NaN would stay NaN.
        behind, given = -tokens % BUCKET, (ids, positions.expand_as(ids))
        self.ids, self.positions = (
            torch.cat((x, x[:, -1:].expand(-1, behind)), 1, out=held) for x, held in zip(given, self.held, strict=True)
        )
        self.last.fill_(tokens - 1)
        logits = self._advance()
        if behind:
            self.cache.crop(behind)
        return logits

    def _first_steps(self) -> None:
        if self.held[0] is not None:
            super()._first_steps()
        else:
            self.logits = self._run()


def pads_prompts(model: PreTrainedModel, cache: AnyBitCache) -> bool:
    """Whether a model's prompts may run as ``PromptGraph``: it is fused, with tables of angles, and has no experts."""
    # float4 pages are written at addresses that the host chooses
    if _angles(model) is None or cache.format.float4:
        return False
    return not any(isinstance(module, Experts) for module in model.modules())


def _angles(model: PreTrainedModel) -> Any:
    """A fused model's rotary embedding, which has tables of angles; None without."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None) if hasattr(model, "get_decoder") else None
    return rotary if hasattr(rotary, "in_tables") else None
