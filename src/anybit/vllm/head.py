"""vLLM's output head on anybit: quantized in the checkpoint, or while a model is loaded (``lm_head=w8a16``)."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.utils import set_weight_attrs

from anybit import ops
from anybit.checkpoints.verify import check_values
from anybit.codes.packing import QuantizedWeight, words_per_row
from anybit.codes.rtn import quantize_weight
from anybit.errors import AnyBitError, CheckpointError, LayerError
from anybit.scheme import Scheme
from anybit.vllm.parameters import ANOTHER, empty, nothing_of, unpacked_zeros
from anybit.vllm.product import Product
from anybit.vllm.warmup import Ledger

_OPTIONAL = ("weight_zero_point", "weight_g_idx", "weight_indices", "weight_minimum")
"""Optional tensors of a stored head, in the order of QuantizedWeight's fields."""
_ANY_TWO = 0x44444444
"""A word of 2:4 indices: the first two of each four inputs."""


class _HeadMethod(QuantizeMethodBase):  # type: ignore[misc]
    """Shared by both methods: preparing a loaded head, and its forward."""

    def __init__(self, scheme: Scheme, name: str, ledger: Ledger) -> None:
        self.scheme, self.name, self.ledger = scheme, name, ledger
        ledger.expect()
        ledger.heads.discard(name)

    def _ready(self, layer: Any, weight: QuantizedWeight) -> None:
        try:
            prepared = ops.prepare(weight, self.scheme.activations)
        except AnyBitError as error:
            raise type(error)(f"output head {self.name}: {error}") from None
        if hasattr(layer, "anybit_product"):
            try:
                layer.anybit_product.refill(layer, prepared)
            except LayerError as error:
                raise LayerError(f"output head {self.name}: {error}") from None
            return
        layer.anybit_product, layer.anybit_prepared = Product.of(layer, "anybit", prepared), prepared
        # vLLM compares a drafter's embedding and head with this weight: same row size, but no rows, so never equal.
        none = torch.empty(0, weight.shape[1], dtype=layer.params_dtype, device=weight.device)
        layer.register_buffer("weight", none, persistent=False)
        self.ledger.add_head(layer, prepared)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of this rank's vocabulary shard: x [..., K] -> [..., padded shard], in x's dtype."""
        # Heads run outside CUDA graphs, where host time counts: ops.linear can bypass torch's dispatcher.
        return ops.linear(x, layer.anybit_prepared, bias)


class AnyBitHeadMethod(_HeadMethod):
    """A head that is quantized in the checkpoint; each rank keeps its rows."""

    def __init__(self, scheme: Scheme, name: str, ledger: Ledger, group_index: bool) -> None:
        super().__init__(scheme, name, ledger)
        self.group_index = group_index

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Raise LayerError: vLLM loads no weights for a tied head, so its codes would all be zero."""
        raise LayerError(
            f"the folder has codes for {self.name}, but its config.json ties that head to the embedding: set "
            "tie_word_embeddings to false there, or convert the model, `anybit convert FOLDER --to anybit -o OUT`"
        )

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Create parameters for this rank's rows of the tensors that ``QuantLinear`` documents."""
        n, k, fmt = sum(output_partition_sizes), input_size, self.scheme.weights
        groups, kept, load = fmt.groups(k), k // 2 if fmt.sparse else k, extra["weight_loader"]

        def load_zeros(param: nn.Parameter, packed: Tensor) -> None:
            name = f"{self.name}.weight_zero_point"
            load(param, unpacked_zeros(name, packed, fmt.bits, layer.org_vocab_size))

        def load_shape(param: nn.Parameter, shape: Tensor) -> None:
            if shape.tolist() != [layer.org_vocab_size, k]:
                raise CheckpointError(
                    f"{self.name} is {shape.tolist()} (outputs, inputs) in the checkpoint, and "
                    f"{[layer.org_vocab_size, k]} in the model; {ANOTHER}"
                )

        def add(name: str, data: Tensor, loader: Any = load, by_rows: bool = False) -> None:
            parameter = nn.Parameter(data, requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": loader} | ({"output_dim": 0} if by_rows else {}))
            layer.register_parameter(name, parameter)

        add("weight_packed", empty(n, words_per_row(kept, fmt.bits), dtype=torch.int32), by_rows=True)
        add("weight_scale", empty(n, groups, dtype=params_dtype), by_rows=True)
        if fmt.code == "min":
            add("weight_minimum", empty(n, groups, dtype=params_dtype), by_rows=True)
        if fmt.sparse:
            add("weight_indices", empty(n, words_per_row(kept, 2), dtype=torch.int32), by_rows=True)
        if fmt.code == "asym":
            add("weight_zero_point", empty(n, groups, dtype=torch.uint8), load_zeros, by_rows=True)
        if self.group_index:
            add("weight_g_idx", empty(k, dtype=torch.int32))
        add("weight_shape", empty(2, dtype=torch.int64), load_shape)
        add("weight", empty(0, dtype=torch.uint8), nothing_of(self.name))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Codes as vLLM loaded them -> a backend's layout."""
        if "weight_packed" not in dict(layer.named_parameters(recurse=False)):
            return  # already prepared
        found = {name: parameter.data for name, parameter in layer.named_parameters(recurse=False) if name != "bias"}
        words, scale, indices = found["weight_packed"], found["weight_scale"], found.get("weight_indices")
        if indices is not None:  # rows that pad the vocabulary are zeros, which name no two of four inputs
            indices[(scale == 0).all(1)] = _ANY_TWO
        check_values(self.name, {**found, "weight_shape": torch.tensor([len(words), layer.embedding_dim])})
        optional = [found.get(name) for name in _OPTIONAL]
        shape = (len(words), layer.embedding_dim)
        weight = QuantizedWeight(words, scale, optional[0], shape, self.scheme.weights, *optional[1:])
        for name in found:
            delattr(layer, name)
        self._ready(layer, weight)


class AnyBitOnlineHeadMethod(_HeadMethod, UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """A head quantized by RTN after loading, from its own float weight or from the embedding it is tied to."""

    _embedding: Any = None

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Quantize the head from the embedding's weight; the embedding is unchanged."""
        self._embedding, method = embed_tokens, embed_tokens.quant_method
        plain = method.process_weights_after_loading

        def process(embedding: Any) -> None:
            """The embedding's processing; if its weight was reloaded, quantizes the head again."""
            plain(embedding)
            if hasattr(layer, "anybit_product") and get_layerwise_info(layer).kernel_tensors is not None:
                self._take(layer, embedding.weight.data)

        method.process_weights_after_loading = process
        del layer.weight  # nothing is loaded into it
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        """Floats -> codes -> a backend's layout."""
        if "weight" in dict(layer.named_parameters(recurse=False)):
            weight = layer.weight.data
            del layer.weight
            self._take(layer, weight)
        elif self._embedding is not None and not hasattr(layer, "anybit_product"):
            self._take(layer, self._embedding.weight.data)

    def _take(self, layer: Any, weight: Tensor) -> None:
        try:
            quantized = quantize_weight(weight, self.scheme.weights)
        except AnyBitError as error:
            raise type(error)(f"output head {self.name}: {error}") from None
        self._ready(layer, quantized)
