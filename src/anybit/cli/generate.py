"""anybit generate, anybit chat."""

import sys
from typing import Annotated

import typer

from anybit.cli import options
from anybit.cli.common import errors, in_short, loader, print_json
from anybit.errors import TextError


def generate(
    model: options.Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The prompt; with --raw the text to continue.")],
    scheme: options.Scheme = None,
    width: options.Width = None,
    override: options.Override = None,
    max_new_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    seed: options.Seed = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Pass the prompt unchanged, without the model's chat template.")
    ] = False,
    backend: options.Backend = None,
    device: options.Device = None,
    trust_remote_code: options.Trust = False,
    dequantize: options.Dequantize = False,
    as_json: options.Json = False,
) -> None:
    """Generate text and print it as it comes.

    \b
    Examples:
    anybit generate smollm2-w4 --prompt "Why is the sky blue?"
    anybit generate model.gguf --scheme w3a16g64asym -p "Once upon a time" --raw -n 200
    """
    load = loader(scheme, override, backend, device, trust_remote_code, dequantize, width)
    _refuse_without_effect(top_p, temperature)
    _refuse_broken("--prompt", prompt)
    from anybit.cli import answer

    loaded = answer.ready(load(model))
    asked = prompt if raw else [{"role": "user", "content": prompt}]
    text, figures = answer.answer(loaded, asked, max_new_tokens, temperature, top_p, seed, silent=as_json)
    if as_json:
        scheme = in_short(loaded.schemes)
        print_json({"model": model, "scheme": scheme, "prompt": prompt, "text": text, **figures})
    else:
        errors.print(answer.speed(loaded, figures), style="dim")


def chat(
    model: options.Model,
    scheme: options.Scheme = None,
    width: options.Width = None,
    override: options.Override = None,
    max_new_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    seed: options.Seed = 0,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    backend: options.Backend = None,
    device: options.Device = None,
    trust_remote_code: options.Trust = False,
    dequantize: options.Dequantize = False,
) -> None:
    """Chat with a model. Ctrl-C stops an answer; an empty line, /quit or the end of the input ends the conversation.

    \b
    Examples:
    anybit chat smollm2-w4
    anybit chat ./llama --scheme w4a16g128 --system "Answer in rhymes." --temperature 0.7
    """
    load = loader(scheme, override, backend, device, trust_remote_code, dequantize, width)
    _refuse_without_effect(top_p, temperature)
    _refuse_broken("--system", system or "")
    from anybit.cli import answer

    loaded = answer.ready(load(model))
    if not loaded.tokenizer.chat_template:
        raise TextError(f"{model} has no chat template, so it cannot chat; use anybit generate --raw")
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        errors.print("> ", end="", style="bold")
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise TextError(f"standard input is not UTF-8: {error}") from None
        _refuse_broken("standard input", line)
        if line.strip() in ("", "/quit", "/exit"):
            return
        messages.append({"role": "user", "content": line.strip()})
        text, figures = answer.answer(
            loaded, messages, max_new_tokens, temperature, top_p, seed, silent=False, stoppable=True
        )
        messages.append({"role": "assistant", "content": text})
        errors.print(answer.speed(loaded, figures), style="dim")


def _refuse_without_effect(top_p: float | None, temperature: float) -> None:
    if 0 < temperature < 1e-4:
        raise typer.BadParameter(
            "below 0.0001 scores may overflow: use 0, which always takes the most likely token",
            param_hint="--temperature",
        )
    if top_p is not None and temperature == 0:
        raise typer.BadParameter(
            "it has no effect at a temperature of 0: set --temperature, or leave it out", param_hint="--top-p"
        )


def _refuse_broken(what: str, text: str) -> None:
    """Raise TextError for input that is not UTF-8: Python decodes it to surrogates, which tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(f"{what} is not UTF-8: {text[error.start]!r} at character {error.start}") from None
