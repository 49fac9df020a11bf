"""The moment when a model's layers are all ready: their kernels are compiled then, and not in a request."""

import logging
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none

from anybit.integrations.vllm.rotary import Heads
from anybit.ops import Prepared
from anybit.ops.compile_ahead import CompiledAhead, LayerKind, compile_ahead, make_ready

_logger = logging.getLogger("vllm.anybit")
_TOKENS = 8192
_SEQUENCES = 1024
"""The most tokens of a step, and sequences of one, where no engine says it."""


def get_ready(kernels: list[Any], device: torch.device, of: str) -> None:
    """Compile kernels now, and say so. of: what they are kernels of."""
    _tell(make_ready(kernels, device), of)


def _tell(done: CompiledAhead, of: str) -> None:
    for reason in done.refused:
        _logger.warning("anybit: a kernel of %s is left to be compiled at its first launch: %s", of, reason)
    _logger.info(
        "anybit: %d kernels of %s are ready after %.1f s; %d compiled in %.1f s, the rest from the cache",
        done.kernels, of, done.seconds, done.compiled, done.compile_seconds,
    )  # fmt: skip


class Ledger:
    """The layers of a model that are to become ready, and those that are. adapters: LoRA may be added to outputs.

    heads: output heads that are to be quantized and that vLLM has not built.
    """

    def __init__(self, heads: set[str] | None = None) -> None:
        self.heads = heads or set()
        self._expected = self._ready = 0
        self._kinds: dict[LayerKind, list[Tensor]] = {}
        self._tokens, self._sequences = _TOKENS, _SEQUENCES
        self.adapters = False

    def expect(self) -> None:
        """One more layer is being built."""
        self._expected += 1
        config = get_current_vllm_config_or_none()
        if config is not None:
            self._tokens = config.scheduler_config.max_num_batched_tokens or _TOKENS
            self._sequences = config.scheduler_config.max_num_seqs or _SEQUENCES
            self.adapters = config.lora_config is not None

    def add(self, layer: Any, products: list[Any], heads: Heads | None = None, paired: bool = False) -> None:
        """A layer is ready; with the last one, the kernels of all are compiled.

        heads: a qkv_proj's, to be turned. paired: a gate_up_proj's outputs are in turn.
        """
        turned = None if heads is None else (heads.query, heads.key, heads.dim, heads.paired)
        for product in products:
            bias = layer.bias is not None
            kind = LayerKind(product.spec, layer.params_dtype, bias, product.hadamard, turned, paired=paired)
            self._note(kind, [getattr(layer, name) for name in product.tensors])
        self._count()

    def add_head(self, layer: Any, prepared: Prepared) -> None:
        """The same for an output head, which is multiplied with a token or so of each sequence."""
        most = min(self._sequences, self._tokens)
        self._note(
            LayerKind(prepared.spec_text, layer.params_dtype, layer.bias is not None, most=most), prepared.tensors
        )
        self._count()

    def _note(self, kind: LayerKind, tensors: list[Tensor]) -> None:
        if tensors[0].is_cuda:
            self._kinds.setdefault(kind, tensors)

    def _count(self) -> None:
        self._ready += 1
        if self._ready != self._expected:
            return
        for head in sorted(self.heads):
            _logger.warning(
                "anybit: %s is not quantized: vLLM builds no such layer here, since the model multiplies with its "
                "embedding, or another pipeline rank has it",
                head,
            )
        if self._kinds:
            of = f"{len(self._kinds)} kinds of layers for up to {self._tokens} tokens"
            _tell(compile_ahead(self._kinds, self._tokens), of)
            self._kinds = {}
