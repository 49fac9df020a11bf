"""Whole models on one GPU: milliseconds of a decode step and tokens a second, quantized beside fp16.

    python benchmarks/generate.py [--batch 1] [--schemes w4a16g128,w2a16g128] [--baseline]

A Llama-3-8B-shaped model with random weights (codes for the quantized ones) decodes at the middle of a static cache.
Rows go to benchmarks/results/<gpu>/generate.json. The baseline is the fp16 model at its best: torch.compile with
mode="reduce-overhead", which runs it in CUDA graphs. Before a model is timed, the logits of its fused step are
compared with those of the same model unfused.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

sys.path.insert(0, str(Path(__file__).parent))
import anybit
from anybit.integrations.transformers import replace_linears
from anybit.linear import QuantLinear
from anybit.packing import QuantizedWeight
from anybit.scheme import Scheme
from timing import RESULTS, merge_rows, stamp

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
CACHE, POSITION = 1024, 512


def random_model(scheme: str | None, layers: int) -> LlamaForCausalLM:
    """A Llama-3-8B-shaped model on the GPU, in fp16 or in a scheme, with random weights of the usual size."""
    config = LlamaConfig(**{**LLAMA_3_8B, "num_hidden_layers": layers}, dtype=torch.float16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.float16).eval()
    if scheme is not None:
        replace_linears(model, Scheme.parse(scheme), ["lm_head"])
    for module in list(model.modules()):
        if isinstance(module, QuantLinear):
            fill(module)
        else:
            for name, parameter in list(module.named_parameters(recurse=False)):
                ones = "norm" in type(module).__name__.lower()
                fresh = torch.empty(parameter.shape, dtype=torch.float16, device="cuda")
                fresh = fresh.fill_(1.0) if ones else fresh.normal_(0, 0.02)
                setattr(module, name, torch.nn.Parameter(fresh, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to("cuda")
    return model


def fill(layer: QuantLinear) -> None:
    """Give a layer random codes whose weights have a standard deviation of about 0.02."""
    n, k, fmt = layer.out_features, layer.in_features, layer.scheme.weights
    words = torch.randint(-(2**31), 2**31, layer.weight_packed.shape, dtype=torch.int32, device="cuda")
    scale = torch.full((n, fmt.groups(k)), 0.07 / 2**fmt.bits, dtype=torch.float16, device="cuda")
    # Signs of both kinds: signed codes have a mean of -1/2, which 32 layers would raise beyond what fp16 holds.
    scale *= torch.randint(0, 2, scale.shape, device="cuda") * 2 - 1
    zero = None
    if fmt.code == "asym":
        zero = torch.full((n, fmt.groups(k)), 2 ** (fmt.bits - 1), dtype=torch.uint8, device="cuda")
    layer.load_weight(QuantizedWeight(words, scale, zero, (n, k), fmt))
    layer.prepare()


class Step:
    """One decode step of a batch at POSITION of a static cache, replayed from a CUDA graph."""

    def __init__(self, model: LlamaForCausalLM, batch: int, graph: bool = True) -> None:
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=CACHE)
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
        self.position = torch.full((batch, 1), POSITION, dtype=torch.long, device="cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        prompt = torch.randint(0, 1000, (batch, 8), device="cuda", generator=generator)
        model(prompt, past_key_values=self.cache)
        for layer in self.cache.layers:  # random history, the same for every model
            layer.keys.normal_(0, 1, generator=generator)
            layer.values.normal_(0, 1, generator=generator)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = self.run()
        if graph:
            self.capture()

    def run(self) -> torch.Tensor:
        """The step, launched kernel by kernel."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(POSITION)
        return self.model(self.ids, position_ids=self.position, past_key_values=self.cache).logits

    def capture(self) -> None:
        """Put the step into a CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.logits = self.run()

    def milliseconds(self, steps: int = 20, repeats: int = 7) -> float:
        """The median time of a step."""
        found = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                self.graph.replay() if self.graph is not None else self.run()
            torch.cuda.synchronize()
            found.append((time.perf_counter() - start) * 1e3 / steps)
        return statistics.median(found)


def row(case: str, scheme: str, batch: int, ms: float, checked: str, **more: object) -> dict[str, object]:
    """A row of generate.json."""
    tokens = batch * 1e3 / ms
    fields = {"case": case, "scheme": scheme, "batch": batch, "cache": CACHE, "position": POSITION}
    print(
        f"{case:28s} {scheme:12s} batch {batch:3d}: {ms:7.3f} ms a step, {tokens:8.1f} tokens/s  ({checked})",
        flush=True,
    )
    return {**fields, "ms": round(ms, 4), "tokens_per_second": round(tokens, 1), "checked": checked, **more, **stamp()}


@torch.inference_mode()
def quantized(scheme: str, batch: int, layers: int) -> dict[str, object]:
    """A quantized, fused model; its logits are compared with the unfused model's first."""
    model = random_model(scheme, layers)
    expected = Step(model, batch, graph=False).logits.float()
    anybit.fuse(model)
    step = Step(model, batch)
    assert step.graph is not None
    step.graph.replay()
    error = float((step.logits.float() - expected).norm() / expected.norm())
    assert error < 2e-2, f"the fused step's logits are off by {error:.3e}"
    return row("fused, CUDA graph", scheme, batch, step.milliseconds(), f"logits within {error:.1e} of unfused")


@torch.inference_mode()
def baseline(batch: int, layers: int) -> dict[str, object]:
    """The fp16 model, compiled into CUDA graphs."""
    model = random_model(None, layers)
    step = Step(model, batch, graph=False)
    expected = step.logits.float()
    step.model = torch.compile(model, mode="reduce-overhead", fullgraph=False)  # type: ignore[assignment]
    for _ in range(3):
        logits = step.run()
    error = float((logits.float() - expected).norm() / expected.norm())
    return row(
        "torch.compile reduce-overhead", "fp16", batch, step.milliseconds(), f"logits within {error:.1e} of eager"
    )


def main() -> None:
    """Time the models asked for, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--schemes", default="w4a16g128,w2a16g128,w4a8")
    parser.add_argument(
        "--baseline", action="store_true", help="time the compiled fp16 model too (a minute of compiling)"
    )
    parser.add_argument("--layers", type=int, default=LLAMA_3_8B["num_hidden_layers"])
    arguments = parser.parse_args()
    rows = []
    for batch in arguments.batch:
        for scheme in filter(None, arguments.schemes.split(",")):
            rows.append(quantized(scheme, batch, arguments.layers))
            torch.cuda.empty_cache()
        if arguments.baseline:
            rows.append(baseline(batch, arguments.layers))
            torch.cuda.empty_cache()
    merge_rows(RESULTS / "h200" / "generate.json", rows, ("case", "scheme", "batch", "cache"))


if __name__ == "__main__":
    main()
