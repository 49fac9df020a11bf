"""What a quantized KV cache costs in accuracy: perplexity.

    python benchmarks/accuracy_kv.py --model FOLDER --text FILE

Weights (SmolLM2-135M-Instruct) stay in 16 bits, so only the cache differs. Rows go to
benchmarks/results/<gpu>/kv_accuracy.json, which the tables of docs/accuracy.md show.

In windows of 2048 tokens every token sees what it would see during generation: full 128-token windows quantized, its
own window in 16 bits. This attention over all tokens at once is checked against a real AnyBitCache fed piece by piece.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anybit import AnyBitCache
from anybit.cache.kvcache import hadamard
from anybit.hf import evaluate
from anybit.hf.loading import load_model
from anybit.kernels.attention import kv_page
from anybit.kernels.attention.kv_page import PageLayout
from anybit.scheme import KVFormat
from timing import RESULTS, merge_rows, stamp

FORMATS = (
    "kv16", "kv8", "kv8t", "kv4", "kv4t", "kv4rot", "kv4trot", "kv2", "kv2t", "kv2rot", "kv2trot", "kv4g32", "kv2g32",
    "kv2g32t", "kv2g32rot", "kv2g32trot", "k4v2", "k2v4", "k4v2g32", "k2v4g32", "k8v4", "k4v8", "k16v4",
    "k4v16", "k16v2", "k2v16",
)  # fmt: skip
PIECE = 128


class Rows:
    """Writes each row as soon as it is measured."""

    def __init__(self, name: str, path: Path) -> None:
        self.model, self.path = name, path

    def add(self, case: str, kv: str, context: int, dim: int, **fields: object) -> None:
        """One row of kv_accuracy.json."""
        bits = PageLayout(KVFormat.parse(kv), dim, 128).bits_per_element
        row = {"case": case, "model": self.model, "kv": kv, "context": context, "bits": round(bits, 3), **fields}
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        merge_rows(self.path, [{**row, **stamp()}], ("case", "model", "kv", "context"))


def attention_on(model: PreTrainedModel, name: str) -> None:
    """Select the model's attention implementation."""
    model.config._attn_implementation = name


class Simulated:
    """Attention over a whole window at once in which every token sees what it would see during generation."""

    def __init__(self, kv: str) -> None:
        self.format = KVFormat.parse(kv)

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize and dequantize keys and values [heads, tokens, dim] in float32."""
        k, v = (x if x.dtype == torch.bfloat16 else x.half() for x in (k, v))
        rotation = hadamard(k.shape[-1], k.dtype, k.device) if self.format.rotate else None
        both = (k, v) if rotation is None else (k @ rotation, v @ rotation)
        keys_by = -3 if self.format.key_axis == "channel" else -1
        found = [
            self._rounded(x, bits, dim)
            for x, bits, dim in zip(both, (self.format.key_bits, self.format.value_bits), (keys_by, -1), strict=True)
        ]
        if rotation is not None:
            found = [x @ rotation.float() for x in found]
        return found[0], found[1]

    def _rounded(self, x: Tensor, bits: int, dim: int) -> Tensor:
        """Dequantized x [heads, tokens, dim]; groups along tokens (dim -3) or along channels (-1)."""
        if bits == 16:
            return x.float()
        group = min(self.format.group, x.shape[-1] if dim == -1 else PIECE)
        runs = x.unflatten(-1, (-1, group)) if dim == -1 else x.unflatten(-2, (-1, group))[..., None]
        codes, scale, zero = kv_page.quantize(runs, bits, dim)
        return (codes.float() * scale.float() + zero.float()).reshape(x.shape)

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float,
        **_: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attention [1, heads, tokens, dim] for transformers."""
        q, k, v = query[0].float(), key[0], value[0]
        kept_k, kept_v = self.stored(k, v)
        groups = q.shape[0] // k.shape[0]
        k, v, kept_k, kept_v = (x.float().repeat_interleave(groups, 0) for x in (k, v, kept_k, kept_v))
        at = torch.arange(q.shape[1], device=q.device)
        own = at[:, None] // PIECE == at[None] // PIECE
        logits = torch.where(own, q @ k.transpose(1, 2), q @ kept_k.transpose(1, 2)) * scaling
        weights = logits.masked_fill(at[None] > at[:, None], -torch.inf).softmax(-1)
        out = (weights * own) @ v + (weights * ~own) @ kept_v
        return out.transpose(0, 1)[None].to(query.dtype), None


def simulate(model: PreTrainedModel, kv: str) -> None:
    """Make a model attend as over a quantized cache."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("simulated", Simulated(kv))
    AttentionMaskInterface.register("simulated", lambda *_, **__: None)
    attention_on(model, "simulated")


@torch.inference_mode()
def difference(model: PreTrainedModel, window: Tensor, kv: str) -> float:
    """Relative error of a window's simulated logits against those over a real AnyBitCache fed piece by piece."""
    window = window.to(model.device)
    simulate(model, kv)
    got = model(window[None], use_cache=False).logits.float()
    attention_on(model, "anybit")
    cache = AnyBitCache(kv, config=model.config, capacity=len(window))
    pieces = [model(piece[None], past_key_values=cache).logits.float() for piece in window.split(PIECE)]
    attention_on(model, "sdpa")
    wanted = torch.cat(pieces, 1)
    return float((got - wanted).norm() / wanted.norm())


def perplexity_rows(model: PreTrainedModel, ids: list[int], rows: Rows, count: int, formats: tuple[str, ...]) -> None:
    """Perplexity in every format, and of the model without a cache."""
    windows = evaluate.windows_of(ids, 2048, min(count, len(ids) // 2048))
    attention_on(model, "sdpa")
    plain = evaluate.perplexity(model, windows).perplexity
    for kv in formats:
        apart = difference(model, windows[0, : 4 * PIECE], kv)
        assert apart < 0.25, (kv, apart)  # a flipped code moves 2-bit logits a little; a wrong format, all of them
        simulate(model, kv)
        value = evaluate.perplexity(model, windows).perplexity
        attention_on(model, "sdpa")
        rows.add(
            "perplexity", kv, 2048, model.config.head_dim, perplexity=round(value, 4), plain=round(plain, 4),
            windows=len(windows),
            apart=float(f"{apart:.2e}"), checked=True, check="logits beside an AnyBitCache",
        )  # fmt: skip
        assert kv != "kv16" or abs(value / plain - 1) < 5e-3, (value, plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "kv_accuracy.json")
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, dtype=torch.float16)
    model, text = loaded.model, evaluate.read_text(arguments.text)
    ids = loaded.tokenizer(text[: 8 * 2048 * (arguments.windows + 1)])["input_ids"]
    print(f"{len(ids)} tokens of text", flush=True)
    rows = Rows("SmolLM2-135M-Instruct", arguments.out)
    perplexity_rows(model, ids, rows, arguments.windows, tuple(arguments.formats))


if __name__ == "__main__":
    main()
