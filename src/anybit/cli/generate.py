"""anybit generate, anybit chat."""

import sys
from typing import Annotated

import typer

from anybit.cli.common import (
    BackendOption,
    DequantizeOption,
    DeviceOption,
    JsonOption,
    Model,
    OverrideOption,
    SchemeOption,
    TrustOption,
    errors,
    overrides_of,
    print_json,
)
from anybit.errors import TextError
from anybit.scheme import Scheme

MaxTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Generate at most this many tokens.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, max=100.0, help="Sampling temperature; 0 always takes the most likely token.")
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        min=0.0,
        max=1.0,
        help="Sample from the likeliest tokens whose probabilities sum to this; by default the model's setting.",
    ),
]
Seed = Annotated[
    int, typer.Option(min=0, max=2**64 - 1, help="Seed of the random choices; used when the temperature is above 0.")
]


def generate(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The prompt; with --raw the text to continue.")],
    scheme: SchemeOption = None,
    override: OverrideOption = None,
    max_new_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    seed: Seed = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Pass the prompt unchanged, without the model's chat template.")
    ] = False,
    backend: BackendOption = None,
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
    dequantize: DequantizeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Generate text and print it as it comes.

    \b
    Examples:
    anybit generate smollm2-w4 --prompt "Why is the sky blue?"
    anybit generate model.gguf --scheme w3a16g64asym -p "Once upon a time" --raw -n 200
    """
    parsed, others = None if scheme is None else Scheme.parse(scheme), overrides_of(override)
    _refuse_without_effect(top_p, temperature)
    _refuse_broken("--prompt", prompt)
    from anybit.cli import answer

    loaded = answer.load(model, parsed, backend, device, trust_remote_code, dequantize, others)
    asked = prompt if raw else [{"role": "user", "content": prompt}]
    text, figures = answer.answer(loaded, asked, max_new_tokens, temperature, top_p, seed, silent=as_json)
    if as_json:
        print_json({"model": model, "scheme": answer.scheme_of(loaded), "prompt": prompt, "text": text, **figures})
    else:
        errors.print(answer.speed(loaded, figures), style="dim", markup=False)


def chat(
    model: Model,
    scheme: SchemeOption = None,
    override: OverrideOption = None,
    max_new_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
    dequantize: DequantizeOption = False,
) -> None:
    """Chat with a model. Ctrl-C stops an answer; an empty line, /quit or the end of the input ends the conversation.

    \b
    Examples:
    anybit chat smollm2-w4
    anybit chat ./llama --scheme w4a16g128 --system "Answer in rhymes." --temperature 0.7
    """
    parsed, others = None if scheme is None else Scheme.parse(scheme), overrides_of(override)
    _refuse_without_effect(top_p, temperature)
    _refuse_broken("--system", system or "")
    from anybit.cli import answer

    loaded = answer.load(model, parsed, backend, device, trust_remote_code, dequantize, others)
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
        errors.print(answer.speed(loaded, figures), style="dim", markup=False)


def _refuse_without_effect(top_p: float | None, temperature: float) -> None:
    if 0 < temperature < 1e-4:
        raise typer.BadParameter(
            "below 0.0001 scores may overflow: use 0, which always takes the most likely token",
            param_hint="--temperature",
        )
    if top_p is not None and temperature == 0:
        raise typer.BadParameter(
            "it has no effect at a temperature of 0: set --temperature, or leave it out",
            param_hint="--top-p",
        )


def _refuse_broken(what: str, text: str) -> None:
    """Raise TextError for input that is not UTF-8: Python decodes it to surrogates, which tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(f"{what} is not UTF-8: {text[error.start]!r} at character {error.start}") from None
