"""anybit tune, anybit explain."""

import contextlib
import fnmatch
import itertools
import math
import re
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.cli import options
from anybit.cli.common import errors, output, print_json, progress_bar, status
from anybit.errors import KernelError, SchemeError, dtype_name
from anybit.scheme import Scheme

if TYPE_CHECKING:
    from torch import nn

Dtype = Annotated[
    str | None, typer.Option(help="float16 or bfloat16, the dtype of activations and results; by default the model's.")
]
SchemeOption = Annotated[
    str | None, typer.Option("--scheme", "-s", help="For example w4a8; by default the model's own scheme.")
]
Ranks = Annotated[
    int,
    typer.Option(
        "--tensor-parallel",
        min=1,
        help="Use the shard of each layer that one of this many GPUs holds, as vLLM splits it.",
    ),
]
_DTYPES = ("float16", "bfloat16")
_USUAL_SECONDS = 270.0
_LARGEST = 1 << 24
_JOINED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def tune(
    model: options.Model,
    scheme: SchemeOption = None,
    most: Annotated[int, typer.Option("--most-tokens", min=1, help="Measure up to this many tokens.")] = 8192,
    each: Annotated[
        int, typer.Option(min=0, help="Candidates to time in each kernel family, the most promising first.")
    ] = 16,
    everything: Annotated[
        bool, typer.Option("--exhaustive", help="Time every legal config; takes hours unless --seconds is given.")
    ] = False,
    dtype: Dtype = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Start nothing new after this many seconds; run again to continue. By default 270."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again what the map already has.")] = False,
    ranks: Ranks = 1,
    to: Annotated[Path | None, typer.Option("--output", "-o", help="The map to write; by default this GPU's.")] = None,
    trust_remote_code: options.Trust = False,
) -> None:
    """Measure which kernel is fastest for every linear layer of a model.

    Every number of tokens is measured. Measurements are saved as they are made, so an interrupted search continues.
    Models use the results.

    \b
    Examples:
    anybit tune ./llama-3-8b-w4a8
    anybit tune ./llama-3-8b --scheme w4a16g128
    anybit tune ./llama-3-70b-w4a8 --tensor-parallel 4
    """
    wanted = _checked(dtype)
    import torch

    from anybit.choose import policy as policies
    from anybit.choose.space import GRID, STEPS, LinearProblem
    from anybit.device import Device
    from anybit.tune.search import Options, search

    if not torch.cuda.is_available():
        raise KernelError("anybit tune measures on an NVIDIA GPU, and torch sees none here; anybit explain needs none")
    if to is not None:
        policies.check_target(to)
    with status(f"Reading {model}"):
        layers, own = _layers(model, scheme, trust_remote_code, ranks)
    products = [
        LinearProblem(m, n, k, parsed.weights, parsed.activations, getattr(torch, wanted or own))
        for parsed, n, k in layers
        for m in STEPS
        if m <= most
    ]
    # All layers on the coarse grid first, then the counts between, so that a map is complete even if time runs out.
    coarse = [product for product in products if product.m in GRID]
    fine = [product for product in products if product.m not in GRID]
    if seconds is None:
        seconds = math.inf if everything else _USUAL_SECONDS
    hints = [found for found in (policies.usable(file) for file in sorted(policies.SHIPPED.glob("*.json"))) if found]
    began = time.perf_counter()
    with progress_bar("Tuning", counted=True) as update:
        wide = Options(10**6 if everything else each, again=again)
        for part in (coarse, fine):
            left = max(0.0, seconds - (time.perf_counter() - began))
            if part:
                how = replace(wide, seconds=left)
                try:
                    policy = search(part, partial(_map, to), how, hints=hints, report=update)
                except KeyboardInterrupt:
                    errors.print("interrupted; what was measured is kept, and the same command goes on")
                    raise
    gains = [
        point.default_us / min((measured.us for measured in point.strategies.values()), default=point.default_us)
        for product in products
        if (point := policy.exact(replace(product, device=Device.named(policy.origin.arch))))
    ]
    mean = math.exp(sum(map(math.log, gains)) / len(gains)) if gains else 1.0
    errors.print(
        f"measured {len(gains)} of {len(products)} products (layers by numbers of tokens): on average {mean:.3f} times "
        f"as fast as the built-in choices; {time.perf_counter() - began:.0f} s; the map is in "
        f"{to or policies.own_file(policy.origin.gpu)}"
    )
    if time.perf_counter() - began > seconds and len(gains) < len(products):
        errors.print(f"{seconds:.0f} s were up: run the same command again to measure the rest")
    for name, reason in policy.excluded.items():
        errors.print(f"left out {name}: {reason}")


