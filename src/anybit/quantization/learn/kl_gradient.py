"""The gradient of KL(teacher || student), accumulated over the batches of a step.

A step of a small model is thousands of short kernels: on a GPU, the first batch shape that recurs is captured as a CUDA
graph and replayed.

Gradients are repeatable if asked: fused attention kernels accumulate query gradients in no fixed order, so attention
uses the math backend wherever the GPU has memory for the attention weights. Else blocks are compiled, too: 57 ms
instead of 141 for 16384 tokens of SmolLM2-135M on an H200.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from anybit.errors import one_line
from anybit.ops.capture import without_collector
from anybit.quantization.learn.fuse import Fuse, can_capture, compile_blocks, fused, unfused

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Rows of logits per softmax.
_ROWS_AT_ONCE = 2048
# Batches of a shape to run before capture, so that allocations and algorithm choices settle.
_WARM = 2
# Share of a GPU's memory for one copy of all layers' attention weights under the math backend, which needs about three.
# Of total memory, not of free memory, so that every run decides alike.
_ATTENTION = 1 / 8


def fast_in_half(device: torch.device | str) -> bool:
    """Whether bfloat16 is fast: on GPUs, and on CPUs with instructions for it; on others it is ten times slower."""
    return torch.device(device).type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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

    Gradient tensors must keep their addresses between calls. most: tokens of a pass.  half: run in bfloat16.
    fuse: compiles the divergence, and the student's blocks unless gradients have to be repeatable.
    """

    def __init__(
        self,
        teacher: "PreTrainedModel",
        student: "PreTrainedModel",
        most: int,
        half: bool,
        fuse: Fuse = unfused,
        repeatable: bool = True,
    ) -> None:
        self.teacher, self.student, self.most, self.half = teacher, student, most, half
        self.device = device = teacher.device
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._repeatable, self._records = repeatable, can_capture(student)
        if fuse is fused and not repeatable and self._records:
            compile_blocks(student)
            compile_blocks(teacher)
        self._divergence, self._rows = fuse(_divergence), None if fuse is fused else _ROWS_AT_ONCE
        self._loss = torch.zeros((), device=device)
        self._share = torch.ones((), device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: Sequence[Tensor]) -> tuple[float, int]:
        """Run token ids int64 [B, L] each, in one step; returns the loss over all of them, and how many they are."""
        total = sum(tokens.numel() for tokens in batches)
        self._loss.zero_()
        for tokens in (part for batch in batches for part in batch.split(max(self.most // batch.shape[1], 1))):
            self._share.fill_(tokens.numel() / total)
            if self._stream is None:
                self._add(tokens)
            elif self._repeatable:
                with written_out(self.student.config, tokens.shape, self.device):
                    self._on_gpu(tokens)
            else:
                self._on_gpu(tokens)
        return float(self._loss), total

    def _add(self, tokens: Tensor) -> None:
        # No autocast cache: a CUDA graph must not keep cast copies of weights.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            with torch.no_grad():
                wanted = self.teacher(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
            found = self.student(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
        # The gradient of the logits at once, part by part: few copies of them fit.
        rows = self._rows or len(found)
        ours, gradient = found.detach(), torch.empty_like(found)
        for start in range(0, len(found), rows):
            part = slice(start, start + rows)
            self._loss.add_(self._divergence(ours[part], wanted[part], self._share / len(found), gradient[part]))
        found.backward(gradient)

    def _on_gpu(self, tokens: Tensor) -> None:
        assert self._stream is not None
        shape = tuple(tokens.shape)
        self._seen[shape] += 1
        if shape in self._graphs:
            graph, static = self._graphs[shape]
            static.copy_(tokens)
            graph.replay()
            return
        static = tokens.to(self.device)
        # Capture needs a side stream, and warm-up on the same stream.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            # Only one shape: each graph has its own memory pool.
            if self._records and not self._graphs and self._seen[shape] > _WARM:
                self._record(shape, static)
            else:
                self._add(static)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _record(self, shape: tuple[int, ...], static: Tensor) -> None:
        """Capture a batch as a CUDA graph and run it."""
        graph = torch.cuda.CUDAGraph()
        try:
            with without_collector(), torch.cuda.graph(graph, stream=self._stream):
                self._add(static)
        except RuntimeError as error:  # a model that synchronizes (reads values on the host) cannot be captured
            warnings.warn(f"learning continues without CUDA graphs, which is slower: {one_line(error)}", stacklevel=2)
            self._records = False
            self._add(static)
            return
        self._graphs[shape] = graph, static
        graph.replay()


def _divergence(found: Tensor, wanted: Tensor, share: Tensor, gradient: Tensor) -> Tensor:
    """KL(wanted || found) of logits [T, V], summed and times a share, float32 []; writes the gradient of ``found``."""
    ours = found.log_softmax(-1, dtype=torch.float32)
    theirs = wanted.log_softmax(-1, dtype=torch.float32)
    total = nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True)
    gradient.copy_(ours.exp_().sub_(theirs.exp_()).mul_(share))
    return total * share
