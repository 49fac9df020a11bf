"""vLLM's embedding and output head on anybit: of codes in the checkpoint, or a head quantized while it is loaded."""

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from anybit import ops
from anybit.codes.packing import QuantizedWeight
from anybit.codes.rtn import quantize_weight
from anybit.errors import CheckpointError, LayerError
from anybit.scheme import Scheme
from anybit.vllm import parameters
from anybit.vllm.product import Product
from anybit.vllm.warmup import WarmUp

EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings")
"""Names of the input embedding, by model."""
_ANY_TWO = 0x44444444
"""A word of 2:4 indices: the first two of each four inputs."""


class _HeadMethod(QuantizeMethodBase):  # type: ignore[misc]
    """Shared by both methods: preparing a loaded head, and its forward."""

    def __init__(self, scheme: Scheme, name: str, warmup: WarmUp) -> None:
        self.scheme, self.name, self.warmup = scheme, name, warmup
        warmup.expect()
        warmup.heads.discard(name)

    def _ready(self, layer: VocabParallelEmbedding, weight: QuantizedWeight) -> None:
        with parameters.named(f"output head {self.name}"):
            prepared = ops.prepare(weight, self.scheme.activations)
            if hasattr(layer, "anybit_product"):
                layer.anybit_product.refill(layer, prepared)
                return
        layer.anybit_product, layer.anybit_prepared = Product.of(layer, "anybit", prepared), prepared
        # vLLM compares a drafter's embedding and head with this weight: same row size, but no rows, so never equal.
        none = torch.empty(0, weight.shape[1], dtype=layer.params_dtype, device=weight.device)
        layer.register_buffer("weight", none, persistent=False)
        layer.bias = getattr(layer, "bias", None)  # an embedding has none until a model asks it as its head
        self.warmup.add(layer, [layer.anybit_product], head=True)

    def apply(self, layer: VocabParallelEmbedding, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of this rank's vocabulary shard: x [..., K] -> [..., padded shard], in x's dtype."""
        # Heads run outside CUDA graphs, where host time counts: ops.linear can bypass torch's dispatcher.
        return ops.linear(x, layer.anybit_prepared, bias)


class AnyBitHeadMethod(_HeadMethod):
    """A head that is quantized in the checkpoint; each rank keeps its rows."""

    def __init__(self, scheme: Scheme, name: str, warmup: WarmUp, group_index: bool) -> None:
        super().__init__(scheme, name, warmup)
        self.group_index = group_index

    def tie_weights(self, layer: ParallelLMHead, embed_tokens: VocabParallelEmbedding) -> ParallelLMHead:
        """Raise LayerError: vLLM loads no weights for a tied head, so its codes would all be zero."""
        raise LayerError(
            f"the folder has codes for {self.name}, but its config.json ties that head to the embedding: set "
            "tie_word_embeddings to false there, or convert the model, `anybit convert FOLDER --to anybit -o OUT`"
        )

    def create_weights(
        self, layer: VocabParallelEmbedding, input_size_per_partition: int, output_partition_sizes: list[int],
        input_size: int, output_size: int, params_dtype: torch.dtype, weight_loader: parameters.Loader,
    ) -> None:  # fmt: skip
        """Create parameters for this rank's rows of the tensors that ``QuantLinear`` documents."""
        k, fmt, tokens = input_size, self.scheme.weights, layer.org_vocab_size

        def load_zeros(param: nn.Parameter, packed: Tensor) -> None:
            name = f"{self.name}.weight_zero_point"
            weight_loader(param, parameters.unpacked_zeros(name, packed, fmt.bits, tokens))

        def load_shape(param: nn.Parameter, shape: Tensor) -> None:
            if shape.tolist() != [tokens, k]:
                raise CheckpointError(
                    f"{self.name} is {shape.tolist()} (outputs, inputs) in the checkpoint, and {[tokens, k]} in the "
                    f"model; {parameters.ANOTHER}"
                )

        for name, data in parameters.tensors_of(
            fmt, sum(output_partition_sizes), k, fmt.groups(k), params_dtype
        ).items():
            loader = load_zeros if name == "weight_zero_point" else weight_loader
            parameters.add(layer, name, data, loader, output_dim=0)
        if self.group_index:
            parameters.add(layer, "weight_g_idx", torch.zeros(k, dtype=torch.int32), weight_loader)
        parameters.add(layer, "weight_shape", torch.zeros(2, dtype=torch.int64), load_shape)
        parameters.add(layer, "weight", torch.zeros(0, dtype=torch.uint8), parameters.nothing_of(self.name))

    def process_weights_after_loading(self, layer: VocabParallelEmbedding) -> None:
        """Codes as vLLM loaded them -> a backend's layout."""
        found = {name: tensor.data for name, tensor in layer.named_parameters(recurse=False) if name != "bias"}
        if "weight_packed" not in found:
            return  # already prepared
        if "weight_indices" in found:  # rows that pad the vocabulary are zeros, which name no two of four inputs
            found["weight_indices"][(found["weight_scale"] == 0).all(1)] = _ANY_TWO
        shape = len(found["weight_packed"]), layer.embedding_dim
        weight = parameters.weight_of(self.name, found, shape, self.scheme.weights)
        for name in found:
            delattr(layer, name)
        self._ready(layer, weight)


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


class AnyBitOnlineHeadMethod(_HeadMethod, UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """A head quantized by RTN after loading, from its own float weight or from the embedding it is tied to."""

    _embedding: VocabParallelEmbedding | None = None

    def tie_weights(self, layer: ParallelLMHead, embed_tokens: VocabParallelEmbedding) -> ParallelLMHead:
        """Quantize the head from the embedding's weight; the embedding is unchanged."""
        self._embedding, method = embed_tokens, embed_tokens.quant_method
        plain = method.process_weights_after_loading

        def process(embedding: VocabParallelEmbedding) -> None:
            """The embedding's processing; if its weight was reloaded, quantizes the head again."""
            plain(embedding)
            if hasattr(layer, "anybit_product") and get_layerwise_info(layer).kernel_tensors is not None:
                self._take(layer, embedding.weight.data)

        method.process_weights_after_loading = process
        del layer.weight  # nothing is loaded into it
        return layer

    def process_weights_after_loading(self, layer: ParallelLMHead) -> None:
        """Floats -> codes -> a backend's layout."""
        if "weight" in dict(layer.named_parameters(recurse=False)):
            weight = layer.weight.data
            del layer.weight
            self._take(layer, weight)
        elif self._embedding is not None and not hasattr(layer, "anybit_product"):
            self._take(layer, self._embedding.weight.data)

    def _take(self, layer: ParallelLMHead, weight: Tensor) -> None:
        with parameters.named(f"output head {self.name}"):
            quantized = quantize_weight(weight, self.scheme.weights)
        self._ready(layer, quantized)
