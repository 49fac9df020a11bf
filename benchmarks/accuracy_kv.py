"""What a quantized KV cache costs in accuracy: perplexity, and the kernel's own error.

    python benchmarks/accuracy_kv.py --model FOLDER --text FILE [--parts kernel perplexity]

Weights (SmolLM2-135M-Instruct) stay in 16 bits, so only the cache differs. Rows go to
benchmarks/results/<gpu>/kv_accuracy.json, which the tables of docs/accuracy.md show.

perplexity: windows of 2048 tokens in which every token sees what it would see during generation: full 128-token
windows quantized, its own window in 16 bits. This attention over all tokens at once is validated against a real
AnyBitCache fed piece by piece.
kernel: the decode kernel against exact attention over the same dequantized cache, on this model's keys and values of
every layer (keys have outlier channels): mean relative error of the worst layer.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anybit import AnyBitCache
from anybit.cache import attention
from anybit.cache.kvcache import KVCache, hadamard
from anybit.hf import evaluate
from anybit.hf.loading import load_model
from anybit.kernels.attention import kv_page
from anybit.kernels.attention.kv_page import PageLayout
from anybit.scheme import KVFormat
from timing import RESULTS, merge_rows, stamp, worst_of

FORMATS = (
    "kv16", "kv8", "kv8t", "kv4", "kv4t", "kv4rot", "kv4trot", "kv2", "kv2t", "kv2rot", "kv2trot", "kv4g32", "kv2g32",
    "kv2g32t", "kv2g32rot", "kv2g32trot", "k4v2", "k2v4", "k4v2g32", "k2v4g32", "k8v4", "k4v8", "k16v4",
    "k4v16", "k16v2", "k2v16",
)  # fmt: skip
KERNEL_FORMATS = ("kv16", "kv8", "kv8t", "kv4", "kv4t", "kv2", "kv2t", "kv4g32", "kv2g32", "k4v2", "kv4rot", "kv2rot")
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
        merge_rows(self.path, [{**row, **stamp()}], ("case", "model", "kv", "context", "dtype"))


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


def captured(model: PreTrainedModel, ids: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values [heads, tokens, dim] of every layer on a text, rotary embedding included."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    seen = []

    def capture(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        seen.append((query[0], key[0], value[0]))
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("capture", capture)
    AttentionMaskInterface.register("capture", sdpa_mask)
    attention_on(model, "capture")
    with torch.inference_mode():
        model(torch.tensor([ids], device=model.device), use_cache=False)
    attention_on(model, "sdpa")
    return seen


@torch.inference_mode()
def kernel_rows(model: PreTrainedModel, ids: list[int], rows: Rows, formats: list[str], dtypes: list[str]) -> None:
    """The kernel's own error on real keys and values, for one and for sixteen queries."""
    states = captured(model, ids[:2048])
    spread = max(float(k.float().abs().amax(1).amax() / k.float().abs().amax(1).median()) for _, k, _ in states)
    heads, tokens, dim = states[0][1].shape
    for dtype, limit in ((torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
        for kv in formats if str(dtype).removeprefix("torch.") in dtypes else ():
            errors = []
            for q, k, v in states:
                cache = KVCache(
                    kv, layers=1, kv_heads=heads, head_dim=dim, sequences=1, capacity=tokens, dtype=dtype,
                    device=k.device,
                )  # fmt: skip
                row = cache.add()
                cache.extend([row], tokens)
                cache.write(0, [row], *(x.transpose(0, 1)[None].to(dtype) for x in (k, v)))
                for queries in (1, 16):
                    query = q[:, -queries:].transpose(0, 1)[None].to(dtype)
                    got = attention.decode(query, cache, 0, [row])[0].double()
                    want = attention.decode_reference(query, cache, 0, [row], precision=torch.float64)[0].double()
                    errors.append(float((got - want).abs().mean() / want.abs().mean()))
            worst, mean = worst_of(errors), sum(errors) / len(errors)
            if not worst <= limit:
                print(f"FAILED: {kv}, {dtype}: {worst:.2e} is more than {limit:.0e}; no row", flush=True)
                continue
            rows.add(
                "kernel", kv, tokens, dim, dtype=str(dtype).removeprefix("torch."), error=float(f"{worst:.3e}"),
                mean_error=float(f"{mean:.3e}"),
                largest_key_channel_over_median=round(spread, 1),
                checked=True, check=f"at most {limit:.0e}",
            )  # fmt: skip


def main() -> None:
    """Measure the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", default=["kernel", "perplexity"])
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--kernel-formats", nargs="*", default=KERNEL_FORMATS)
    parser.add_argument("--dtypes", nargs="*", default=["float16", "bfloat16"])
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "kv_accuracy.json")
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, dtype=torch.float16)
    model, text = loaded.model, evaluate.read_text(arguments.text)
    ids = loaded.tokenizer(text[: 8 * 2048 * (arguments.windows + 1)])["input_ids"]
    print(f"{len(ids)} tokens of text", flush=True)
    rows = Rows("SmolLM2-135M-Instruct", arguments.out)
    if "kernel" in arguments.parts:
        kernel_rows(model, ids, rows, arguments.kernel_formats, arguments.dtypes)
    if "perplexity" in arguments.parts:
        perplexity_rows(model, ids, rows, arguments.windows, tuple(arguments.formats))


if __name__ == "__main__":
    main()
