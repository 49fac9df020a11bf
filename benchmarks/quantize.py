"""Methods by scheme: perplexity of SmolLM2-135M on Wikipedia prose.

    python benchmarks/quantize.py --model .cache/smollm2-135m-instruct --text .cache/wikipedia.txt [CASE ...]

A case is SCHEME:METHOD, from folder to folder with the method's defaults, on a GPU if there is one; in
SCHEME:METHOD+METHOD the second reuses the calibrated blocks of the first (its seconds are those of both). Calibration
reads the second half of the text, evaluation the first 16 windows of 512 tokens of the first. A scheme with a KV cache
is evaluated through the cache. SCHEME:METHOD:op is also evaluated in 16 bits, with plain dequantized arithmetic
and with anybit's kernels: APT-LLM's Table V. `--news FILE` (scripts/fetch.py) adds the perplexity of a text that no
method saw, and agreement with the 16-bit model on text that this model writes. `--written S`: the model writes text for
S seconds, once, and all calibrated cases learn from it, instead of writing their own. The option nested, a list of
widths, adds the perplexity of each slice.

Rows are added to quantizers.json in benchmarks/results/h200 or cpu one by one, replacing those of the same case,
scheme, method and options. `--missing` skips cases that have a row, `--seconds S` starts no case after S seconds.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

import torch

from anybit.errors import KernelError
from anybit.hf import evaluate
from anybit.hf.cache import AnyBitCache
from anybit.hf.loading import load_model
from anybit.layers.linear import QuantLinear
from anybit.quantization.learn.generated import written
from anybit.quantization.methods.registry import METHODS, quantize_folder
from anybit.quantization.pipeline.text import tokenized
from rows import RESULTS, Row, add, origin

SCHEMES = ("w3a16g128asym", "w2a16g64asym", "w2a16g32asym", "w3a16g64asym", "w4a16g64asym")
CASES = [
    "w6a6g64asym-xasym:smooth",
    "w4a4g64asym-xasym:smooth_rotate",
    "w6a6g64asym-xasym:smooth_rotate",
    # What the papers compare with and without their kernels, in schemes that we have kernels for.
    *("w2a4:rtn:op", "w4a4:rtn:op", "w4a8:rtn:op", "w6a6:rtn:op", "w4a16g128:rtn:op"),
    *("w4a16g64asym-kv4:rtn", "w4a16g64asym-kv4:gptq", "w4a16g64asym-kv4:distill", "w4a16g64asym-kv2g32:rtn"),
    "float32:rtn",
    *(f"{scheme}:rtn" for scheme in SCHEMES),
    *(f"{scheme}:{method}" for scheme in SCHEMES for method in ("gptq", "distill")),
    *(
        "w4a4:smooth:op",
        "w4a4:rotate:op",
        "w4a4:smooth_rotate:op",
        "w6a6:smooth:op",
        "w6a6:distill:op",
        "w8a8:smooth:op",
    ),
    "w4a16g64asyms24:rtn",
    *(f"{scheme}g64s24:{method}" for scheme in ("w4a16", "w2a16", "w8a16", "w4a8") for method in ("gptq", "distill")),
    *("w4a4g64asym-xasym:rotate", "w1a16g64:distill", "w4a4g64asym-xasym-kv4:smooth_rotate"),
]
KEY = ("case", "scheme", "method", "options")
CASE = "smollm2-135m wikipedia, first half"
FLOAT32, HALF = torch.float32, torch.float16


class Told:
    """Prints progress every ten seconds."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Print it, unless it is too soon."""
        if time.monotonic() - self.last > 10:
            self.last = time.monotonic()
            print(f"# {what} ({done} of {total})", file=sys.stderr, flush=True)


