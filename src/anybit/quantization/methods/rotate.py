"""Rotation (QuaRot's construction): spread outliers of the residual stream, of V and of the MLP.

With a randomized Hadamard matrix Q, every reader of the residual stream becomes ``W Q^T`` and every writer ``Q W``;
norms' gains are first folded into the readers, because RMSNorms without gains commute with rotations. V is rotated head
by head, and the output projection undoes it. Before the down projection the rotation cannot be merged: it runs online,
as ``anybit::hadamard``, and its inverse is in the weights.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from anybit.codes import hadamard
from anybit.errors import LayerError
from anybit.models.llama_block import LlamaBlock, gain_of, llama_block, llama_blocks
from anybit.models.modules import beside_text
from anybit.quantization.pipeline.lazy import LazyModel


@torch.no_grad()
def rotate(lazy: LazyModel, seed: int = 0, quantized: Collection[str] | None = None) -> list[str]:
    """Rotate a Llama-like model; it computes the same function, up to rounding.

    A tied output head is untied, because the final norm's gain is folded into it. quantized: the layers that may have
    online rotations; None is all. Returns the names of those that have, down projections, whose inputs are rotated at
    run time; forward hooks do it until the layers are replaced. Raises LayerError, before anything is changed, for an
    architecture or a width that cannot be rotated.
    """
    model = lazy.model
    parts = list(llama_blocks(model))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    final = getattr(model.base_model, "norm", None)
    if final is None or beside_text(model):
        raise LayerError(
            f"{type(model).__name__} is not a text-only model that ends in a norm, and other inputs of its residual "
            "stream would not be rotated: use smooth or smooth_rotate"
        )
    for norm in [final, *(norm for part in parts for norm in (part.attention_norm, part.feed_forward_norm))]:
        gain_of(norm)
    hidden = embedding.weight.shape[1]
    for size in (hidden, parts[0].head_dim, parts[0].down.in_features):
        hadamard.factor(size)
    if head is None or not isinstance(head, nn.Linear):
        raise LayerError(f"{type(model).__name__} has no linear output head to fold its final norm's gain into")
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
    generator = torch.Generator().manual_seed(seed)
    signs = (torch.randint(0, 2, (hidden,), generator=generator) * 2 - 1).double().to(embedding.weight.device)
    embedding.weight.data = _rotate_stream(embedding.weight.data, signs)
    _fold_gain(final, [head])
    head.weight.data = _rotate_stream(head.weight.data, signs)
    names = [f"{part.name}.mlp.down_proj" for part in parts]
    names = [name for name in names if quantized is None or name in quantized]

    def turn(name: str, block: nn.Module) -> None:
        part = llama_block(name, block)
        online = f"{name}.mlp.down_proj" in names
        _rotate_block(part, signs.to(part.down.weight.device), online)
        if online:
            part.down.register_forward_pre_hook(rotate_input)

    lazy.change(turn)
    return names


def _rotate_block(part: LlamaBlock, signs: Tensor, online: bool) -> None:
    _fold_gain(part.attention_norm, [part.query, part.key, part.value])
    _fold_gain(part.feed_forward_norm, [part.gate, part.up])
    for reader in (part.query, part.key, part.value, part.gate, part.up):
        reader.weight.data = _rotate_stream(reader.weight.data, signs)
    for writer in (part.output, part.down):
        writer.weight.data = _rotate_stream(writer.weight.data.T, signs).T.contiguous()
        if writer.bias is not None:
            writer.bias.data = _rotate_stream(writer.bias.data, signs)
    value, output, size = part.value, part.output, part.head_dim
    value.weight.data = _rotate_heads(value.weight.data.T, size).T.contiguous()
    if value.bias is not None:
        value.bias.data = _rotate_heads(value.bias.data, size)
    output.weight.data = _rotate_heads(output.weight.data, size)
    if online:
        part.down.weight.data = hadamard.transform(part.down.weight.data.double()).to(part.down.weight.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def rotate_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward pre-hook that rotates a layer's input."""
    return (hadamard.transform(args[0]), *args[1:])


def _fold_gain(norm: nn.Module, readers: list[nn.Linear]) -> None:
    """Fold a norm's gain into the layers that read it."""
    gain = gain_of(norm)
    for reader in readers:
        reader.weight.data = (reader.weight.data.double() * gain.double()).to(reader.weight.dtype)
    norm.weight.data = torch.ones_like(gain)


def _rotate_stream(rows: Tensor, signs: Tensor) -> Tensor:
    """Rotate the last dimension by the residual stream's Q."""
    return hadamard.transform(rows.double() * signs).to(rows.dtype)


def _rotate_heads(rows: Tensor, size: int) -> Tensor:
    """Rotate each head's part of the last dimension."""
    return hadamard.transform(rows.double().reshape(*rows.shape[:-1], -1, size)).reshape(rows.shape).to(rows.dtype)
