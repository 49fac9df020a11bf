"""The gradient of KL(teacher || student), accumulated over the batches of a step.

A step of a small model is thousands of short kernels: on a GPU, the first batch shape that recurs is captured as a CUDA
graph and replayed. The teacher's final hidden states are cached for later passes: logits would be hundreds of times as
large.

Gradients are deterministic: fused attention kernels accumulate query gradients in no fixed order, so attention uses the
math backend wherever the GPU has memory for the attention weights.
"""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention import SDPBackend, sdpa_kernel

from anybit.ops.capture import without_collector

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Rows of logits per softmax.
_ROWS_AT_ONCE = 2048
# Batches of a shape to run before capture, so that allocations and algorithm choices settle.
_WARM = 2
# Most bytes of cached hidden states, and of a GPU's free memory the share.
_KEPT, _KEPT_ON_A_GPU = 8 << 30, 0.3
# Share of a GPU's memory for one copy of all layers' attention weights under the math backend, which needs about three.
# Of total memory, not of free memory, so that every run decides alike.
_ATTENTION = 1 / 8


def fast_in_half(device: torch.device | str) -> bool:
    """Whether bfloat16 is fast: on GPUs, and on CPUs with instructions for it; on others it is ten times slower."""
    return torch.device(device).type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Teacher:
    """A teacher's predictions, with final hidden states cached per sequence if its logits depend on nothing else."""

    def __init__(self, model: "PreTrainedModel", half: bool) -> None:
        self.model, self.half, self.device = model, half, model.device
        self._kept: dict[bytes, Tensor] = {}
        self._room = _KEPT
        if self.device.type == "cuda":
            self._room = int(_KEPT_ON_A_GPU * torch.cuda.mem_get_info(self.device)[0])
        self._splits: bool | None = None

    def states(self, tokens: Tensor) -> Tensor | None:
        """Final hidden states [B, L, D] of token ids int64 [B, L], or None if logits are not just the head of them."""
        keys = [hashlib.sha256(row.numpy().tobytes()).digest() for row in tokens.cpu()]
        if self._splits is None:
            self._splits = self._can_split(tokens[:1, :16].to(self.device))
        if not self._splits:
            return None
        if any(key not in self._kept for key in keys):
            with self._context():
                found: Tensor = self.model.base_model(
                    input_ids=tokens.to(self.device), use_cache=False
                ).last_hidden_state
            found = found.to(torch.bfloat16 if self.half else found.dtype)
            if found.nbytes > self._room:
                return found
            self._room -= found.nbytes
            self._kept.update(zip(keys, found, strict=True))
        return torch.stack([self._kept[key] for key in keys])

    def logits(self, tokens: Tensor, states: Tensor | None) -> Tensor:
        """Logits [B, L, V]; states: what ``states`` returned for the tokens, on the same device."""
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
        with self._context():
            whole = self.model(input_ids=tokens, use_cache=False).logits
            parts = head(self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
        return whole.shape == parts.shape and bool(torch.allclose(whole, parts, rtol=1e-3, atol=1e-3))

    @contextmanager
    def _context(self) -> Iterator[None]:
        # No autocast cache: a CUDA graph must not keep cast copies of weights.
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False)
        with torch.no_grad(), autocast:
            yield


@contextmanager
def written_out(config: "PretrainedConfig", shape: Sequence[int], device: torch.device) -> Iterator[None]:
    """Use the deterministic math backend for attention on a GPU, if its memory allows for token ids of shape [B, L]."""
    if device.type != "cuda":
        yield
        return
    unknown = 1 << 20  # too much for any GPU
    count = getattr(config, "num_hidden_layers", 0) or unknown
    heads = getattr(config, "num_attention_heads", 0) or unknown
    weights = count * heads * shape[0] * shape[1] ** 2
    if 4 * weights > _ATTENTION * torch.cuda.get_device_properties(device).total_memory:
        yield
        return
    # 16-bit matmuls, as in fused kernels: by default the math backend uses float32, without tensor cores.
    allow = torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    allow(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        allow(before)


class KLGradient:
    """Mean KL(teacher || student) in nats over all positions of some batches; gradients accumulate in the student.

    Gradient tensors must keep their addresses between calls. half: run in bfloat16.
    """

    def __init__(self, teacher: "PreTrainedModel", student: "PreTrainedModel", half: bool) -> None:
        self.teacher, self.student, self.half = Teacher(teacher, half), student, half
        self.device = device = teacher.device
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
        # Capture needs a side stream, and warm-up on the same stream.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            # Only one shape: each graph has its own memory pool.
            if self._records and not self._graphs and self._seen[shape] > _WARM:
                self._record(shape, static, states)
            else:
                self._add(static, states)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _record(self, shape: tuple[int, ...], static: Tensor, states: Tensor | None) -> None:
        """Capture a batch as a CUDA graph and run it."""
        graph = torch.cuda.CUDAGraph()
        try:
            with without_collector(), torch.cuda.graph(graph, stream=self._stream):
                self._add(static, states)
        except RuntimeError as error:  # a model that synchronizes (reads values on the host) cannot be captured
            warnings.warn(f"learning continues without CUDA graphs, which is slower: {error}", stacklevel=2)
            self._records = False
            self._add(static, states)
            return
        self._graphs[shape] = graph, static, states
        graph.replay()


class Divergence(torch.autograd.Function):
    """Mean KL(wanted || found) of logits [T, V]; computes the gradient in forward, to keep few copies of the logits."""

    @staticmethod
    def forward(ctx: FunctionCtx, found: Tensor, wanted: Tensor) -> Tensor:
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
    def backward(ctx: FunctionCtx, outer: Tensor) -> tuple[Tensor, None]:
        """The gradient of ``found``."""
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * outer.to(gradient.dtype), None
