"""Other quantizers on the same model and text as benchmarks/quantize.py.

    python benchmarks/peers.py --peer auto-round --model .cache/smollm2-135m-instruct --text .cache/wikipedia.txt

Run it in an environment with anybit's requirements and the peer (pip install auto-round, or gptqmodel). The peer's
weights are dequantized and evaluated in float32. auto-round tunes on all of the second half of the text, as
`--method learned` does; GPTQModel calibrates on 32 thousand tokens of it, as `--method gptq` does. Rows go to
peers.json in benchmarks/results/h200 or cpu.
"""

import argparse
import json
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from anybit import Scheme
from anybit.hf import evaluate
from anybit.quantization.pipeline.text import tokenized
from anybit.scheme import WeightFormat
from quantize import CASE, KEY
from rows import RESULTS, Row, add, origin

SCHEMES = ("w4a16g64asym", "w3a16g128asym", "w3a16g64asym", "w2a16g64asym", "w2a16g32asym")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def auto_round(
    source: Path, tokenizer: PreTrainedTokenizerBase, samples: list[Tensor], format: WeightFormat, settings: Row
) -> PreTrainedModel:
    """Tune the model."""
    from auto_round import AutoRound

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    tuner = AutoRound(
        model, tokenizer, bits=format.bits, group_size=format.group or -1, sym=format.code == "sym",
        nsamples=len(samples), seqlen=512, batch_size=8, dataset=[sample[None] for sample in samples],
        device_map=DEVICE, **{"enable_torch_compile": False, **settings},
    )  # fmt: skip
    return tuner.quantize()[0]


def gptqmodel(
    source: Path, tokenizer: PreTrainedTokenizerBase, samples: list[Tensor], format: WeightFormat, settings: Row
) -> PreTrainedModel:
    """A plain model with the dequantized weights."""
    from gptqmodel import BACKEND, GPTQConfig, GPTQModel

    options = {"offload_to_disk": False, **settings}
    config = GPTQConfig(bits=format.bits, group_size=format.group or -1, sym=format.code == "sym", **options)
    model = GPTQModel.load(str(source), config, device=DEVICE, dtype=torch.float32, backend=BACKEND.TORCH)
    examples = [{"input_ids": sample.tolist(), "attention_mask": [1] * len(sample)} for sample in samples]
    model.quantize(examples, batch_size=8)
    with tempfile.TemporaryDirectory() as scratch:
        # Packed in memory, zeros follow another convention than in checkpoints.
        model.save(scratch)
        model = GPTQModel.load(scratch, device=DEVICE, dtype=torch.float16, backend=BACKEND.TORCH)
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, module in model.model.named_modules():
        if hasattr(module, "dequantize_weight"):
            weight = module.dequantize_weight().T.float().cpu()
            linear = plain.get_submodule(name)
            assert isinstance(linear, torch.nn.Linear) and linear.weight.shape == weight.shape
            if not name.count("layers.") or ".0." in name:
                print(f"# {name}: {float((linear.weight - weight).norm() / linear.weight.norm()):.4f}", flush=True)
            linear.weight.data = weight.contiguous()
    return plain


PEERS = {"auto-round": auto_round, "gptqmodel": gptqmodel}
# Sequences of 512 tokens.
SEQUENCES = {"auto-round": 512, "gptqmodel": 64}


def measure(peer: str, model: Path, text: Path, scheme: str, sequences: int, settings: Row) -> Row:
    """Quantize on the second half of the text, evaluate on the first."""
    content = evaluate.read_text(text)
    cut = len(content) // 2
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = [s for s in tokenized(content[cut:], tokenizer, 512, 512 * sequences) if len(s) == 512]
    started = time.perf_counter()
    tuned = PEERS[peer](model, tokenizer, samples, Scheme.parse(scheme).weights, settings)
    seconds = time.perf_counter() - started
    windows = evaluate.windows_of(tokenizer(content[:cut][:100_000]).input_ids, 512, 16)
    result = evaluate.perplexity(tuned.to(DEVICE).float().eval(), windows)
    return {
        "case": CASE, "scheme": scheme, "method": peer, "options": {"tokens": 512 * len(samples), **settings},
        "perplexity": round(result.perplexity, 4), "scored": result.scored, "quantize_seconds": round(seconds, 1),
        "version": metadata.version(peer), "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "transformers": metadata.version("transformers"), **origin(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=None, help="of 512 tokens")
    parser.add_argument("--settings", type=json.loads, default={}, help="of the peer, as JSON")
    parser.add_argument("--output", type=Path, default=RESULTS / ("h200" if DEVICE == "cuda" else "cpu"))
    arguments = parser.parse_args()
    for scheme in arguments.schemes:
        count = arguments.sequences or SEQUENCES[arguments.peer]
        given = (arguments.model, arguments.text, scheme, count, arguments.settings)
        row = measure(arguments.peer, *given)
        print(json.dumps(row), flush=True)
        add(arguments.output / "peers.json", [row], KEY)


if __name__ == "__main__":
    main()
