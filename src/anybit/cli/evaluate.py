"""anybit eval."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    output,
    overrides_of,
    print_json,
    progress_bar,
    status,
)
from anybit.errors import LayerError, TextError
from anybit.scheme import Scheme

if TYPE_CHECKING:
    from anybit.hf.cache import AnyBitCache
    from anybit.hf.loading import Loaded


def evaluate(
    model: Model,
    text: Annotated[Path, typer.Option("--text", "-t", help="A text file, UTF-8.")],
    scheme: SchemeOption = None,
    override: OverrideOption = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens in a window.")] = 512,
    windows: Annotated[
        int | None, typer.Option(min=1, help="Number of windows; by default as many as the text allows.")
    ] = None,
    bos: Annotated[
        bool | None, typer.Option(help="Begin every window with the BOS token; by default as the tokenizer does.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="A model to compare with: same next token, and KL divergence.")
    ] = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
    dequantize: DequantizeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity over fixed windows of a text, and agreement with another model.

    [bold]Examples[/bold]

    \b
    anybit eval smollm2-w4 --text wiki.txt
    anybit eval ./llama --scheme w3a16g64asym -t wiki.txt --windows 16 --baseline ./llama --json
    """
    parsed, others = None if scheme is None else Scheme.parse(scheme), overrides_of(override)
    from anybit.hf import evaluate as measure
    from anybit.hf.loading import load_model, stored_scheme
    from anybit.models.modules import check_tokens

    content = measure.read_text(text)
    with status(f"Loading {model}" + (f" in {parsed}" if parsed else "")):
        loaded = load_model(
            model,
            parsed,
            overrides=others,
            backend=backend,
            device=device,
            trust_remote_code=trust_remote_code,
            dequantize=dequantize,
        )
    _refuse_beyond(loaded, context)
    ids = loaded.tokenizer(content, add_special_tokens=False)["input_ids"]
    check_tokens(loaded.model, ids, model)
    first = _bos(loaded.tokenizer, bos)
    rows = measure.windows_of(ids, context, windows, first)
    cache = _cache(loaded, context)
    with progress_bar("Windows", counted=True) as update:
        result = measure.perplexity(loaded.model, rows, first is not None, lambda d, t: update("Windows", d, t), cache)
    figures: dict[str, Any] = {
        "model": model,
        "scheme": str(loaded.scheme) if loaded.scheme else None,
        "bits_per_weight": measure.bits_per_weight(loaded.model),
        "text": str(text),
        **asdict(result),
    }
    if baseline is not None:
        with status(f"Loading {baseline}"):
            # A backend only applies to quantized layers, which the baseline may not have.
            theirs = None if backend is None or stored_scheme(baseline) is None else backend
            other = load_model(baseline, backend=theirs, device=device, trust_remote_code=trust_remote_code)
        _refuse_beyond(other, context)
        check_tokens(other.model, ids, baseline)
        with progress_bar("Comparing", counted=True) as update:
            compared = measure.agreement(
                loaded.model, other.model, rows, lambda d, t: update("Comparing", d, t), cache, _cache(other, context)
            )
        figures |= {"baseline": baseline, "same_token": compared.same, "divergence": compared.divergence}
    if as_json:
        print_json(figures)
        return
    output.print(
        f"perplexity {result.perplexity:.2f} over {result.windows} windows of {context} tokens "
        f"({result.scored} scored, {'with' if result.bos else 'without'} BOS); "
        f"{figures['bits_per_weight']:.2f} bits per weight; {result.seconds:.1f} s",
        markup=False,
    )
    if baseline is not None:
        output.print(
            f"same next token as {baseline} in {figures['same_token']:.1%} of positions; "
            f"KL divergence {figures['divergence']:.4f} nats",
            markup=False,
        )


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
