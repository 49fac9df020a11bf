"""What GPTQ costs, with random weights: on blocks of an 8B model on a GPU, of a 135M model on two CPU cores.

Time and memory do not depend on weight values. Whole models take too long: a few blocks are timed
(or all, with `--blocks 32`) and extrapolated by their number, since models are quantized block
by block. The row is rewritten after each block, so an interrupted run keeps what it measured.

    python benchmarks/quantize_large.py --blocks 2 --output benchmarks/results/h200/quantize_large.json
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from anybit.models.blocks import find_blocks
from anybit.quantization.methods import gptq
from anybit.quantization.pipeline.calibrate import Calibration, calibrate
from anybit.scheme import Scheme
from rows import add, origin

Keep = Callable[[dict[str, object]], None]

# The embedding does not affect the time.
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 4096,
}  # fmt: skip
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
    "vocab_size": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def random_model(device: str, dtype: torch.dtype, **sizes: int) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype).eval().requires_grad_(False)


def linears(model: torch.nn.Module) -> set[str]:
    prefix, blocks = find_blocks(model)
    return {f"{prefix}.{n}" for n, m in blocks.named_modules() if isinstance(m, torch.nn.Linear)}


def tokens(count: int, length: int, vocabulary: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for _ in range(count // length)]


def gptq_8b(scheme: Scheme, count: int, blocks: int, keep: Keep) -> None:
    """Seconds per block and peak memory of GPTQ with drift correction on an 8B model's blocks."""
    model = random_model("cuda", torch.bfloat16, **LLAMA_8B, num_hidden_layers=blocks).cpu()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

    gptq_seconds(model, "gptq llama-8b", 32, scheme, tokens(count, 2048, 4096), "cuda", torch.bfloat16, keep)


def gptq_135m(scheme: Scheme, count: int, blocks: int, keep: Keep) -> None:
    """Seconds per block of GPTQ with drift correction on a model of SmolLM2-135M's size, on two cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    torch.set_num_threads(2)
    model = random_model("cpu", torch.float32, **SMOLLM2, num_hidden_layers=blocks)
    case = "gptq smollm2-135m on two cores"
    gptq_seconds(model, case, 30, scheme, tokens(count, 512, 4096), "cpu", torch.float16, keep)


def gptq_seconds(
    model: torch.nn.Module, case: str, blocks: int, scheme: Scheme, sequences: list[torch.Tensor], device: str,
    kind: torch.dtype, keep: Keep,
) -> None:  # fmt: skip
    """After each block, keep a row with the seconds of all so far, with the defaults of ``--method gptq``."""
    options = gptq.GPTQ(scale_dtype=kind)
    seconds: list[float] = []

    def quantizer(weight, statistics, name):
        return gptq.quantize(statistics.corrected(weight, 0.5), statistics.hessian, scheme.weights, options, name)

    def note(done, total, left):
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - started - sum(seconds), 3))
        print(f"block {done} of {total}: {sum(seconds):.1f} s since the start", flush=True)
        row: dict[str, object] = {"case": case, "scheme": str(scheme), "tokens": sum(map(len, sequences))}
        row |= {"seconds_a_block": seconds, "blocks": blocks, "minutes_whole_model": minutes(seconds, blocks)}
        if device == "cuda":
            row |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        keep(row | {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"})

    print("model ready", flush=True)
    started = time.perf_counter()
    settings = Calibration(device=device, batch_tokens=16384 if device == "cuda" else 4096)
    calibrate(model, sequences, scheme, linears(model), quantizer, settings, progress=note)


def minutes(seconds: list[float], blocks: int) -> float:
    """Extrapolated minutes for all blocks: the first as measured, the others as the mean of the rest."""
    later = seconds[1:] or seconds
    return (seconds[0] + (blocks - 1) * sum(later) / len(later)) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32768, help="of the 8B model")
    parser.add_argument("--only", choices=("gptq", "cores"))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    jobs = {
        "gptq": lambda: gptq_8b(Scheme.parse("w4a16g128"), arguments.tokens, arguments.blocks, keep),
        "cores": lambda: gptq_135m(Scheme.parse("w4a16g64asym"), 16384, arguments.blocks, keep),
    }

    def keep(row: dict[str, object]) -> None:
        row = {**row, **origin()}
        add(arguments.output, [row], ("case",))
        shown = {name: value for name, value in row.items() if name != "seconds_a_block"}
        print(json.dumps(shown), flush=True)

    for name, job in jobs.items():
        if arguments.only in (None, name):
            job()


if __name__ == "__main__":
    main()
