"""anybit quantize."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from anybit.checkpoints import local_folder
from anybit.cli.common import JsonOption, Model, megabytes, output, print_json, progress_bar, status
from anybit.quantize.methods import METHODS, quantize_folder
from anybit.scheme import Scheme


def quantize(
    model: Model,
    out: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    scheme: Annotated[str, typer.Option("--scheme", "-s", help="What is quantized, and how.")] = "w4a16g128",
    method: Annotated[
        str, typer.Option(help="; ".join(f"{name}: {method.summary}" for name, method in METHODS.items()))
    ] = "rtn",
    keep: Annotated[
        list[str] | None,
        typer.Option(help="A layer, or a pattern of layers, to leave as it is; may be repeated. Default: lm_head."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it exists.")] = False,
    as_json: JsonOption = False,
) -> None:
    r"""Quantize a model and save it: one layer at a time, and nothing half-written is left if it fails.

    [bold]Examples[/bold]

    \b
    anybit quantize Qwen/Qwen3-4B -o qwen3-4b-w4
    anybit quantize model.gguf --scheme w3a16g64asym -o model-w3
    anybit quantize ./llama -s w4a8 --keep lm_head --keep down_proj -o llama-w4a8
    """
    parsed = Scheme.parse(scheme)
    with ExitStack() as stack:
        with status(f"Reading {model}"):
            source = stack.enter_context(local_folder(model))
        with progress_bar("Quantizing") as update:
            saved = quantize_folder(source, out, parsed, method, keep, overwrite=overwrite, progress=update)
    if as_json:
        print_json(asdict(saved))
        return
    speed = saved.weights / saved.seconds / 1e6
    output.print(
        f"saved {saved.folder}: {megabytes(saved.bytes_before)} -> {megabytes(saved.bytes_after)}; "
        f"{saved.layers} layers in {saved.scheme}, {saved.bits_per_weight:.2f} bits per weight; "
        f"{saved.seconds:.1f} s, {speed:.0f} million weights/s",
        markup=False,
    )
