"""vLLM's embedding on anybit, where the checkpoint holds its codes, and the output head that is tied to it."""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from anybit.integrations.vllm.head import AnyBitHeadMethod
from anybit.integrations.vllm.product import Product

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings")
"""What models call their input embedding."""


class AnyBitEmbeddingMethod(AnyBitHeadMethod):
    """Rows of codes; a rank keeps its part of them. A tied head multiplies by the same."""

    def create_weights(self, layer: Any, *arguments: Any, **words: Any) -> None:
        """Room for this rank's rows, as a head has it."""
        layer.bias = None
        super().create_weights(layer, *arguments, **words)

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """The rows of this rank's ids, int64 [...] -> [..., K]."""
        product: Product = layer.anybit_product
        rows: Tensor = torch.ops.anybit.rows(ids, product.weight(layer), layer.params_dtype, product.spec)
        return rows


class HeadBesideCodes(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """A head in 16 bits, or, where the model ties it to an embedding of codes, that embedding."""

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """What gives the logits."""
        coded = isinstance(embed_tokens.quant_method, AnyBitEmbeddingMethod)
        return embed_tokens if coded else super().tie_weights(layer, embed_tokens)
