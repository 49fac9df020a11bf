"""vLLM's embedding on anybit, if the checkpoint has codes for it, and an output head tied to it."""

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from anybit.vllm.head import AnyBitHeadMethod
from anybit.vllm.product import Product

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings")
"""Names of the input embedding, by model."""


class AnyBitEmbeddingMethod(AnyBitHeadMethod):
    """A quantized embedding; each rank keeps its shard of the rows. A tied head shares its codes."""

    def embedding(self, layer: VocabParallelEmbedding, ids: Tensor) -> Tensor:
        """The rows of this rank's ids, int64 [...] -> [..., K]."""
        product: Product = layer.anybit_product
        rows: Tensor = torch.ops.anybit.rows(ids, product.weight(layer), layer.params_dtype, product.spec)
        return rows


class HeadBesideCodes(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """A head in 16 bits, or the quantized embedding that the model ties it to."""

    def tie_weights(self, layer: ParallelLMHead, embed_tokens: VocabParallelEmbedding) -> VocabParallelEmbedding:
        """The layer that computes the logits."""
        coded = isinstance(embed_tokens.quant_method, AnyBitEmbeddingMethod)
        return embed_tokens if coded else super().tie_weights(layer, embed_tokens)
