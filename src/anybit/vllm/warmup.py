"""Compile a model's kernels once all its layers are loaded, before the first request."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from anybit.ops.compile_ahead import CompiledAhead, ExpertsKind, Kernel, LayerKind, compile_ahead, make_ready
from anybit.vllm.product import Product
from anybit.vllm.rotary import Heads

_logger = logging.getLogger("vllm.anybit")
_TOKENS = 8192
_SEQUENCES = 1024
"""Most tokens and most sequences of a step, if there is no engine configuration."""


def get_ready(kernels: Iterable[Kernel], device: torch.device, of: str) -> None:
    """Compile kernels now, each once, and log it. of: what the kernels run, for the log line."""
    _tell(make_ready(list(dict.fromkeys(kernels)), device), of)


def _tell(done: CompiledAhead, of: str) -> None:
    for reason in done.refused:
        _logger.warning("anybit: a kernel for %s will be compiled at its first launch instead: %s", of, reason)
    _logger.info(
        "anybit: %d kernels for %s ready after %.1f s; %d compiled in %.1f s, the rest from the cache",
        done.kernels, of, done.seconds, done.compiled, done.compile_seconds,
    )  # fmt: skip


class WarmUp:
    """Counts a model's layers as they are loaded, and compiles their kernels after the last one.

    heads: output heads to quantize that vLLM has not built yet.  adapters: whether LoRA may add to outputs.
    joined: for the log, what layers may do together -> whether each of those does.
    """

    def __init__(self, heads: set[str] | None = None) -> None:
        self.heads = heads or set()
        self._expected = self._ready = 0
        self._kinds: dict[LayerKind | ExpertsKind, list[Tensor]] = {}
        self._tokens, self._sequences = _TOKENS, _SEQUENCES
        self.adapters = False
        self.joined: defaultdict[str, list[bool]] = defaultdict(list)

    def expect(self) -> None:
        """Count a layer that is being built."""
        self._expected += 1
        config = get_current_vllm_config_or_none()
        if config is not None:
            self._tokens = config.scheduler_config.max_num_batched_tokens or _TOKENS
            self._sequences = config.scheduler_config.max_num_seqs or _SEQUENCES
            self.adapters = config.lora_config is not None

    def add(
        self, layer: LinearBase | VocabParallelEmbedding, products: list[Product], heads: Heads | None = None,
        paired: bool = False, head: bool = False,
    ) -> None:  # fmt: skip
        """Count a loaded layer; after the last one, compile the kernels of all.

        heads: of a qkv_proj that RoPE follows.  paired: the outputs of a gate_up_proj are interleaved.  head: the layer
        is an output head, which sees only about one token per sequence.
        """
        turned = None if heads is None else (heads.query, heads.key, heads.dim, heads.paired)
        most = min(self._sequences, self._tokens) if head else None
        for product in products:
            tensors = product.weight(layer)
            if tensors[0].is_cuda:
                bias = layer.bias is not None
                kind = LayerKind(product.spec, layer.params_dtype, bias, product.hadamard, turned, most, paired)
                self._kinds.setdefault(kind, tensors)
        self._count()

    def add_experts(self, kinds: Mapping[ExpertsKind, list[Tensor]]) -> None:
        """Count a layer's loaded experts as ``add`` does. kinds: of their ops, with the tensors of gate_up."""
        for kind, tensors in kinds.items():
            if tensors[0].is_cuda:
                self._kinds.setdefault(kind, tensors)
        self._count()

    def _count(self) -> None:
        self._ready += 1
        if self._ready != self._expected:
            return
        for name in sorted(self.heads):
            _logger.warning(
                "anybit: %s is not quantized: vLLM did not build this layer, since the model uses its embedding as "
                "the head, or another pipeline rank has it",
                name,
            )
        if self.joined:
            found = (f"{sum(each)} of {len(each)} {what}" for what, each in self.joined.items())
            _logger.info("anybit: %s", "; ".join(found))
        if self._kinds:
            of = f"{len(self._kinds)} kinds of layers for up to {self._tokens} tokens"
            _tell(compile_ahead(self._kinds, self._tokens), of)
            self._kinds = {}
