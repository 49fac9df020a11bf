"""Behind ``anybit info MODEL --scheme S``: what a model would take in memory, by its config.json alone."""

from bisect import bisect_right
from typing import Any

from anybit.checkpoints.configuration import refuse_quantized
from anybit.checkpoints.folder import read_json
from anybit.checkpoints.source import config_folder
from anybit.cli.common import output, print_table, status
from anybit.models.modules import kept_modules, linear_layers, positions_of, skeleton
from anybit.quantization.pipeline.allocate import cache_bytes, stored_bytes
from anybit.scheme import Scheme

_GPUS = (24, 48, 80)
_USABLE = 0.9
"""The part of a GPU's memory (GiB) for weights and cache; the rest is for activations and CUDA's own."""


def needs(model: str, schemes: list[Scheme], context: int, trust_remote_code: bool) -> list[dict[str, Any]]:
    """What a model takes in 16 bits and in every scheme: bytes of weights, and of a KV cache of ``context`` tokens.

    scheme: None for 16 bits.  tokens: of cache that fit beside the weights, by GPU memory in GiB, at most a model's
    positions; 0 where it does not fit.
    """
    with status(f"Reading {model}"):
        folder = config_folder(model, trust_remote_code)
        refuse_quantized(read_json(folder / "config.json"), model)
        empty = skeleton(folder, trust_remote_code)
        layers = linear_layers(empty, kept_modules(empty, None))
    whole = 2 * sum(parameter.numel() for parameter in empty.parameters())
    quantized = 2 * sum(layer.n * layer.k for layer in layers)
    found = []
    for scheme in (None, *schemes):
        kv = None if scheme is None else scheme.kv
        weights = whole
        if scheme is not None:
            weights += sum(stored_bytes(layer.n, layer.k, scheme.weights) for layer in layers) - quantized
        cache = cache_bytes(empty.config, kv, context)
        most = positions_of(empty.config) or 1 << 20
        fitting = {}
        for gib in _GPUS:
            room = _USABLE * gib * 2**30 - weights
            # A window's layers make the cache less than proportional to its tokens.
            beyond = bisect_right(range(1, most + 1), room, key=lambda tokens: cache_bytes(empty.config, kv, tokens))
            fitting[str(gib)] = beyond
        name = None if scheme is None else str(scheme)
        found.append({"scheme": name, "weight_bytes": weights, "cache_bytes": cache, "tokens": fitting})
    return found


def show(found: list[dict[str, Any]], context: int) -> None:
    """Print what a model takes as a table."""
    head = ["scheme", "weights", f"{context:,} tokens", *(f"{gib} GB" for gib in _GPUS)]
    rows = [
        [
            need["scheme"] or "16 bits", f"{need['weight_bytes'] / 1e9:.1f} GB",
            f"{need['cache_bytes'] / 1e9:.2f} GB",
            *(f"{tokens:,}" if tokens else "-" for tokens in need["tokens"].values()),
        ]
        for need in found
    ]  # fmt: skip
    print_table([head, *rows])
    output.print(
        "\nThe third column is the KV cache of so many tokens, the last three the longest\n"
        "context, up to the model's own, that fits beside the weights with a tenth of the\n"
        "GPU's memory kept free; - where the weights alone do not fit."
    )
