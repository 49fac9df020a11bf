"""The gradient of a student's divergence from its teacher, gathered over the batches of a step.

A step of a small model is thousands of short kernels: on a GPU, batches of a shape that comes again are recorded as a
CUDA graph once and replayed from then on. What the teacher makes of a sequence is kept for later passes, as the hidden
states that its head reads: logits are hundreds of times as large.

The same text gives the same gradients, bit for bit: fused attention kernels add what they give to queries in no fixed
order, so attention is written out as products wherever a GPU has the memory for its weights.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from anybit.ops.capture import without_collector

# Rows of logits that become probabilities together.
_ROWS_AT_ONCE = 2048
# Batches of a shape that run as they are before one is recorded: allocations and choices of algorithms settle.
_WARM = 2
# Bytes of hidden states that are kept at most.
_KEPT = 8 << 30
# The part of a GPU's memory that the weights of all layers' attention may take once, when it is written out: they exist
# about three times. Of what it has, not of what is free, so that every run decides alike.
_ATTENTION = 1 / 8


def fast_in_half(device: torch.device | str) -> bool:
    """Whether passes in bfloat16 are fast: on GPUs, and CPUs with instructions for it; others take ten times longer."""
    return torch.device(device).type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Teacher:
    """What a model predicts, as what its head reads: of each sequence computed once, where that is all of it."""

    def __init__(self, model: Any, half: bool, device: torch.device) -> None:
        self.model, self.half, self.device = model, half, device
        self._kept: dict[bytes, Tensor] = {}
        self._bytes = 0
        self._splits: bool | None = None

    def states(self, tokens: Tensor) -> Tensor | None:
        """Final hidden states [B, L, D] of token ids int64 [B, L], or None if the head does more than read them."""
        keys = [row.numpy().tobytes() for row in tokens.cpu()]
        if self._splits is None:
            self._splits = self._can_split(tokens[:1, :16].to(self.device))
        if not self._splits:
            return None
        if any(key not in self._kept for key in keys):
            with self._context():
                found: Tensor = self.model.base_model(
                    input_ids=tokens.to(self.device), use_cache=False
                ).last_hidden_state
            if self._bytes + found.nbytes > _KEPT:
                return found
            self._bytes += found.nbytes
            self._kept.update(zip(keys, found.to(torch.bfloat16 if self.half else found.dtype), strict=True))
        return torch.stack([self._kept[key] for key in keys])

    def logits(self, tokens: Tensor, states: Tensor | None) -> Tensor:
        """What the model predicts, [B, L, V]; states: what ``states`` returned, on the same device as tokens."""
        with self._context():
            if states is None:
                found: Tensor = self.model(input_ids=tokens, use_cache=False).logits
            else:
                found = self.model.get_output_embeddings()(states)
        return found

    def _can_split(self, tokens: Tensor) -> bool:
        head = self.model.get_output_embeddings()
        if head is None or getattr(self.model, "base_model", self.model) is self.model:
            return False
        with torch.no_grad():
            whole = self.model(input_ids=tokens, use_cache=False).logits
            parts = head(self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
        return whole.shape == parts.shape and bool(torch.allclose(whole, parts, rtol=1e-3, atol=1e-3))

    @contextmanager
    def _context(self) -> Iterator[None]:
        # A graph must not remember weights that autocast has cast.
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False)
        with torch.no_grad(), autocast:
            yield


@contextmanager
def written_out(config: Any, shape: Sequence[int], device: torch.device, layers: int | None = None) -> Iterator[None]:
    """Attention as products, in a fixed order, on a GPU that has the memory for token ids [B, L] in so many layers.

    layers: by default all of the model's, which config describes.
    """
    if device.type != "cuda":
        yield
        return
    unknown = 1 << 20  # more than any GPU has the memory for
    count = layers or getattr(config, "num_hidden_layers", 0) or unknown
    heads = getattr(config, "num_attention_heads", 0) or unknown
    weights = count * heads * shape[0] * shape[1] ** 2
    if 4 * weights > _ATTENTION * torch.cuda.get_device_properties(device).total_memory:
        yield
        return
    # Products of 16-bit passes in 16 bits, as fused kernels have them: by default they are done in float32, without
    # tensor cores.
    allow = torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    allow(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        allow(before)


class KLGradient:
    """Mean KL(teacher || student) in nats over all positions of some batches; gradients are added to the student's.

    Where gradients go must stay in place from call to call. half: passes in bfloat16.
    """

    def __init__(self, teacher: Any, student: Any, half: bool, device: torch.device) -> None:
        self.teacher, self.student, self.half, self.device = Teacher(teacher, half, device), student, half, device
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor | None]] = {}
        self._records = True
        self._loss = torch.zeros((), device=device)
        self._share = torch.ones((), device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: Sequence[Tensor]) -> float:
        """Run token ids int64 [B, L] each, in one step; returns the loss over all of them."""
        total = sum(tokens.numel() for tokens in batches)
        self._loss.zero_()
        for tokens in batches:
            self._share.fill_(tokens.numel() / total)
            if self._stream is None:
                self._add(tokens, self.teacher.states(tokens))
                continue
            with written_out(self.student.config, tokens.shape, self.device):
                self._on_gpu(tokens)
        return float(self._loss)

    def _add(self, tokens: Tensor, states: Tensor | None) -> None:
        wanted = self.teacher.logits(tokens, states)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            found = self.student(input_ids=tokens, use_cache=False).logits
        whole: Tensor = Divergence.apply(found.flatten(0, 1), wanted.flatten(0, 1))  # type: ignore[no-untyped-call]
        divergence = whole * self._share
        divergence.backward()
        self._loss.add_(divergence.detach())

    def _on_gpu(self, tokens: Tensor) -> None:
        assert self._stream is not None
        shape = tuple(tokens.shape)
        self._seen[shape] += 1
        states = self.teacher.states(tokens)
        if shape in self._graphs:
            graph, static, given = self._graphs[shape]
            static.copy_(tokens)
            if given is not None and states is not None:
                given.copy_(states)
            graph.replay()
            return
        static = tokens.to(self.device)
        # Recording wants a stream of its own, and what ran before it on the same.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            # One shape only: each recording keeps memory of its own.
            if self._records and not self._graphs and self._seen[shape] > _WARM:
                self._record(shape, static, states)
            else:
                self._add(static, states)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _record(self, shape: tuple[int, ...], static: Tensor, states: Tensor | None) -> None:
        """Record a batch and run it."""
        graph = torch.cuda.CUDAGraph()
        try:
            with without_collector(), torch.cuda.graph(graph, stream=self._stream):
                self._add(static, states)
        except RuntimeError as error:  # a model that looks at values on its way cannot be recorded
            warnings.warn(f"learning continues without CUDA graphs, which is slower: {error}", stacklevel=2)
            self._records = False
            self._add(static, states)
            return
        self._graphs[shape] = graph, static, states
        graph.replay()


class Divergence(torch.autograd.Function):
    """Mean KL(wanted || found) of logits [T, V], with its gradient at once: logits are large, and few copies fit."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, wanted: Tensor) -> Tensor:
        """The loss, float32 []."""
        gradient = torch.empty_like(found)
        total = torch.zeros((), device=found.device)
        for start in range(0, len(found), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            ours = found[part].log_softmax(-1, dtype=torch.float32)
            theirs = wanted[part].log_softmax(-1, dtype=torch.float32)
            total += nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True)
            gradient[part] = ours.exp_().sub_(theirs.exp_()) / len(found)
        ctx.save_for_backward(gradient)
        return total / len(found)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        """The gradient of ``found``."""
        (gradient,) = ctx.saved_tensors
        return gradient * outer.to(gradient.dtype), None