def written_once(model: Path, text: Path, seconds: float) -> list[torch.Tensor]:
    """Sequences of the text's second half, and what the model writes from pieces of them, as many as in ``distill``."""
    loaded = load_model(model, dtype=FLOAT32)
    content = evaluate.read_text(text)
    own = [row for row in tokenized(content[len(content) // 2 :], loaded.tokenizer) if len(row) == 512]
    began, more = time.monotonic(), []
    for rows in written(loaded.model, own, 1 << 40, 512, loaded.model.device):
        more += rows
        if time.monotonic() - began > seconds:
            break
    print(f"# wrote {512 * len(more)} tokens in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return [*own * max(len(more) // (4 * len(own)), 1), *more]


def measure(
    case: str, model: Path, text: Path, scheme: str, method: str, options: Row, op: bool, blocks: Path | None = None,
    news: Path | None = None, sequences: list[torch.Tensor] | None = None,
) -> Row:  # fmt: skip
    """Quantize, reload, evaluate through the layers that users get.

    blocks: a folder of calibrated blocks, shared by methods that begin alike.  sequences: instead of the text.
    """
    content = evaluate.read_text(text)
    cut = len(content) // 2
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "second.txt").write_text(content[cut:], encoding="utf-8")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        folder, bits, learned = model, 16.0, {}
        shared, note = (None, None) if blocks is None else (blocks / scheme, blocks / scheme / "seconds.txt")
        if scheme != "float32":
            given, bits, nested = dict(options), options.get("bits"), options.get("nested", ())
            for name in ("bits", "nested", "written"):
                given.pop(name, None)
            if METHODS[method].calibrated and sequences is not None:
                given |= {"sequences": sequences, "generated_tokens": 0}
            elif METHODS[method].calibrated or bits is not None:
                given["text"] = Path(scratch) / "second.txt"
            if shared is not None and METHODS[method].calibrated:
                given["resume"] = shared
            folder = Path(scratch) / "model"
            saved = quantize_folder(
                model, folder, scheme, method, bits=bits, nested=nested, options=given, progress=Told()
            )
            bits, learned = saved.bits_per_weight, saved.learned
        seconds = time.perf_counter() - started
        print(f"# {scheme} {method}: quantized in {seconds:.1f} s", file=sys.stderr, flush=True)
        if shared is not None and note is not None and shared.is_dir():
            seconds += float(note.read_text()) if note.exists() else 0.0
            note.write_text(str(seconds))
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        found = perplexities(folder, content[:cut], scheme, op)
        print(f"# {scheme} {method}: {found} {learned}", file=sys.stderr, flush=True)
        for width in options.get("nested", ()):
            found[f"perplexity_{width}"] = perplexities(folder, content[:cut], scheme, False, width)["perplexity"]
        if news is not None:
            found |= unseen(model, folder, evaluate.read_text(news), scheme)
    return {
        "case": case, "scheme": scheme, "method": method, "options": options, "bits_per_weight": round(bits, 4),
        **found, "quantize_seconds": round(seconds, 1), "peak_gib": None if peak is None else round(peak, 2),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(), **({"learned": learned} if learned else {}), **origin(),
    }  # fmt: skip


def perplexities(folder: Path, text: str, scheme: str, op: bool, width: int | None = None) -> Row:
    """Perplexity in float32, and optionally in 16 bits: dequantized, and through the kernels."""
    through_cache = "-kv" in scheme
    ways: dict[str, tuple[str | None, torch.dtype]] = {
        "perplexity": (None if scheme == "float32" else "reference-decoded", FLOAT32)
    }
    if through_cache and torch.cuda.is_available():
        ways["perplexity"] = (None, HALF)  # its kernels need 16 bits
    if op:
        ways |= {"perplexity_dequantized": ("reference-decoded", HALF), "perplexity_kernels": (None, HALF)}
    found: Row = {}
    for name, (backend, dtype) in ways.items():
        try:
            loaded = load_model(folder, backend=backend, dtype=dtype, width=width)
            for layer in loaded.model.modules():
                if isinstance(layer, QuantLinear):
                    layer.prepare()
        except KernelError as error:
            found[name.replace("perplexity", "refused")] = str(error)
            continue
        windows = evaluate.windows_of(loaded.tokenizer(text[:100_000]).input_ids, 512, 16)
        cache = None
        if loaded.scheme is not None and loaded.scheme.kv is not None:
            cache = partial(AnyBitCache, loaded.scheme, config=loaded.model.config, capacity=512)
        result = evaluate.perplexity(loaded.model, windows, cache=cache, chunk=16)
        found |= {name: round(result.perplexity, 4), "scored": result.scored}
        del loaded
    return found


def unseen(model: Path, folder: Path, news: str, scheme: str) -> Row:
    """Perplexity on another text, and agreement with the original model on text that it writes itself."""
    other = load_model(model, dtype=FLOAT32)
    rows = evaluate.windows_written_by(other.model, 16, 512)
    ours = load_model(folder, backend=None if scheme == "float32" else "reference-decoded", dtype=FLOAT32)
    windows = evaluate.windows_of(ours.tokenizer(news).input_ids, 512, 16)
    same = evaluate.agreement(ours.model, other.model, rows)
    return {
        "perplexity_news": round(evaluate.perplexity(ours.model, windows).perplexity, 4),
        "divergence": round(same.divergence, 5), "same_token": round(same.same, 5),
    }  # fmt: skip


def known(file: Path, case: str, scheme: str, method: str, options: Row, op: bool) -> bool:
    """Whether a file has a case's row."""
    rows = json.loads(file.read_text()) if file.exists() else []
    wanted = {"case": case, "scheme": scheme, "method": method, "options": options}
    rows = [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]
    return any(not op or "perplexity_kernels" in row or "refused_kernels" in row for row in rows)


def unit(text: str, arguments: argparse.Namespace, file: Path, sequences: list[torch.Tensor] | None) -> None:
    """Measure a case, method by method."""
    scheme, methods, *rest = text.split(":")
    op = rest == ["op"]
    with tempfile.TemporaryDirectory() as scratch:
        for method in methods.split("+"):
            options = dict(arguments.options) | ({} if sequences is None else {"written": arguments.written})
            if arguments.missing and known(file, arguments.case, scheme, method, options, op):
                continue
            blocks = Path(scratch) if "+" in methods else None
            try:
                given = arguments.case, arguments.model, arguments.text
                row = measure(*given, scheme, method, options, op, blocks, arguments.news, sequences)
            except Exception:  # a failed case must not lose the others
                print(f"{scheme}:{method} failed: {traceback.format_exc()}", flush=True)
                continue
            print(json.dumps(row), flush=True)
            add(file, [row], KEY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, help="SCHEME:METHOD[+METHOD][:op]")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--case", default=CASE, help="what the rows call the model and its text")
    parser.add_argument("--news", type=Path, default=None)
    parser.add_argument(
        "--options", type=json.loads, default={}, help="of the method, as JSON; bits: widths are chosen"
    )
    parser.add_argument("--written", type=float, default=None, help="seconds in which all cases' text is written")
    parser.add_argument("--missing", action="store_true", help="only cases that have no row yet")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no case begins")
    parser.add_argument("--output", type=Path, default=None, help="a folder for the rows")
    arguments = parser.parse_args()
    place = arguments.output or RESULTS / ("h200" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    sequences = None
    if arguments.written is not None:
        sequences = written_once(arguments.model, arguments.text, arguments.written)
    for case in arguments.cases:
        if time.monotonic() - started > arguments.seconds:
            break
        unit(case, arguments, place / "quantizers.json", sequences)


if __name__ == "__main__":
    main()
