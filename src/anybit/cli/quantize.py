"""anybit quantize."""

import json
import re
import shlex
import sys
import warnings
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from anybit.cli import options
from anybit.cli.common import errors, megabytes, output, overrides_of, print_json, progress_bar, status
from anybit.errors import OptionError, SchemeError, TextError
from anybit.quantization.methods.registry import METHODS, checked_method, default_method, quantize_folder
from anybit.scheme import Scheme, nested_widths


def quantize(
    model: options.Model,
    out: Annotated[Path, typer.Option("--output", "-o", help="The folder to write to.")],
    scheme: Annotated[
        str, typer.Option("--scheme", "-s", help="The scheme: what is quantized, and how.")
    ] = "w4a16g128",
    method: Annotated[
        str | None,
        typer.Option(
            help=", ".join(f"{name} ({method.summary})" for name, method in METHODS.items())
            + ". Default: distill below 4 bits on a GPU, else rtn.",
            autocompletion=lambda: list(METHODS),
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="A layer, or a pattern of layers, to keep in 16 bits; may be repeated. Default: lm_head."),
    ] = None,
    override: options.Override = None,
    bits: Annotated[
        float | None,
        typer.Option(help="Choose the width of each layer, with at most this many bits per weight; needs --text."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Choose the width of each layer to fit the model into this size (3GiB); needs --text."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="With --memory: reserve a KV cache of this many tokens, in the scheme's format."),
    ] = None,
    nested: Annotated[
        str | None, typer.Option(help="Widths to train with the scheme's own, for --width of other commands: 2,3,4.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", "-t", help="A calibration text: UTF-8, or token ids in a .json file.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Use this many tokens of the text.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="How long a method that learns may take in all (distill on a GPU: 20).")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method; may be repeated.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the output folder if it has only files that anybit wrote.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda, cuda:1 ...; by default a GPU, if there is one, for methods that calibrate on a text, and "
            "the CPU for others."
        ),
    ] = None,
    trust_remote_code: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Quantize a model layer by layer and save it. A failed run leaves no partial output.

    \b
    Examples:
    anybit quantize Qwen/Qwen3-4B -o qwen3-4b-w4
    anybit quantize model.gguf --scheme w3a16g64asym -o model-w3
    anybit quantize ./llama -s w2a16g64asym --method distill --text wikipedia.txt -o llama-w2
    anybit quantize ./llama -s w4a8 --keep lm_head --keep down_proj -o llama-w4a8
    anybit quantize ./llama --override lm_head=w8a16 --override "*.down_proj=w6a16g64" -o llama-mixed
    anybit quantize ./llama -s w4a16g64 --bits 3.5 --text wikipedia.txt -o llama-3.5
    anybit quantize ./llama -s w8a16g64asym --nested 2,3,4 -o llama-nested
    """
    parsed, others = Scheme.parse(scheme), overrides_of(override)
    _check_bits(bits, parsed)
    size = None if memory is None else _bytes(memory)
    widths = [] if nested is None else _widths(nested, parsed)
    from anybit.checkpoints.source import local_folder
    from anybit.device import checked_device

    device = None if device is None else checked_device(device)
    likely = method or default_method(parsed, bits or min(widths, default=None), device)
    how = _options(likely, text, {"tokens": tokens, "minutes": minutes, "device": device}, settings or [])
    for each in dict.fromkeys([parsed, *map(Scheme.parse, others.values())]):
        _say_if_nothing_runs(each)
    with ExitStack() as stack:
        with status(f"Reading {model}"):
            source = stack.enter_context(local_folder(model, trust_remote_code))
        with progress_bar("Quantizing") as update:
            try:
                saved = quantize_folder(
                    source, out, parsed, method, keep, overrides=others, bits=bits, memory=size, context=context,
                    nested=widths, overwrite=overwrite, progress=update, options=how,
                    trust_remote_code=trust_remote_code,
                )  # fmt: skip
            except KeyboardInterrupt:
                errors.print(_how_to_go_on(likely, how, out))
                raise
    if as_json:
        print_json(asdict(saved))
        return
    speed = saved.weights / saved.seconds / 1e6
    (first, count), *rest = saved.schemes.items()
    layers = ", ".join([f"{count} layers in {first}", *(f"{count} in {other}" for other, count in rest)])
    output.print(
        f"saved {saved.folder}: {megabytes(saved.bytes_before)} -> {megabytes(saved.bytes_after)}; "
        f"{layers}, {saved.bits_per_weight:.2f} bits per weight; "
        f"{saved.seconds:.1f} s, {speed:.3g} million weights/s"
    )
    if how := saved.learned:
        output.print(
            f"learned from {how['tokens'] / 1e6:.3g} million tokens in {how['seconds']:.0f} s, "
            f"{how['seconds_starting']:.0f} of them to begin; wrote {how['tokens_written'] / 1e6:.3g} million in "
            f"{how['seconds_writing']:.0f} s"
        )
    if saved.experts:
        output.print(
            f"{saved.experts / 1e6:.1f} million expert weights are not quantized, and count in the bits per weight"
        )
    if saved.beside:
        output.print(f"only the language model is quantized, not {', '.join(saved.beside)}")


def _say_if_nothing_runs(scheme: Scheme) -> None:
    """Warn before quantizing, rather than after an hour, if no kernel runs a scheme."""
    import torch

    from anybit.choose.families import FAMILIES
    from anybit.choose.space import LinearProblem
    from anybit.device import Device

    here = torch.cuda.is_available()
    device = Device.of(torch.empty(0, device="cuda")) if here else Device.named("sm_90a")
    problem = LinearProblem(1, 4096, 4096, scheme.weights, scheme.activations, device=device)
    reasons = {family.why_not(problem) for family in FAMILIES.values()}
    if None not in reasons:
        gpu = f"{'this GPU' if here else 'an H100 or H200'} ({device.arch})"
        warnings.warn(
            f"no kernel runs {scheme} on {gpu}: the model will run on a CPU, and on a GPU only with "
            "--backend reference-packed, which is slow; docs/schemes.md says which schemes have kernels",
            stacklevel=2,
        )


def _how_to_go_on(method: str, how: dict[str, Any], out: Path) -> str:
    """What to tell who interrupted a run."""
    if not METHODS[method].calibrated:
        return "interrupted; nothing was saved"
    if "resume" in how:
        return f"interrupted; the same command goes on after the blocks in {how['resume']}"
    again = shlex.join(["anybit", *sys.argv[1:], "--set", f"resume={out}-blocks"])
    return f"interrupted; nothing was saved. This keeps finished blocks, and goes on if it is run again:\n{again}"


def _check_bits(bits: float | None, scheme: Scheme) -> None:
    """Raise OptionError for a budget that no width from 2 to 8 meets, whatever the model."""
    if bits is None:
        return
    least, most = (replace(scheme.weights, bits=width).bits_per_weight for width in (2, 8))
    most += 0.1 if scheme.weights.group is None else 0  # scales of rows, by their length
    if not least <= bits <= most:
        raise OptionError(
            f"--bits {bits:g} is out of reach: layers of 2 to 8 bits, like {scheme} otherwise, take {least:.3g} to "
            f"{most:.3g} bits a weight, scales included; without --bits all layers take the width of --scheme"
        )


def _widths(text: str, scheme: Scheme) -> list[int]:
    """The widths of ``--nested``. Raises SchemeError for anything but whole numbers that the scheme allows."""
    try:
        widths = [int(word) for word in text.split(",")]
    except ValueError:
        raise SchemeError(f"--nested {text!r} is not understood: write widths, such as 2,3,4") from None
    return nested_widths(scheme.weights, widths)


def _bytes(text: str) -> float:
    """The bytes of a size such as 3GiB, 900MB or 5e8. Raises OptionError for anything else."""
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*(?:([KMGT])(i?)B?|B)?\s*", text, re.IGNORECASE)
    try:
        count = float(match[1]) if match else 0.0
    except ValueError:
        count = 0.0
    if match is None or not count:
        raise OptionError(f"--memory {text!r} is not a size: write 3GiB, 900MB or a number of bytes")
    power = " KMGT".index((match[2] or " ").upper())
    return count * float(1024 if match[3] else 1000) ** power


def _options(
    method: str, text: Path | None, given: dict[str, float | str | None], settings: list[str]
) -> dict[str, Any]:
    """Options of a job: ``text`` (a path), others as given, and the method's settings, parsed as JSON if possible."""
    if METHODS[checked_method(method)].calibrated and method != "distill" and text is None:
        raise TextError(f"method {method} calibrates on a text: name a file with --text")
    found: dict[str, Any] = {name: value for name, value in {"text": text, **given}.items() if value is not None}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise SchemeError(f"--set {setting!r} is not understood: write NAME=VALUE")
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[name.replace("-", "_")] = value
    return found
