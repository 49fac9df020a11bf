"""Host time of repeated calls, by scheme: a layer, a fused decoder layer, a layer of a vLLM step with a low-bit cache.

python benchmarks/launch.py    # into results/h200/launch.json

Only names that users and vLLM's plug-in have, so the same file measures a tree before and after a change. Tensors are
small: kernels end before Python has launched the next, and the time of a call is Python's alone.
"""

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import anybit
from anybit.ops import kv_rows
from anybit.ops.kv import NO_MASKS
from anybit.scheme import KVFormat
from anybit.vllm import kv_step
from timing import RESULTS, merge_rows, stamp

SCHEMES = ("w4a16g128", "w2a16g64asym", "w4a8", "w8a8", "w4a8fp", "w2a2", "w4a4")
BLOCKS = ("w4a16g128", "w4a8")
CACHES = ("kv8", "kv4g128", "kv2g32")
TOKENS, WIDTH, LAYERS = (1, 16), 1024, 16
CALLS, ROUNDS = 200, 20


def host_us(call: Callable[[], object], each: int = 1) -> float:
    """Microseconds of host time: the least over rounds (other load only adds), of a call divided by ``each``."""
    calls, found = max(1, CALLS // each), []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / (calls * each))
    torch.cuda.synchronize()
    return round(min(found) * 1e6, 2)


def linear(scheme: str, tokens: int) -> float:
    """A ``QuantLinear``, after its result was compared with the reference's."""
    weight = anybit.quantize_weight(torch.randn(WIDTH, WIDTH) * 0.05, anybit.Scheme.parse(scheme).weights)
    reference = anybit.QuantLinear.from_weight(weight, scheme, torch.randn(WIDTH).half())
    layer = copy.deepcopy(reference).cuda()
    x = torch.randn(tokens, WIDTH).half()
    with torch.inference_mode():
        expected, y = reference(x).float(), layer(x.cuda()).cpu().float()
        assert (y - expected).norm() < 3e-2 * expected.norm(), f"{scheme}, {tokens} tokens"
        x = x.cuda()
        return host_us(lambda: layer(x))


def block(scheme: str, tokens: int) -> float:
    """A fused decoder layer in an eager forward, transformers' part included; logits are compared with unfused ones."""
    shape = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 8, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=LAYERS, **shape)).half().cuda().eval()
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            weight = anybit.quantize_weight(module.weight.detach(), anybit.Scheme.parse(scheme).weights)
            model.model.layers.set_submodule(name, anybit.QuantLinear.from_weight(weight, scheme))
    ids = torch.arange(tokens, device="cuda")[None]
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits.float()
        anybit.fuse(model)
        logits = model(ids, use_cache=False).logits.float()
        assert (logits - expected).norm() < 5e-2 * expected.norm(), f"{scheme}, {tokens} tokens"
        return host_us(lambda: model(ids, use_cache=False), LAYERS)


def step(format: str, requests: int) -> float:
    """A layer of a step of vLLM in which each request decodes a token: the first of a batch plans for the others."""
    heads, kv_heads, dim, length = 32, 8, 128, 1000
    rows = kv_rows.layout(KVFormat.parse(format), dim)
    width = rows.front + -(-length // kv_rows.PAGE)
    table = torch.arange(1, 1 + requests * width, dtype=torch.int32, device="cuda").view(requests, width)
    pages = torch.zeros(
        LAYERS, 1 + requests * width, kv_heads, rows.layout.page_bytes, dtype=torch.uint8, device="cuda"
    )
    layers = pages.unbind()
    lengths = torch.full((requests,), length, dtype=torch.int32, device="cuda")
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    q = torch.randn(requests, heads, dim, device="cuda").half()
    k, v = torch.randn(2, requests, kv_heads, dim, device="cuda").half()
    out = torch.empty_like(q)

    def whole() -> None:
        batch = kv_step.Batch(table, lengths, starts, requests, requests, requests)
        for layer in layers:
            kv_step.run(
                batch, rows, layer, q, k, v, NO_MASKS, out, capacity=4096, space=torch.empty, prompts=lambda *_: None
            )

    whole()
    assert bool(out.isfinite().all()), format
    return host_us(whole, LAYERS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(RESULTS) / "h200" / "launch.json")
    options = parser.parse_args()
    marks = stamp()
    jobs: list[tuple[str, Callable[[str, int], float], tuple[str, ...]]] = [
        ("linear", linear, SCHEMES), ("fused layer", block, BLOCKS), ("vLLM step", step, CACHES),
    ]  # fmt: skip
    for case, measure, schemes in jobs:
        for scheme in schemes:
            for tokens in TOKENS:
                row: dict[str, Any] = {"case": case, "scheme": scheme, "m": tokens, "n": WIDTH, "k": WIDTH}
                row |= {"host_us": measure(scheme, tokens), "checked": True}
                print(*row.values())
                merge_rows(options.out, [row | marks])


if __name__ == "__main__":
    main()
