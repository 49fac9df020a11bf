"""Other quantizers on the same model and text as benchmarks/quantizers.py.

    python benchmarks/peers.py --peer auto-round --model .cache/smollm2-135m-instruct --text .cache/wikipedia.txt

In an environment of its own: anybit's requirements and the peer (pip install auto-round, or gptqmodel). Its weights
are evaluated as they leave it, dequantized, in float32. auto-round tunes on all of the second half of the text, as
`--method learned` does; GPTQModel calibrates on 32 thousand tokens of it, as `--method gptq` does. Rows go to
peers.json in benchmarks/results/h200 or cpu. `--keep DIR` lets an interrupted auto-round go on after its last block.
"""

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from anybit import Scheme, evaluate
from anybit.quantize.calibrate import tokenized
from anybit.scheme import WeightFormat
from quantizers import RESULTS, add

SCHEMES = ("w4a16g64asym", "w3a16g128asym", "w3a16g64asym", "w2a16g64asym", "w2a16g32asym")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Settings = dict[str, Any]


def auto_round(
    source: Path, tokenizer: Any, samples: list[Tensor], format: WeightFormat, settings: Settings, keep: Path | None
) -> Any:
    """The tuned model."""
    from auto_round import AutoRound

    if keep is not None:
        _remember_blocks(keep)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    tuner = AutoRound(
        model,
        tokenizer,
        bits=format.bits,
        group_size=format.group or -1,
        sym=format.code == "sym",
        nsamples=len(samples),
        seqlen=512,
        batch_size=8,
        dataset=[sample[None] for sample in samples],
        device_map=DEVICE,
        **{"enable_torch_compile": False, **settings},
    )
    return tuner.quantize()[0]


def _remember_blocks(folder: Path) -> None:
    """Write each tuned block, and take from the folder what an earlier run wrote."""
    from auto_round.algorithms.quantization.sign_round.quantizer import SignRoundQuantizer

    folder.mkdir(parents=True, exist_ok=True)
    tune: Callable[..., Any] = SignRoundQuantizer.quantize_block

    def remembered(self: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
        index = next(a.block_index for a in (*args, *kwargs.values()) if hasattr(a, "block_index"))
        file = folder / f"{index}.pt"
        linears = {name: module for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)}
        if file.exists():
            for name, weight in torch.load(file).items():
                linears[name].weight.data.copy_(weight)
            return {}
        found = tune(self, block, *args, **kwargs)
        linears = {name: module for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)}
        torch.save({name: module.weight.data.cpu() for name, module in linears.items()}, file)
        print(f"# block {index}", flush=True)
        return found

    SignRoundQuantizer.quantize_block = remembered


def gptqmodel(
    source: Path, tokenizer: Any, samples: list[Tensor], format: WeightFormat, settings: Settings, keep: Path | None
) -> Any:
    """A plain model with the weights that it decodes."""
    from gptqmodel import BACKEND, GPTQConfig, GPTQModel

    config = GPTQConfig(
        bits=format.bits,
        group_size=format.group or -1,
        sym=format.code == "sym",
        **{"offload_to_disk": False, **settings},
    )
    model = GPTQModel.load(str(source), config, device=DEVICE, dtype=torch.float32, backend=BACKEND.TORCH)
    examples = [{"input_ids": sample.tolist(), "attention_mask": [1] * len(sample)} for sample in samples]
    model.quantize(examples, batch_size=8)
    with tempfile.TemporaryDirectory() as scratch:
        # What is packed in memory follows another convention of zeros than what loads.
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


def measure(
    peer: str, model: Path, text: Path, scheme: str, sequences: int, settings: Settings, keep: Path | None
) -> dict[str, Any]:
    """Quantize on the second half of the text, evaluate on the first."""
    content = evaluate.read_text(text)
    cut = len(content) // 2
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = [s for s in tokenized(content[cut:], tokenizer, 512, 512 * sequences) if len(s) == 512]
    started = time.perf_counter()
    place = None if keep is None else keep / scheme
    tuned = PEERS[peer](model, tokenizer, samples, Scheme.parse(scheme).weights, settings, place)
    seconds = time.perf_counter() - started
    windows = evaluate.windows_of(tokenizer(content[:cut][:100_000]).input_ids, 512, 16)
    result = evaluate.perplexity(tuned.to(DEVICE).float().eval(), windows)
    return {
        "case": "smollm2-135m wikipedia, first half",
        "scheme": scheme,
        "method": peer,
        "options": {"tokens": 512 * len(samples), **settings},
        "perplexity": round(result.perplexity, 4),
        "scored": result.scored,
        "quantize_seconds": round(seconds, 1),
        "version": metadata.version(peer),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=None, help="of 512 tokens")
    parser.add_argument("--settings", type=json.loads, default={}, help="of the peer, as JSON")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for finished blocks")
    parser.add_argument("--output", type=Path, default=RESULTS / ("h200" if DEVICE == "cuda" else "cpu"))
    arguments = parser.parse_args()
    for scheme in arguments.schemes:
        count = arguments.sequences or SEQUENCES[arguments.peer]
        given = (arguments.model, arguments.text, scheme, count, arguments.settings, arguments.keep)
        row = measure(arguments.peer, *given)
        print(json.dumps(row), flush=True)
        add(row, arguments.output / "peers.json")


if __name__ == "__main__":
    main()
