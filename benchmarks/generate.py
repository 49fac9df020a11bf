"""Whole models on one GPU: milliseconds per decode step and tokens per second, quantized and fp16.

    python benchmarks/generate.py --record [--seconds 150]
    python benchmarks/generate.py [--batch 1] [--schemes w4a16g128,w2a16g128] [--context 512] [--baseline] [--profile]
    python benchmarks/generate.py --prompts 128 1024 4096 [--schemes w4a16g128,w4a8] [--baseline]

A model of shape ``--model`` with random weights (random codes if quantized) decodes after ``--context`` tokens of
random keys and values. Rows go to benchmarks/results/h200/generate.json, or to ``--out``.

Quantized: ``anybit.fuse`` and a static AnyBitCache (16 bits, or the scheme's KV format), as ``generate`` runs them with
``cache_implementation="static"``; a step is what generate calls: copy the tokens in, count lengths, replay one graph.
Before timing, its logits are compared with those of exact attention over the same, dequantized cache, and two
layers, part by part, with plain torch on the same inputs; their logits with the unfused model over transformers'
StaticCache.

fp16: one decoder layer under torch.compile, projections stacked, cuDNN's attention (the fastest) over exactly the
tokens present, all layers in one CUDA graph: faster than transformers' model compiled whole (5.98 ms at batch 1).

--prompts: milliseconds until the host has the first token of ``generate``; fp16's is that of the same graph's replay.
"""

import argparse
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import anybit
from anybit.errors import AnyBitError
from anybit.scheme import Scheme
from generate_models import (
    LLAMA,
    MODELS,
    apart,
    check,
    check_prompt,
    history,
    prompt_of,
    random_model,
    reference_logits,
    stepper,
    unfused_logits,
)
from kernel_times import print_kernels
from timing import RESULTS, merge_rows, stamp


