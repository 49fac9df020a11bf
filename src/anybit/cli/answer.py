"""Behind ``anybit generate`` and ``anybit chat``: load a model, stream the answer to a prompt, and time it."""

import contextlib
import signal
import time
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from transformers import TextStreamer

from anybit.cli.common import in_short, stdout
from anybit.errors import TextError
from anybit.hf import template
from anybit.hf.fuse import accelerate
from anybit.hf.graph import serves
from anybit.hf.loading import Loaded
from anybit.models.modules import check_tokens

# Control characters are escaped on a terminal only; files get the model's text unchanged.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class _Stopped(Exception):  # noqa: N818  control flow, not an error
    """The user stopped an answer."""


class _Printer(TextStreamer):  # type: ignore[misc]
    """Prints text as its tokens arrive, and records their number and the time of the first."""

    def __init__(self, tokenizer: Any, silent: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.silent = silent
        self.first: float | None = None
        self.count = 0
        self.text = ""
        self.stop = False
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, then the tokens one by one. Raises _Stopped after Ctrl-C."""
        if not self._prompt:
            self.first = self.first or time.perf_counter()
            self.count += value.numel()
        self._prompt = False
        super().put(value)
        if self.stop:
            raise _Stopped

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Receive text up to the last complete word."""
        self.text += text
        if not self.silent:
            shown = text.translate(_CONTROLS) if stdout.isatty() else text
            stdout.write(shown + ("\n" if stream_end else ""))
            stdout.flush()


@contextlib.contextmanager
def _stopping(printer: _Printer) -> Iterator[None]:
    """Let Ctrl-C end the answer after its next token, and a second one the program."""

    def stop(number: int, frame: FrameType | None) -> None:
        if printer.stop:
            raise KeyboardInterrupt
        printer.stop = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    except _Stopped:
        printer.end()
    finally:
        signal.signal(signal.SIGINT, before)


def ready(loaded: Loaded) -> Loaded:
    """Accelerate a model for generation on a GPU."""
    if loaded.model.device.type == "cuda":
        accelerate(loaded.model)
    return loaded


def answer(
    loaded: Loaded, prompt: str | list[dict[str, str]], max_new_tokens: int, temperature: float, top_p: float | None,
    seed: int, silent: bool, stoppable: bool = False,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """(text, figures): tokens of prompt and answer, seconds, seconds to the first token, tokens per second after it.

    stoppable: Ctrl-C ends the answer instead of the program.  Raises TextError for a prompt that is empty or too long.
    """
    tokenizer, model = loaded.tokenizer, loaded.model
    if isinstance(prompt, list) and not tokenizer.chat_template:
        prompt = prompt[-1]["content"]
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        text = template.render(tokenizer.apply_chat_template, prompt, loaded.name)
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    ids = inputs["input_ids"].to(model.device)
    if not ids.numel():
        raise TextError("the prompt is empty: write some text to continue")
    check_tokens(model, inputs["input_ids"], loaded.name)
    max_new_tokens = _fitting(loaded, ids.shape[1], max_new_tokens)
    torch.manual_seed(seed)
    printer = _Printer(tokenizer, silent)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature} | ({} if top_p is None else {"top_p": top_p})
    if model.device.type == "cuda" and serves(model):
        sampling["cache_implementation"] = "static"
    start = time.perf_counter()
    with torch.inference_mode(), _stopping(printer) if stoppable else contextlib.nullcontext():
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        mask = inputs["attention_mask"].to(model.device)
        model.generate(
            ids, attention_mask=mask, max_new_tokens=max_new_tokens, streamer=printer, pad_token_id=pad, **sampling
        )
    end = time.perf_counter()
    count, first = printer.count, printer.first or end
    figures = {
        "prompt_tokens": ids.shape[1],
        "new_tokens": count,
        "seconds": end - start,
        "first_token_seconds": first - start,
        "stopped": printer.stop,
        "tokens_per_second": (count - 1) / (end - first) if count > 1 else 1 / (end - start),
    }
    return printer.text, figures


def _fitting(loaded: Loaded, prompt: int, new: int) -> int:
    """How many of ``new`` tokens to generate; warns if they exceed the model's context length.

    Raises TextError if the prompt alone fills a context that cannot be exceeded.
    """
    positions = loaded.positions
    if positions is None or prompt + new <= positions:
        return new
    made_for = f"the {positions} positions that {loaded.name} was made for (max_position_embeddings in its config.json)"
    told = f"{prompt} tokens of prompt and up to {new} new ones are more than {made_for}"
    if not loaded.positions_end:
        warnings.warn(f"{told}: text beyond them may make no sense; --max-new-tokens limits the answer", stacklevel=3)
        return new
    if prompt >= positions:
        raise TextError(f"a prompt of {prompt} tokens leaves no room in {made_for}: shorten it")
    warnings.warn(f"{told}, and cannot take more: the answer ends after {positions - prompt} tokens", stacklevel=3)
    return positions - prompt


def speed(loaded: Loaded, figures: dict[str, Any]) -> str:
    """The speed of an answer, in one line."""
    device = loaded.model.device.type
    other = getattr(getattr(loaded.model.config, "quantization_config", None), "quant_method", None)
    kind = in_short(loaded.schemes) or ("not quantized" if other is None else getattr(other, "value", other))
    stopped = "stopped: " if figures["stopped"] else ""
    return (
        f"{stopped}{figures['new_tokens']} tokens, {figures['tokens_per_second']:.1f} tokens/s after the first "
        f"({figures['first_token_seconds']:.2f} s), {kind} on {device}"
    )