def explain(
    what: Annotated[
        str, typer.Argument(metavar="MODEL|N,K", help="A model, or the shape of a layer as N,K: outputs, inputs.")
    ],
    scheme: SchemeOption = None,
    tokens: Annotated[
        list[int] | None, typer.Option("--m", "-m", min=1, help="Number of tokens; may be repeated.")
    ] = None,
    dtype: Dtype = None,
    ranks: Ranks = 1,
    policy: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Use this map instead of this GPU's.")
    ] = None,
    trust_remote_code: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Show which kernel and config would run a linear layer, and why. Without a GPU, answers for an H200.

    \b
    Examples:
    anybit explain 4096,14336 --scheme w4a8 --m 1 --m 512
    anybit explain ./llama-3-8b-w4a8 --m 16
    """
    shape, kind = _shape(what), _checked(dtype)
    if shape is not None and scheme is None:
        raise SchemeError(f"the shape {what} needs a scheme: --scheme w4a8")
    if shape is not None and ranks > 1:
        raise KernelError(f"--tensor-parallel {ranks} splits a model's layers: name a model, or the shape of a part")
    wanted = None if scheme is None else Scheme.parse(scheme)
    import torch

    from anybit.choose import dispatch as dispatching
    from anybit.choose.space import LinearProblem
    from anybit.device import Device
    from anybit.tune.explain import explain as explain_product

    with status(f"Reading {what}"):
        if shape is not None and wanted is not None:
            layers, own = [(wanted, *shape)], _DTYPES[0]
        else:
            layers, own = _layers(what, scheme, trust_remote_code, ranks)
        device = Device.of(torch.empty(0, device="cuda")) if torch.cuda.is_available() else Device.named("sm_90a")
        if policy is not None:
            dispatching.use(policy)
        by, dtype_ = dispatching.dispatcher(device.name), getattr(torch, kind or own)
        found = [
            explain_product(LinearProblem(m, n, k, parsed.weights, parsed.activations, dtype_, device), by)
            for parsed, n, k in layers
            for m in tokens or [1, 16, 256, 4096]
        ]
    hints = [f"{hint.path} is only a hint: {hint.why_hint(device.name)}" for hint in by.hints]
    if as_json:
        print_json({"products": [asdict(one) for one in found], "hints": hints})
        return
    output.print("\n\n".join(one.text() for one in found))
    for hint in hints:
        errors.print(hint)


def _map(to: Path | None, gpu: str) -> Path:
    """The map to write. Raises KernelError if it belongs to another GPU, as its points would be replaced."""
    from anybit.choose import policy as policies

    if to is None:
        return policies.own_file(gpu)
    measured = policies.read(to).origin.gpu if to.exists() else gpu
    if measured != gpu:
        raise KernelError(f"{to} was measured on {measured}, and this is {gpu}: choose another file with --output")
    return to


def _checked(dtype: str | None) -> str | None:
    if dtype is not None and dtype not in _DTYPES:
        raise KernelError(f"--dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
    return dtype


def _shape(text: str) -> tuple[int, int] | None:
    """N,K (or NxK); None if these are not numbers. Raises SchemeError for numbers that are not a shape."""
    # Digits and separators, or a number and a comma: meant as a shape, if perhaps a wrong one.
    meant = re.fullmatch(r"[\d\s.,x-]*\d[\d\s.,x-]*", text) or re.match(r"\s*\d+\s*,", text)
    if Path(text).expanduser().exists() or not meant:
        return None
    parts = text.replace("x", ",").split(",")
    sizes = [int(part) for part in parts if re.fullmatch(r"\s*\d+\s*", part)]
    if len(sizes) != 2 or len(parts) != 2 or not 1 <= min(sizes) <= max(sizes) <= _LARGEST:
        raise SchemeError(
            f"{text} is not the shape of a layer: write N,K (outputs, inputs), each at most {_LARGEST}, for example "
            "4096,14336"
        )
    return sizes[0], sizes[1]


def _layers(
    model: str, scheme: str | None, trust_remote_code: bool, ranks: int = 1
) -> tuple[list[tuple[Scheme, int, int]], str]:
    """(scheme, outputs, inputs) of a model's linear layers, first as ``fuse`` joins them, and the dtype they run in.

    ranks: of one tensor-parallel rank's parts.
    """
    from anybit.checkpoints.folder import Folder
    from anybit.checkpoints.formats.gguf_file import NotNative, open_gguf
    from anybit.checkpoints.formats.translate import FolderTranslation
    from anybit.checkpoints.source import is_gguf, local_folder
    from anybit.models.experts import HubNames
    from anybit.models.modules import kept_modules, linear_layers, skeleton

    if scheme is None and is_gguf(model):
        with contextlib.suppress(NotNative):  # then its layers are dequantized
            source, _, empty = open_gguf(Path(model).expanduser())
            return _products(empty, source.layers, ranks), "float16"
    with local_folder(model, trust_remote_code) as path:
        folder = Folder(path)
        saved, empty = folder.quantization, skeleton(path, trust_remote_code)
        saved = saved and saved.renamed(HubNames.of(empty).own)
        names = [
            layer.name for layer in linear_layers(empty, kept_modules(empty, None if saved is None else saved.kept))
        ]
        if scheme is not None:
            schemes = dict.fromkeys(names, Scheme.parse(scheme))
        elif saved is not None:
            schemes = {name: saved.scheme_of(name) for name in names}
        elif (foreign := FolderTranslation.of(folder)) is not None:
            foreign.take_names(empty)
            schemes = foreign.layers
        else:
            raise SchemeError(f"{model} is not quantized by anybit: name a scheme, for example --scheme w4a16g128")
        return _products(empty, schemes, ranks), dtype_name(folder.kernel_dtype)


def _products(model: "nn.Module", schemes: dict[str, Scheme], ranks: int = 1) -> list[tuple[Scheme, int, int]]:
    """(scheme, outputs, inputs) of a model's linear layers as ``fuse`` joins them, then of single ones."""
    from anybit.models.modules import linear_layers

    layers = {
        layer.name: (Scheme(scheme.weights, scheme.activations), layer.n, layer.k)
        for layer in linear_layers(model, [])
        if (scheme := schemes.get(layer.name))
    }
    if ranks > 1:
        layers = {name: _part(model, name, layer, ranks) for name, layer in layers.items()}
    joined = []
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        group = next((group for group in _JOINED if own in group), (own,))
        members = [layers[part] for member in group if (part := f"{parent}.{member}".lstrip(".")) in layers]
        if len(members) < len(group):
            joined.append(layer)
        elif own == group[0]:
            for scheme, run in itertools.groupby(members, key=lambda member: member[0]):
                joined.append((scheme, sum(n for _, n, _ in run), layer[2]))
    return list(dict.fromkeys([*joined, *layers.values()]))