def milliseconds(step: Callable[[], object], steps: int = 20, repeats: int = 5) -> float:
    """Median step time, in loops long enough for the host to run ahead as in generate."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e3 / steps)
    return statistics.median(found)


def first_milliseconds(call: Callable[[], object], seconds: float = 1.0) -> float:
    """Median time of calls that wait for their result, after two more."""
    found: list[float] = []
    stop = time.perf_counter() + seconds
    while len(found) < 7 or time.perf_counter() < stop:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found[2:])


def row(
    case: str, scheme: str, batch: int, context: int, ms: float, checked: str, tokens: int = 0
) -> dict[str, object]:
    """A row of generate.json. tokens: that ``ms`` computes; 0: one a sequence."""
    speed = (tokens or batch) * 1e3 / ms
    fields = {"case": case, "scheme": scheme, "batch": batch, "context": context}
    print(
        f"{case:22s} {scheme:14s} batch {batch:3d} context {context:6d}: {ms:7.3f} ms, {speed:8.1f} tokens/s"
        f"  ({checked})",
        flush=True,
    )
    found = {"ms": round(ms, 4), "tokens_per_second": round(speed, 1), "checked": True, "check": checked}
    return {**fields, **found, **stamp()}


FIRST = "Llama-3-8B shape, first token"


@torch.inference_mode()
def quantized(
    scheme: str, batch: int, context: int, layers: int, profile: bool = False, head: str | None = None,
    name: str = LLAMA,
) -> dict[str, object]:  # fmt: skip
    """A quantized, fused model over a static cache, its head in an optional scheme; its logits are checked first."""
    parsed = Scheme.parse(scheme)
    found = check(scheme, batch, head, name=name)
    model = anybit.fuse(random_model(scheme, layers, prepare=False, head=head, name=name))
    cache, step = stepper(model, "kv16" if parsed.kv is None else str(parsed.kv), batch, context)
    expected = reference_logits(model, cache, torch.zeros(batch, 1, dtype=torch.long, device="cuda"), context)
    error = apart(step(), expected)
    # With activations of few bits, rounding flips codes, layer after layer: two layers of w4a4 differ from themselves
    # as much under a nudge as under another summation order. So compare their parts. A mixture takes other experts,
    # which are nearly as good.
    rough = parsed.activations.quantized or hasattr(model.config, "num_experts")
    assert found.part < 2e-2, f"a part is off by {found.part:.3e}"
    assert rough or (error < 2e-2 and found.logits < 2e-2), (
        f"the fused step's logits are off by {error:.3e}, {found.logits:.3e} in two layers"
    )
    assert error < 1.5, f"the logits are off by {error:.3e}"  # unrelated vectors: 1.41; also catches NaN
    for _ in range(3):
        step()
    if profile:
        print_kernels(step)
    assert model._anybit_decoder.graphs[cache].graph is not None
    checked = f"logits within {error:.1e} of exact attention; {found}"
    case = f"{name} shape" if head is None else f"{name} shape, {head} head"
    return row(case, scheme, batch, context, milliseconds(step), checked)


@torch.inference_mode()
def first_tokens(scheme: str, prompts: list[int], layers: int, profile: bool = False) -> Iterator[dict[str, object]]:
    """The first token of ``generate`` by a quantized, fused model after prompts of so many tokens."""
    coded = Scheme.parse(scheme).activations.quantized
    checks = [check_prompt(scheme, tokens) for tokens in prompts]
    model = anybit.fuse(random_model(scheme, layers, prepare=False))
    for tokens, found in zip(prompts, checks, strict=True):
        assert found.part < 2e-2 and found.logits < (1.5 if coded else 2e-2), str(found)
        ids = prompt_of(tokens)
        call = functools.partial(
            model.generate, ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False,
            cache_implementation="static", pad_token_id=0,
        )  # fmt: skip
        ms = first_milliseconds(lambda call=call: call().tolist())
        if profile:
            print_kernels(call)
        yield row(FIRST, scheme, 1, tokens, ms, str(found), tokens)


def fp16_layer(
    x: torch.Tensor, residual: torch.Tensor, norms: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...],
    k_cache: torch.Tensor, v_cache: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, position: torch.Tensor,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A decoder layer, new tokens at ``position`` [new]: x and residual [batch * new, hidden] -> the same."""
    qkv_weight, out_weight, gate_up_weight, down_weight = weights

    def norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return gamma * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).half()

    def turn(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cosine + torch.cat((-high, low), -1) * sine

    (batch, heads), new = k_cache.shape[:2], len(position)
    residual = residual + x
    qkv = (norm(residual, norms[0]) @ qkv_weight.t()).view(batch, new, -1, 128).transpose(1, 2)
    q, k, v = qkv.split((32, heads, heads), 1)
    k_cache.index_copy_(2, position, turn(k))
    v_cache.index_copy_(2, position, v)
    attended = torch.nn.functional.scaled_dot_product_attention(
        turn(q), k_cache[:, :, :tokens], v_cache[:, :, :tokens], is_causal=new > 1, enable_gqa=True
    )
    residual = residual + attended.transpose(1, 2).reshape(batch * new, -1) @ out_weight.t()
    gate, up = (norm(residual, norms[1]) @ gate_up_weight.t()).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ down_weight.t(), residual


@torch.inference_mode()
def baseline(batch: int, context: int, layers: int, profile: bool = False, prompt: int = 0) -> dict[str, object]:
    """The fp16 model, compiled layer by layer, in a CUDA graph, with the faster attention.

    prompt: time the first token after so many, not a step after ``context``, which is then 0.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = random_model(None, layers)
    ids = prompt_of(prompt) if prompt else torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    expected = model(ids, logits_to_keep=1).logits.float() if prompt else unfused_logits(model, batch, context)
    body = model.model
    caches, weights = [], []
    for i, layer in enumerate(body.layers):
        room = 16 + prompt
        caches.append([torch.cat((x, x.new_zeros(*x.shape[:2], room, 128)), 2) for x in history(i, batch, context)])
        attn, mlp = layer.self_attn, layer.mlp
        weights.append((
            torch.cat((attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight)), attn.o_proj.weight,
            torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)), mlp.down_proj.weight,
        ))  # fmt: skip
        norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
        body.layers[i] = torch.nn.Identity()
        body.layers[i].norms = norms
    position = torch.arange(context, context + ids.shape[1], device="cuda")
    compiled, tokens = torch.compile(fp16_layer, dynamic=False), context + ids.shape[1]

    def run() -> torch.Tensor:
        x = body.embed_tokens(ids).flatten(0, 1)
        cosine, sine = (t[0] for t in body.rotary_emb(x, position[None]))
        residual = torch.zeros_like(x)
        for i in range(layers):
            x, residual = compiled(
                x, residual, body.layers[i].norms, weights[i], *caches[i], cosine, sine, position, tokens
            )
        return model.lm_head(body.norm((x + residual).unflatten(0, ids.shape)[:, -1:]))

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            logits = run()
    graph.replay()
    error = apart(logits, expected)
    assert error < 2e-2, f"the fp16 step's logits are off by {error:.3e}"
    if profile:
        print_kernels(graph.replay)
    checked = f"logits within {error:.1e} of transformers'"
    if prompt:
        ms = first_milliseconds(lambda: (graph.replay(), logits.argmax().item()))
        return row(FIRST, "fp16", batch, prompt, ms, checked, prompt)
    return row("Llama-3-8B shape", "fp16", batch, context, milliseconds(graph.replay), checked)


RECORD = (
    ("w4a16g128", 1, 512), ("fp16", 1, 512), ("w4a16g128", 16, 512), ("fp16", 16, 512), ("w4a4", 1, 512),
    ("w4a8", 1, 512), ("w2a16g128", 1, 512), ("w4a16g128-kv4g128", 1, 131072), ("fp16", 1, 131072),
    ("w4a8", 16, 512), ("w4a4", 16, 512), ("w4a16g128-kv4g128", 1, 32768), ("fp16", 1, 32768),
    ("w2a16g128", 16, 512), ("w4a16g128-kv2g128", 1, 131072), ("w3a16g128", 1, 512),
)  # fmt: skip
"""Scheme, batch and context of the committed rows, most important first."""


def rows_of(scheme: str, batch: int, context: int, arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """The rows of a case; with --prompts, ``context`` is the prompt of fp16."""
    rest = arguments.layers, arguments.profile
    if scheme == "fp16":
        yield baseline(batch, 0, *rest, prompt=context) if arguments.prompts else baseline(batch, context, *rest)
    elif arguments.prompts:
        yield from first_tokens(scheme, arguments.prompts, *rest)
    else:
        yield quantized(scheme, batch, context, *rest, head=arguments.head, name=arguments.model)


def main() -> None:
    """Time the requested models, and write a row after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--context", type=int, nargs="*", default=[512])
    parser.add_argument("--prompts", type=int, nargs="*", help="first tokens after so many, instead of steps")
    parser.add_argument("--schemes", default="w4a16g128,w2a16g128,w4a8,w4a4")
    parser.add_argument("--baseline", action="store_true", help="time the compiled fp16 model too")
    parser.add_argument("--record", action="store_true", help="measure the committed rows, most important first")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no model after this many seconds")
    parser.add_argument("--profile", action="store_true", help="print a step's time by kernel")
    parser.add_argument("--model", choices=MODELS, default=LLAMA, help="fp16 and first tokens: Llama-3-8B alone")
    parser.add_argument("--layers", type=int, help="fewer than the model has; writes no row")
    parser.add_argument("--head", metavar="SCHEME", help="also quantize lm_head, in this scheme")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "generate.json")
    arguments = parser.parse_args()
    whole = MODELS[arguments.model]["num_hidden_layers"]
    arguments.layers = arguments.layers or whole
    wanted = [scheme for scheme in arguments.schemes.split(",") if scheme] + ["fp16"] * arguments.baseline
    cases = [(s, b, c) for c in arguments.context for b in arguments.batch for s in wanted]
    if arguments.prompts:
        cases = [("fp16", 1, tokens) for tokens in arguments.prompts if "fp16" in wanted]
        cases = [(scheme, 1, 0) for scheme in wanted if scheme != "fp16"] + cases
    start = time.perf_counter()
    for scheme, batch, context in RECORD if arguments.record else cases:
        if time.perf_counter() - start > arguments.seconds:
            print(f"no time left for {scheme}, batch {batch}, context {context}", flush=True)
            continue
        try:
            for found in rows_of(scheme, batch, context, arguments):
                if arguments.layers == whole:
                    merge_rows(arguments.out, [found], ("case", "scheme", "batch", "context"))
        except (AnyBitError, AssertionError, RuntimeError) as error:  # one failed case must not lose the others
            print(f"{scheme}, batch {batch}, context {context}: {type(error).__name__}: {error}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
