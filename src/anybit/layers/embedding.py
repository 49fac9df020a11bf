"""QuantEmbedding: an embedding whose table is a QuantizedWeight, and TiedHead, the output head that shares it."""

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from anybit import ops
from anybit.codes.packing import QuantizedWeight
from anybit.errors import LayerError, dtype_name
from anybit.layers.linear import QuantLinear
from anybit.scheme import Scheme


def embedding_refused(scheme: Scheme) -> str | None:
    """Why an embedding cannot use a scheme, in a sentence; None if it can."""
    if scheme.activations.quantized:
        return (
            f"an embedding multiplies no activations that {scheme} could quantize: name 16-bit ones, for example w8a16"
        )
    if scheme.weights.sparse:
        return "an embedding is not pruned: leave out s24"
    return None


class QuantEmbedding(QuantLinear):
    """An embedding table in ``scheme``: ids int [...] -> [..., embedding_dim] in the dtype of its scales.

    It is stored as a QuantLinear with ``num_embeddings`` outputs, so that a tied output head (``TiedHead``) multiplies
    by the same codes. On a GPU rows are dequantized straight from the GEMM's layout.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        scheme: Scheme | str,
        *,
        padding_idx: int | None = None,
        group_index: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
    ) -> None:
        if refused := embedding_refused(Scheme.parse(scheme)):
            raise LayerError(refused)
        super().__init__(
            embedding_dim, num_embeddings, scheme, False, group_index=group_index, dtype=dtype, device=device,
            backend=backend,
        )  # fmt: skip
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx

    @classmethod
    def of_weight(
        cls, weight: QuantizedWeight, scheme: Scheme | str, padding_idx: int | None = None, backend: str | None = None
    ) -> "QuantEmbedding":
        """An embedding that holds a quantized weight [num_embeddings, embedding_dim], on the weight's device.

        Raises LayerError for a scheme with another weight format, or one that no embedding supports.
        """
        ordered = weight.group_index is not None
        layer = cls(*weight.shape, scheme, padding_idx=padding_idx, group_index=ordered, device="meta", backend=backend)
        layer.load_weight(weight)
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids, int32 or int64 [...] -> [..., embedding_dim], in the dtype of the scales.

        Raises LayerError for other ids. An id out of range raises IndexError on a CPU and yields NaN on a GPU.
        """
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            kind = dtype_name(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
            raise LayerError(f"ids must be a torch.Tensor of int32 or int64, not {kind}")
        if self._prepared is None:
            self.prepare()
        assert self._prepared is not None
        return ops.rows(ids.long(), self._prepared, self._dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply by the table, as a tied head does: x float [..., embedding_dim] -> [..., num_embeddings]."""
        return super().forward(x)

    def dequantized(self, dtype: torch.dtype) -> nn.Embedding:
        """A plain nn.Embedding with the dequantized table."""
        weight = nn.Parameter(self.effective_weight().to(dtype), requires_grad=False)
        n, k = weight.shape
        return nn.Embedding(n, k, self.padding_idx, _weight=weight, _freeze=True)

    def extra_repr(self) -> str:
        """What a printed model shows."""
        return f"{self.num_embeddings}, {self.embedding_dim}, scheme={self.scheme}"


class TiedHead(nn.Module):
    """An output head that multiplies by the codes of an embedding: y = x W^T + bias. It stores only the bias."""

    def __init__(self, embedding: QuantEmbedding, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self._embedding = (embedding,)  # a tuple: not registered as a child twice
        self.bias = bias
        self.in_features, self.out_features = embedding.in_features, embedding.out_features

    @property
    def weight(self) -> Tensor:
        """The dequantized weight [N, K], recomputed at every access, and only to be read."""
        return self._embedding[0].weight

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            setattr(self._embedding[0], name, value)  # raises
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the head: x float [..., K] -> [..., N]."""
        y = self._embedding[0].multiply(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dequantized(self, embedding: nn.Embedding) -> nn.Linear:
        """A plain nn.Linear tied to a plain embedding."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=False)
        linear.weight, linear.bias = embedding.weight, self.bias  # type: ignore[assignment]
        return linear

    def extra_repr(self) -> str:
        """What a printed model shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, tied to an embedding"


def put_embedding(model: Any, name: str, embedding: QuantEmbedding, heads: Collection[str]) -> None:
    """Replace a model's embedding, and the output heads tied to it by TiedHeads, which ``tie_weights`` leaves alone."""
    model.set_submodule(name, embedding)
    for head in heads:
        model.set_submodule(head, TiedHead(embedding, model.get_submodule(head).bias))
        model.all_tied_weights_keys.pop(f"{head}.weight", None)
    for name, part in model.named_modules():
        own = [f"{head}.weight".removeprefix(f"{name}." if name else "") for head in heads]
        if ties := getattr(part, "_tied_weights_keys", None):
            gone = {key for key in ties if any(re.fullmatch(key, weight) for weight in own)}
            part._tied_weights_keys = {key: source for key, source in ties.items() if key not in gone}
