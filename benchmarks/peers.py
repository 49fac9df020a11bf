"""Other quantizers on the same model and text as benchmarks/quantize.py.

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
from anybit.quantization.pipeline.calibrate import tokenized
from anybit.scheme import WeightFormat
from quantize import RESULTS, add

SCHEMES = ("w4a16g64asym", "w3a16g128asym", "w3a16g64asym", "w2a16g64asym", "w2a16g32asym")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Settings = dict[str, Any]


def auto_round(
    source: Path, tokenizer: Any, samples: list[Tensor], format: WeightFormat, settings: Settings, keep: Path | None
) -> Any:
    """The tuned model."""
    from auto_round import AutoRound

    _record_steps()
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


class _Steps:
    """The forward and backward pass of auto-round's steps over a block, as one CUDA graph from the first step on.

    What is computed stays what auto-round computes; but a thousand launches a step would be most of its time. Its loop
    goes on calling ``forward``, ``loss`` and ``backward``, which stand in for the quantizer's own.
    """

    def __init__(self, quantizer: Any, runner: Any) -> None:
        self.runner = runner
        self.own = runner.forward, quantizer._get_loss, quantizer._scale_loss_and_backward
        self.replay: Callable[[], None] | None = None

    def forward(self, block: Any, inputs: Any, others: Any, indices: Any = None, cache_device: Any = None) -> Any:
        if indices is None or not torch.is_grad_enabled():
            return self.own[0](block, inputs, others, indices, cache_device)
        self.block = block
        self.batch = self.runner._select_batch(inputs, others, torch.tensor(indices))
        return self

    def to(self, *_: Any) -> "_Steps":
        return self

    def loss(self, found: Any, wanted: Tensor, indices: Any, function: Any, device: Any, mask: Any, *_: Any) -> Tensor:
        if found is not self:
            loss: Tensor = self.own[1](found, wanted, indices, function, device, mask)
            return loss
        masks = torch.cat([mask[i] for i in indices]).to(device) if mask else None
        given = (*self.batch, wanted, masks)
        if self.replay is None:
            self.given = _map(lambda tensor: tensor.to(device).clone(), given)
            self._record(function, device)
            assert self.replay is not None
        old: list[Tensor] = []
        _map(old.append, self.given)
        new: list[Tensor] = []
        _map(new.append, given)
        for place, tensor in zip(old, new, strict=True):
            place.copy_(tensor)
        self.replay()
        return self.found

    def _record(self, function: Any, device: Any) -> None:
        def run() -> None:
            x, others, wanted, masks = self.given
            out = self.runner._normalize_output(self.runner._forward_one_batch(self.block, x, dict(others)), self.block)
            parts = None if masks is None else list(masks.split(1))
            loss = self.own[1](out, wanted, range(len(wanted)), function, device, parts)
            self.own[2](None, loss)
            self.found = loss.detach()

        parameters = [parameter for parameter in self.block.parameters() if parameter.requires_grad]

        def forget() -> None:
            for parameter in parameters:
                parameter.grad = None

        def again() -> None:
            forget()
            run()
            self.gradients = {parameter: parameter.grad for parameter in parameters}

        self.replay = again
        if DEVICE == "cpu":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                forget()
                run()
            forget()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            print(f"# not recorded: {error}", flush=True)
            return
        self.gradients = {parameter: parameter.grad for parameter in parameters}
        self.replay = graph.replay

    def backward(self, scaler: Any, loss: Tensor) -> Any:
        if self.replay is None:
            return self.own[2](scaler, loss)
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient
        return loss


def _map(function: Callable[[Tensor], Any], value: Any) -> Any:
    """A value with its tensors changed, however deep they lie."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map(function, item) for item in value)
    return value


def _record_steps() -> None:
    """Let auto-round's steps run as CUDA graphs."""
    from auto_round.algorithms.quantization.sign_round.quantizer import SignRoundQuantizer

    tune: Callable[..., Any] = SignRoundQuantizer.quantize_block

    def recorded(self: Any, block: Any, *args: Any, **kwargs: Any) -> Any:
        runner = self.block_forward
        steps = _Steps(self, runner)
        runner.forward = steps.forward
        self._get_loss, self._scale_loss_and_backward = steps.loss, steps.backward
        try:
            return tune(self, block, *args, **kwargs)
        finally:
            del runner.forward, self._get_loss, self._scale_loss_and_backward

    SignRoundQuantizer.quantize_block = recorded


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
