"""anybit eval."""

import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.cli import options
from anybit.cli.common import errors, in_short, loader, output, print_json, print_table, progress_bar, status
from anybit.errors import LayerError, OptionError, TextError

if TYPE_CHECKING:
    from anybit.hf.cache import AnyBitCache
    from anybit.hf.loading import Loaded


_CONTEXT, _WRITTEN = 512, 16
"""By default: tokens in a window, and windows that a baseline writes."""


def evaluate(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="Folders, hub names or GGUF files; several are compared.")
    ],
    text: Annotated[
        Path | None, typer.Option("--text", "-t", help="A text file, UTF-8; by default the baseline writes the text.")
    ] = None,
    scheme: options.Scheme = None,
    width: options.Width = None,
    override: options.Override = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens in a window.")] = _CONTEXT,
    windows: Annotated[
        int | None,
        typer.Option(min=1, help=f"Number of windows; by default as many as the text allows, or {_WRITTEN}."),
    ] = None,
    bos: Annotated[
        bool | None, typer.Option(help="Begin every window with the BOS token; by default as the tokenizer does.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="A model to compare with: same next token, and KL divergence.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32, help="Of the text that the baseline writes.")] = 0,
    tasks: Annotated[
        str | None, typer.Option(help="Instead, zero-shot tasks of lm-eval: arc_easy,hellaswag,own.yaml.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions of a task.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Plot perplexity over bits per weight into this file (.png, .svg, .pdf).")
    ] = None,
    backend: options.Backend = None,
    device: options.Device = None,
    trust_remote_code: options.Trust = False,
    dequantize: options.Dequantize = False,
    as_json: options.Json = False,
) -> None:
    """Measure perplexity on a text, and compare models; without a text on what the baseline writes.

    \b
    Examples:
    anybit eval smollm2-w4 --text wiki.txt
    anybit eval llama-w4 llama-w3 ./llama -t wiki.txt --picture schemes.svg
    anybit eval ./llama --scheme w3a16g64asym -t wiki.txt --windows 16 --baseline ./llama --json
    anybit eval llama-w4 --baseline ./llama
    anybit eval ./llama llama-w4 --tasks arc_easy,hellaswag
    """
    load = loader(scheme, override, backend, device, trust_remote_code, dequantize, width)
    if picture is not None:
        _check_picture(picture)
    if tasks is not None:
        unused = {"text": text, "baseline": baseline, "picture": picture, "windows": windows, "bos": bos}
        unused |= {"context": None if context == _CONTEXT else context, "seed": seed or None}
        if given := [f"--{name}" for name, value in unused.items() if value is not None]:
            raise OptionError(f"--tasks reads no text of yours: leave out {', '.join(given)}")
        names = [name for name in tasks.split(",") if name]
        _show([_of_tasks(load(model), names, limit) for model in models], as_json)
        return
    if limit is not None:
        raise OptionError("--limit is of the questions of --tasks; --windows limits a text")
    from anybit.hf import evaluate as measure
    from anybit.hf.loading import stored_scheme
    from anybit.models.modules import check_tokens

    content, written, other = None if text is None else measure.read_text(text), None, None
    if content is None and (baseline is None or stored_scheme(baseline) is not None):
        raise TextError(
            "eval needs a text: name a file with --text, or with --baseline a model in 16 bits, which then writes one"
        )
    if content is None and bos is False:
        raise OptionError("--no-bos needs a text: what a baseline writes begins with BOS; name a file with --text")
    if baseline is not None:
        # A backend only applies to quantized layers, which the baseline may not have.
        theirs = None if backend is None or stored_scheme(baseline) is None else backend
        other = loader(None, None, theirs, device, trust_remote_code)(baseline)
        _refuse_beyond(other, context)
        if content is None:
            with status(f"{baseline} writes a text"):
                written = measure.windows_written_by(other.model, windows or _WRITTEN, context, seed)
    found: list[dict[str, Any]] = []
    rows: Any = None
    for model in models:
        loaded = load(model)
        _refuse_beyond(loaded, context)
        begun = content is None
        if content is not None:
            ids = loaded.tokenizer(content, add_special_tokens=False)["input_ids"]
            for each in (loaded, *([other] if other else [])):
                check_tokens(each.model, ids, each.name)
            first = _bos(loaded.tokenizer, bos)
            begun, before, rows = first is not None, rows, measure.windows_of(ids, context, windows, first)
            if before is not None and not rows.equal(before):
                message = f"{model} splits the text into other tokens: its perplexity does not compare"
                warnings.warn(message, stacklevel=2)
        elif other is not None and loaded.tokenizer.get_vocab() != other.tokenizer.get_vocab():
            raise TextError(f"{baseline} wrote the text, and {model} has another vocabulary: name a text with --text")
        else:
            rows = written
        cache = _cache(loaded, context)
        with progress_bar(f"Windows of {model}", counted=True) as update:
            result = measure.perplexity(loaded.model, rows, begun, partial(update, f"windows of {model}"), cache)
        figures: dict[str, Any] = {
            "model": model,
            "scheme": in_short(loaded.schemes),
            "bits_per_weight": measure.bits_per_weight(loaded.model),
            "text": f"written by {baseline}" if text is None else str(text),
            **asdict(result),
        }
        if other is not None:
            with progress_bar(f"Comparing {model}", counted=True) as update:
                tell = partial(update, f"comparing {model}")
                compared = measure.agreement(loaded.model, other.model, rows, tell, cache, _cache(other, context))
            figures |= {"baseline": baseline, "same_token": compared.same, "same_token_error": compared.same_error}
            figures |= {"divergence": compared.divergence, "divergence_error": compared.divergence_error}
        found.append(figures)
        del loaded  # before the next one is loaded
    if picture is not None:
        _draw(picture, found)
    _show(found, as_json)


