"""anybit generate, anybit chat."""

import sys
import time
from typing import Annotated, Any

import torch
import typer
from transformers import TextStreamer

from anybit.cli.common import (
    AllowOption,
    BackendOption,
    DeviceOption,
    JsonOption,
    Model,
    SchemeOption,
    errors,
    print_json,
    status,
)
from anybit.errors import TextError
from anybit.integrations.fuse import accelerate
from anybit.integrations.graph import serves
from anybit.integrations.loading import Loaded, load_model
from anybit.scheme import Scheme

MaxTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="The most tokens to generate.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")]
Seed = Annotated[int, typer.Option(help="Of the random choices, where the temperature is above 0.")]


class _Printer(TextStreamer):  # type: ignore[misc]
    """Prints text as its tokens come, and keeps the time."""

    def __init__(self, tokenizer: Any, silent: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.silent = silent
        self.first: float | None = None
        self.text = ""
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then one token after another."""
        if not self._prompt and self.first is None:
            self.first = time.perf_counter()
        self._prompt = False
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Text whose words are complete."""
        self.text += text
        if not self.silent:
            sys.stdout.write(text + ("\n" if stream_end else ""))
            sys.stdout.flush()


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to answer, or to go on from with --raw.")],
    scheme: SchemeOption = None,
    max_new_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as it is, without the model's chat template.")
    ] = False,
    backend: BackendOption = None,
    allow: AllowOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text, printed as it comes.

    [bold]Examples[/bold]

    \b
    anybit generate smollm2-w4 --prompt "Why is the sky blue?"
    anybit generate model.gguf --scheme w3a16g64asym -p "Once upon a time" --raw -n 200
    """
    loaded = _load(model, scheme, backend, device)
    messages = [{"role": "user", "content": prompt}]
    text, figures = _answer(loaded, prompt if raw else messages, max_new_tokens, temperature, seed, silent=as_json)
    if as_json:
        print_json({"model": model, "scheme": _scheme_of(loaded), "prompt": prompt, "text": text, **figures})
    else:
        errors.print(_speed(loaded, figures), style="dim", markup=False)


def chat(
    model: Model,
    scheme: SchemeOption = None,
    max_new_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    backend: BackendOption = None,
    allow: AllowOption = None,
    device: DeviceOption = None,
) -> None:
    """Talk with a model. An empty line, /quit or the end of the input ends the conversation.

    [bold]Examples[/bold]

    \b
    anybit chat smollm2-w4
    anybit chat ./llama --scheme w4a16g128 --system "Answer in rhymes." --temperature 0.7
    """
    loaded = _load(model, scheme, backend, device)
    if not loaded.tokenizer.chat_template:
        raise TextError(f"{model} has no chat template, so it cannot chat; use anybit generate --raw")
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        errors.print("> ", end="", style="bold")
        line = sys.stdin.readline()
        if line.strip() in ("", "/quit", "/exit"):
            return
        messages.append({"role": "user", "content": line.strip()})
        text, figures = _answer(loaded, messages, max_new_tokens, temperature, seed, silent=False)
        messages.append({"role": "assistant", "content": text})
        errors.print(_speed(loaded, figures), style="dim", markup=False)


def _load(model: str, scheme: str | None, backend: str | None, device: str | None) -> Loaded:
    parsed = None if scheme is None else Scheme.parse(scheme)
    with status(f"Loading {model}" + (f" in {parsed}" if parsed else "")):
        loaded = load_model(model, parsed, backend=backend, device=device)
        if loaded.model.device.type == "cuda":
            accelerate(loaded.model)
        return loaded


def _answer(
    loaded: Loaded,
    prompt: str | list[dict[str, str]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    silent: bool,
) -> tuple[str, dict[str, Any]]:
    """The text, and what it took: tokens of prompt and answer, seconds, tokens a second after the first."""
    tokenizer, model = loaded.tokenizer, loaded.model
    if isinstance(prompt, list) and not tokenizer.chat_template:
        prompt = prompt[-1]["content"]
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    ids = inputs["input_ids"].to(model.device)
    if not ids.numel():
        raise TextError("the prompt has no tokens: write something to go on from")
    torch.manual_seed(seed)
    printer = _Printer(tokenizer, silent)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling["temperature"] = temperature
    if model.device.type == "cuda" and serves(model):
        sampling["cache_implementation"] = "static"
    start = time.perf_counter()
    with torch.inference_mode():
        result = model.generate(
            ids,
            attention_mask=inputs["attention_mask"].to(model.device),
            max_new_tokens=max_new_tokens,
            streamer=printer,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
        )
    end = time.perf_counter()
    count = result.shape[1] - ids.shape[1]
    first = printer.first or end
    figures = {
        "prompt_tokens": ids.shape[1],
        "new_tokens": count,
        "seconds": end - start,
        "first_token_seconds": first - start,
        "tokens_per_second": (count - 1) / (end - first) if count > 1 else 1 / (end - start),
    }
    return printer.text, figures


def _scheme_of(loaded: Loaded) -> str | None:
    return None if loaded.scheme is None else str(loaded.scheme)


def _speed(loaded: Loaded, figures: dict[str, Any]) -> str:
    device = loaded.model.device.type
    return (
        f"{figures['new_tokens']} tokens, {figures['tokens_per_second']:.1f} tokens/s after the first "
        f"({figures['first_token_seconds']:.2f} s), {_scheme_of(loaded) or 'not quantized'} on {device}"
    )
