"""Methods of transformers models that know only parameters and nn.Embedding, for models with quantized layers."""

import contextlib
import functools
from collections.abc import Mapping

from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from anybit.errors import LayerError
from anybit.layers.embedding import QuantEmbedding, TiedHead
from anybit.layers.linear import QuantLinear


def take_over(model: nn.Module) -> None:
    """Replace those methods of a model until ``dequantize``.

    The new ones are partials that do not hold the model: copies and pickles keep them, and no model holds itself.
    """
    model.get_memory_footprint = functools.partial(_memory, model._modules)  # type: ignore[assignment, arg-type]
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        with contextlib.suppress(NotImplementedError):  # such as an encoder of images
            embedding, head = part.get_input_embeddings(), part.get_output_embeddings()
            if any(isinstance(module, QuantLinear | TiedHead) for module in (embedding, head)):
                part.resize_token_embeddings = functools.partial(_resize, embedding)
            if isinstance(head, TiedHead):
                part.set_input_embeddings = _refuse_embedding


def give_back(model: nn.Module) -> None:
    """Undo ``take_over``, and ``put_embedding``'s changes to ties."""
    for module in model.modules():
        for name in ("get_memory_footprint", "resize_token_embeddings", "set_input_embeddings", "_tied_weights_keys"):
            module.__dict__.pop(name, None)


def _memory(parts: Mapping[str, nn.Module], return_buffers: bool = True) -> int:
    """Bytes of a model's parameters, its buffers, and its prepared weights."""
    modules = {module for part in parts.values() for module in part.modules()}
    own: set[Tensor] = set()
    for module in modules:
        own.update(module.parameters(recurse=False), module.buffers(recurse=False) if return_buffers else ())
        own.update(module._prepared.tensors if isinstance(module, QuantLinear) and module._prepared else ())
    return sum(tensor.nbytes for tensor in own)


def _resize(
    embedding: nn.Embedding | QuantEmbedding,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    *_: object,
    **__: object,
) -> nn.Module:
    """``resize_token_embeddings`` of a model whose embedding or head is quantized: to its own size only."""
    tokens = embedding.num_embeddings
    wanted = tokens if new_num_tokens is None else new_num_tokens
    wanted += -wanted % (pad_to_multiple_of or 1)
    if wanted != tokens:
        raise LayerError(
            f"the model's embedding or output head is quantized, and cannot be resized from {tokens} to {wanted} "
            "tokens: resize the unquantized model, then quantize it; or call model.dequantize() first"
        )
    return embedding


def _refuse_embedding(value: nn.Module) -> None:
    raise LayerError(
        "the output head multiplies by the codes of the quantized embedding, and would not use another one: call "
        "model.dequantize() first"
    )