def _of_tasks(loaded: "Loaded", tasks: list[str], limit: int | None) -> dict[str, Any]:
    from anybit.hf.tasks import accuracies

    if loaded.scheme is not None and loaded.scheme.kv is not None:
        warnings.warn(f"--tasks reads {loaded.name} without its {loaded.scheme.kv} cache", stacklevel=2)
    with status(f"Tasks of {loaded.name}"):
        results = [asdict(result) for result in accuracies(loaded, tasks, limit)]
    return {"model": loaded.name, "scheme": in_short(loaded.schemes), "tasks": results}


def _show(found: list[dict[str, Any]], as_json: bool) -> None:
    """Print the figures of models: of one on a text as sentences, of others as a table."""
    first = found[0]
    rows = [["model", "scheme"], *([one["model"], one["scheme"] or "-"] for one in found)]
    if as_json:
        print_json(first if len(found) == 1 else {"models": found})
    elif "tasks" in first:
        rows[0] += [f"{task['task']} ({task['questions']})" for task in first["tasks"]]
        for row, one in zip(rows[1:], found, strict=True):
            row += [_within(task["value"], task["error"], ".1%") for task in one["tasks"]]
        print_table(rows)
    elif len(found) == 1:
        output.print(
            f"perplexity {first['perplexity']:.2f} over {_windows(first)}; "
            f"{first['bits_per_weight']:.2f} bits per weight; {first['seconds']:.1f} s"
        )
        if "baseline" in first:
            output.print(
                f"same next token as {first['baseline']} in "
                f"{_within(first['same_token'], first['same_token_error'], '.1%')} of positions; "
                f"KL divergence {_within(first['divergence'], first['divergence_error'], '.4f')} nats"
            )
    else:
        compared = "baseline" in first
        rows[0] += ["bits per weight", "perplexity", *(["same token", "KL, nats"] if compared else [])]
        for row, one in zip(rows[1:], found, strict=True):
            row += [f"{one['bits_per_weight']:.2f}", f"{one['perplexity']:.2f}"]
            for name, form in (("same_token", ".1%"), ("divergence", ".4f")) if compared else ():
                row.append(_within(one[name], one[f"{name}_error"], form))
        print_table(rows)
        against = f"; same token and KL divergence against {first['baseline']}" if compared else ""
        output.print(f"\n{_windows(found[-1])}{against}")


def _within(value: float, error: float | None, form: str) -> str:
    """A figure and its standard error."""
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form}}")


def _windows(one: dict[str, Any]) -> str:
    told = f"{one['scored']} scored, {'with' if one['bos'] else 'without'} BOS"
    return f"{one['windows']} windows of {one['context']} tokens ({told})"


def _check_picture(path: Path) -> None:
    """Check before measuring. Raises OptionError without matplotlib, or for a file that it cannot write."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise OptionError("--picture draws with matplotlib: pip install 'anybit[plots]'") from None
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise OptionError(f"--picture {path} must end in one of {', '.join('.' + kind for kind in kinds)}")
    if not path.parent.is_dir():
        raise OptionError(f"--picture {path}: there is no folder {path.parent}")


def _draw(path: Path, found: list[dict[str, Any]]) -> None:
    """Plot perplexity over bits per weight."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for one in found:
        axes.scatter(one["bits_per_weight"], one["perplexity"])
        label = one["scheme"] or Path(one["model"]).name
        axes.annotate(label, (one["bits_per_weight"], one["perplexity"]), (5, 5), textcoords="offset points")
    axes.set(xlabel="bits per weight", ylabel="perplexity")
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    figure.savefig(path)
    errors.print(f"drew {path}")


def _refuse_beyond(loaded: "Loaded", context: int) -> None:
    """Raise TextError for windows beyond the model's context length, where perplexity is meaningless."""
    if loaded.positions is not None and context > loaded.positions:
        raise TextError(
            f"--context {context} is more than the {loaded.positions} positions that {loaded.name} was made for "
            f"(max_position_embeddings in its config.json): take --context {loaded.positions} or less"
        )


def _cache(loaded: "Loaded", context: int) -> "Callable[[], AnyBitCache] | None":
    """A factory for a window's KV cache, if the scheme has a KV format. Raises LayerError if it is unusable."""
    from anybit.hf.cache import AnyBitCache
    from anybit.hf.graph import why_not

    if loaded.scheme is None or loaded.scheme.kv is None:
        return None
    if (reason := why_not(loaded.model, loaded.scheme.kv)) is not None:
        kv = loaded.scheme.kv
        raise LayerError(f"the KV format {kv} cannot serve {loaded.name}: {reason}; leave out -{kv}")
    return partial(AnyBitCache, loaded.scheme, config=loaded.model.config, capacity=context)


def _bos(tokenizer: Any, wanted: bool | None) -> int | None:
    """The BOS token that windows begin with, or None; by default as the tokenizer does."""
    token: int | None = tokenizer.bos_token_id
    if wanted is None:
        ids = tokenizer("a")["input_ids"]
        wanted = token is not None and bool(ids) and ids[0] == token
    if wanted and token is None:
        raise TextError("--bos: this model's tokenizer has no BOS token; leave --bos out")
    return token if wanted else None