def _part(model: "nn.Module", name: str, layer: tuple[Scheme, int, int], ranks: int) -> tuple[Scheme, int, int]:
    """A layer's part on a tensor-parallel rank, by the model's plan in transformers; whole where the plan says nothing.

    Raises KernelError for a layer that so many ranks cannot share.
    """
    from anybit.codes.sharding import shard_format

    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise KernelError(f"--tensor-parallel: transformers has no plan that splits a {type(model).__name__}")
    how = next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), "")
    scheme, n, k = layer
    if how.startswith("rowwise") and k % ranks == 0:
        cut = k // ranks
        return replace(scheme, weights=shard_format(scheme.weights, cut, cut)), n, cut
    if how.startswith("colwise"):
        if name.rpartition(".")[2] == "lm_head":  # vLLM pads the vocabulary
            n = -(-n // 64) * 64
        config: Any = model.config
        heads = getattr(config, "num_key_value_heads", 0) if name.endswith((".k_proj", ".v_proj")) else 0
        if heads and ranks % heads == 0:  # ranks share heads
            return scheme, n // heads, k
        if n % ranks == 0:
            return scheme, n // ranks, k
    if not how:
        return layer
    side = f"{k} inputs" if how.startswith("rowwise") else f"{n} outputs"
    raise KernelError(f"--tensor-parallel {ranks}: so many ranks cannot share the {side} of {name}")
