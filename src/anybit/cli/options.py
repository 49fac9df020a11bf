"""Options that several commands have, as types of their arguments."""

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="A folder, a Hugging Face hub name, or a GGUF file.")]
Scheme = Annotated[str | None, typer.Option("--scheme", "-s", help="Quantize while loading, for example w4a16g128.")]
Override = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        metavar="LAYER=SCHEME",
        help="Another scheme for a layer, or for all that match a pattern (*.down_proj=w6a16g64); may be repeated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def _backends() -> list[str]:
    from anybit.ops import backends

    return list(backends)


Backend = Annotated[
    str | None,
    typer.Option(
        help="The backend that runs the quantized layers; by default the first one that can.", autocompletion=_backends
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python files that the model brings; otherwise none is run.")
]
Dequantize = Annotated[
    bool, typer.Option("--dequantize", help="Run quantized layers as 16-bit floats: for codes that no kernel runs.")
]
Width = Annotated[
    int | None, typer.Option(min=1, help="Of a nested model (quantize --nested), the bits of its weights to take.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU if there is one.")]
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
