"""Mixed precision: a bit-width for every layer, within a size budget and with the least estimated loss on a text.

Losses are estimated to second order. Over a calibration text, with x the inputs of a layer, g the gradients of log p(y)
at its outputs, and y sampled from the model's own predictions (so that g^2 estimates the diagonal of the Fisher
information), changing the weights W to W + D costs a KL divergence, in nats, of about

    1/2 sum over tokens t and outputs i of g_ti^2 (D x_t)_i^2

with D measured by rounding each layer to nearest at every width. Widths are then chosen greedily by the steepest
decrease of loss per stored bit (a multiple-choice knapsack, on the lower convex hull of each layer's choices). Layers
that share an input get the same width, so that they still run as one fused GEMM. The experts of a layer, whose losses
count as often as the router chooses them, get the widths of ``KINDS`` kinds of experts, each of which runs as one op.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from anybit.checkpoints.configuration import Overrides
from anybit.codes.packing import layer_shapes
from anybit.codes.rtn import quantize_weight
from anybit.errors import CalibrationError, OptionError, TextError
from anybit.kernels.attention.kv_page import PageLayout
from anybit.layers.experts import Experts
from anybit.models.experts import weights_left
from anybit.models.modules import LinearLayer
from anybit.quantization.learn.generated import written
from anybit.quantization.pipeline.calibrate import batched
from anybit.quantization.pipeline.calibrated import first_of, sequences_of
from anybit.quantization.pipeline.lazy import LazyModel
from anybit.quantization.pipeline.options import Options
from anybit.quantization.pipeline.stream import Job
from anybit.scheme import KVFormat, WeightFormat

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WIDTHS = (2, 3, 4, 5, 6, 8)
"""The candidate widths, in bits."""
KINDS = 2
"""Of experts in a layer: widths of gate and up, and of down."""
OPTIONS = ("text", "tokens", "sequences", "length", "device", "seed")
"""The options of a method that the search also uses."""

_TOKENS = 2048
_TOKENS_ON_A_GPU = 16384
_BATCH_ON_A_GPU = 4096  # tokens per forward pass, each of which reads all blocks twice; on a CPU one sequence
_SAMPLES = 512  # tokens whose inputs and gradients are kept
_ROWS = 256  # outputs of a layer that are sampled


@dataclass(frozen=True, slots=True)
class Choice:
    """Widths by layer. bits: stored, scales included. loss: estimated nats per token."""

    widths: dict[str, int]
    bits: float
    loss: float


def allocate(job: Job, bits: float | None = None, memory: float | None = None, context: int | None = None) -> Job:
    """The job with a width for every layer, chosen to meet a size budget.

    The job's scheme determines everything but the width; layers with overrides keep those, and count.
    bits: stored bits per weight, averaged over all quantized layers and experts, scales included.
    memory: bytes of all tensors of the result.  Give exactly one of the two.
    context: with memory, tokens of a KV cache to reserve room for, in the scheme's format or in 16 bits.
    Without a text ``distill``, which needs none, chooses by what the model writes itself.
    Raises OptionError for a budget that cannot be met, TextError without a text for other methods.
    """
    if context is not None and (memory is None or context < 1):
        raise OptionError(
            f"context (tokens of a KV cache within memory) must be at least 1 and needs option memory, not {context}"
        )
    if (bits is None) == (memory is None):
        raise OptionError("give either bits (average per weight) or memory (bytes of the result), not both")
    size = bits if memory is None else memory
    if size is not None and math.isnan(size):
        raise OptionError(f"{'bits' if memory is None else 'memory'} must be a number, not {size}")
    given = bool({"text", "sequences"} & job.options.keys())
    if not given and job.method != "distill":
        raise TextError("widths are chosen by what they cost on a text: name a file with --text")
    options = Options.of({name: value for name, value in job.options.items() if name in OPTIONS})
    free = [layer for layer in job.layers if job.overrides.of(layer.name) is None]
    if not free:
        raise OptionError("every layer has an override, so there is nothing to choose")
    cache = 0.0 if context is None else cache_bytes(job.model.config, job.scheme.kv, context)
    budget = _budget(job, free, bits, None if memory is None else memory - cache)
    wanted = f"{bits:g} bits a weight" if bits is not None else f"{memory:.0f} bytes"
    formats = {width: replace(job.scheme.weights, bits=width) for width in WIDTHS}
    least = sum(_stored(job, layer, formats[min(WIDTHS)]) for layer in free)
    if least > budget:
        reached = _reached(job, free, least, budget, bits, memory)
        raise OptionError(
            f"{wanted} cannot be met: {reached}" + (f", {cache:.0f} of them its KV cache" if cache else "")
        )
    tokens = min(options.calibration_tokens, _TOKENS_ON_A_GPU if options.on_gpu else _TOKENS)
    text = first_of(sequences_of(job, options, tokens), tokens) if given else []
    if given and not text:
        raise TextError("widths are chosen by what they cost on a text, and this one has no tokens")
    job.progress(f"choosing widths by what they cost on {tokens} tokens", 0, sum(layer.n * layer.k for layer in free))
    device = torch.device(options.where)
    model = LazyModel.of(job, device)
    if not given:
        own = written(model.whole(), [], max(tokens, options.length), options.length, device, options.seed)
        text = [row for rows in own for row in rows]
    batches = batched(text, _BATCH_ON_A_GPU) if options.on_gpu else [sequence[None] for sequence in text]
    samples = sample(model, batches, [layer.name for layer in free], options.seed)
    units = _measure(job, model, {layer.name: layer for layer in free}, samples, formats)
    experts = [name for name, module in job.model.named_modules() if isinstance(module, Experts)]
    widths = _sum(choose(few_kinds(units, budget, experts), budget)[0]).widths
    weights: Counter[int] = Counter()
    for layer in free:
        weights[widths[layer.name]] += layer.n * layer.k
    usual = weights.most_common(1)[0][0]
    scheme = replace(job.scheme, weights=formats[usual])
    each = {width: replace(scheme, weights=format, kv=None) for width, format in formats.items()}
    others = {name: each[width] for name, width in widths.items() if width != usual}
    return replace(job, scheme=scheme, overrides=Overrides(others | job.overrides))


def choose(units: Iterable[Sequence[Choice]], budget: float) -> tuple[list[Choice], float]:
    """A choice for every unit within a budget of bits: greedily from the fewest, where a bit gains most.

    Also returns what the last bit gained.
    """
    hulls = [_hull(choices) for choices in units]
    at = [0] * len(hulls)
    spent = sum(hull[0].bits for hull in hulls)
    steps = [
        (-_slope(before, after), unit, place, after.bits - before.bits)
        for unit, hull in enumerate(hulls)
        for place, (before, after) in enumerate(itertools.pairwise(hull))
    ]
    last = 0.0
    for slope, unit, place, more in sorted(steps):  # gains decrease along a hull, so a unit's steps come in order
        if at[unit] == place and spent + more <= budget:
            at[unit] += 1
            spent, last = spent + more, -slope
    return [hull[place] for hull, place in zip(hulls, at, strict=True)], last


def few_kinds(units: Sequence[Sequence[Choice]], budget: float, experts: Iterable[str]) -> list[Sequence[Choice]]:
    """The units with those of an expert as one, of which all of a layer have ``KINDS`` kinds of experts to choose from.

    units: choices for layers that share an input, fewest bits first.  experts: names of layers' experts.
    The kinds are those, of a choice without limit, that cost the layer least with bits at their worth in it.
    """
    chosen, worth = choose(units, budget)
    found: list[Sequence[Choice]] = []
    inside: dict[str, dict[str, list[tuple[Sequence[Choice], Choice]]]] = {name: {} for name in experts}
    for unit, choice in zip(units, chosen, strict=True):
        layer, _, number = next(iter(choice.widths)).rpartition(".")[0].rpartition(".")
        if layer in inside:
            inside[layer].setdefault(number, []).append((unit, choice))
        else:
            found.append(unit)
    for own in filter(None, inside.values()):
        kinds: list[dict[str, int]] = [{}]  # the least
        for pairs in own.values():
            kind = {_last(name): width for _, choice in pairs for name, width in choice.widths.items()}
            kinds += [] if kind in kinds else [kind]
        rows = [[_sum(_like(unit, kind) for unit, _ in pairs) for kind in kinds] for pairs in own.values()]
        spent = sum(choice.bits for pairs in own.values() for _, choice in pairs)
        least = [sum(row[kind].bits for row in rows) for kind in range(len(kinds))]
        best = min(
            (
                some
                for some in itertools.combinations(range(len(kinds)), min(KINDS, len(kinds)))
                if min(least[kind] for kind in some) <= spent
            ),
            key=lambda some: sum(min(row[kind].loss + worth * row[kind].bits for kind in some) for row in rows),
        )
        found += [[row[kind] for kind in best] for row in rows]
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _like(unit: Sequence[Choice], kind: Mapping[str, int]) -> Choice:
    """The choice with the widths of a kind of experts, by projection."""
    return next(c for c in unit if all(kind.get(_last(name), width) == width for name, width in c.widths.items()))


def _sum(choices: Iterable[Choice]) -> Choice:
    """Choices of several units as one."""
    some = list(choices)
    widths = {name: width for choice in some for name, width in choice.widths.items()}
    return Choice(widths, sum(choice.bits for choice in some), sum(choice.loss for choice in some))


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs of layers and squared gradients of log p(y) at their outputs, at sampled tokens of a text.

    units: layers that share an input.  inputs: of each unit, float32 [tokens, K].  gradients: squared, by layer,
    float32 [tokens, N].  shares: of each unit, the share of all tokens that reach it: below 1 for experts.
    """

    units: list[tuple[str, ...]]
    inputs: list[Tensor]
    gradients: dict[str, Tensor]
    shares: list[float]


def sample(lazy: LazyModel, batches: Sequence[Tensor], names: Sequence[str], seed: int = 0) -> Samples:
    """Run a floating-point model forward and backward over token ids int64 [B, T] each; the model is not changed.

    Raises CalibrationError, naming the layer, if no token reaches it; but an expert that none reaches costs nothing.
    """
    model, total = lazy.model, sum(tokens.numel() for tokens in batches)
    random = torch.Generator().manual_seed(seed)
    modules = {name: model.get_submodule(name) for name in names}
    units: list[list[str]] = []
    unit_of: dict[str, int] = {}
    inputs: dict[str, list[Tensor]] = {}
    gradients: dict[str, list[Tensor]] = {name: [] for name in names}
    held: dict[tuple[object, ...], tuple[int, Tensor]] = {}  # a block's inputs, alive so that no address is reused
    length, picked, forward = 0, torch.empty(0, dtype=torch.int64), True

    seen: Counter[str] = Counter()  # tokens by unit's first layer

    def take(x: Tensor) -> Tensor:
        flat = x.detach().flatten(0, -2)
        if len(flat) < length:  # an expert's
            return flat[:: max(length // len(picked), 1)].float()
        return flat[picked.to(flat.device)].float()

    def hook(name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if not forward:  # again, for gradients
                return
            x = args[0]
            if name not in unit_of:
                unit_of[name], _ = held.setdefault((x.data_ptr(), x.shape), (len(units), x))
                if unit_of[name] == len(units):
                    units.append([])
                units[unit_of[name]].append(name)
            if units[unit_of[name]][0] == name:
                inputs.setdefault(name, []).append(take(x))
                seen[name] += x.shape[:-1].numel()
            if output.requires_grad:
                output.register_hook(lambda gradient: gradients[name].append(take(gradient).square()))

        return look

    def begin(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output.requires_grad_(True)

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    handles += [block.register_forward_pre_hook(lambda *_: held.clear()) for block in lazy.blocks]
    handles.append(model.get_input_embeddings().register_forward_hook(begin))
    try:
        with lazy.running(), torch.enable_grad():
            for tokens in batches:
                rows, length, forward = len(tokens), tokens.numel(), True
                count = math.ceil(_SAMPLES * tokens.shape[1] / total)
                picks = [torch.randperm(tokens.shape[1], generator=random)[:count] for _ in range(rows)]
                picked = torch.cat([row * tokens.shape[1] + own for row, own in enumerate(picks)])
                logits = model(tokens.to(lazy.device), use_cache=False).logits.float().log_softmax(-1).flatten(0, 1)
                drawn = torch.multinomial(logits.detach().exp().cpu(), 1, generator=random).to(lazy.device)
                forward = False
                logits.gather(1, drawn).sum().backward()
                held.clear()
    finally:
        for handle in handles:
            handle.remove()
    unseen = [name for name, found in gradients.items() if not found]
    experts = {name for name, module in model.named_modules() if isinstance(module, Experts)}
    missing = [name for name in unseen if name.rsplit(".", 2)[0] not in experts]
    if missing:
        raise CalibrationError(f"the calibration text never reaches {', '.join(missing)}: keep it, or override it")
    return Samples(
        [*map(tuple, units), *((name,) for name in unseen)],
        [
            *(torch.cat(inputs[unit[0]]) for unit in units),
            *(torch.empty(0) for _ in unseen),
        ],
        {name: torch.cat(found) for name, found in gradients.items() if found},
        [*(seen[unit[0]] / total for unit in units), *(0.0 for _ in unseen)],
    )


def loss_of(weight: Tensor, format: WeightFormat, x: Tensor, squares: Tensor) -> float:
    """Estimated loss in nats per token of quantizing a weight [N, K], from its inputs and squared gradients."""
    rows = torch.arange(0, len(weight), max(len(weight) // _ROWS, 1), device=weight.device)
    part = weight[rows]
    difference = quantize_weight(part, format).dequantize(torch.float32) - part.float()
    felt = squares[:, rows]
    share = float(squares.sum() / felt.sum()) if bool(felt.any()) else 0.0
    return 0.5 * share * float(((x @ difference.T).square() * felt).sum()) / len(x)


def _measure(
    job: Job,
    model: LazyModel,
    layers: Mapping[str, LinearLayer],
    samples: Samples,
    formats: Mapping[int, WeightFormat],
) -> list[list[Choice]]:
    """Stored bits and loss of every width, fewest first, for each unit of layers that share an input."""
    total, done = sum(layer.n * layer.k for layer in layers.values()), 0
    units: list[list[Choice]] = []
    for names, x, share in zip(samples.units, samples.inputs, samples.shares, strict=True):
        sums = {width: [0.0, 0.0] for width in formats}
        for name in names:
            weight = model.weight(name).to(x.device, job.dtype_of(name))
            for width, format in formats.items():
                sums[width][0] += _stored(job, layers[name], format)
                sums[width][1] += share and share * loss_of(weight, format, x, samples.gradients[name])
            done += weight.numel()
            job.progress(f"measuring {name}", done, total)
        units.append([Choice(dict.fromkeys(names, width), bits, loss) for width, (bits, loss) in sums.items()])
    return units


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull of choices by bits: losses decrease, by ever less per bit."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.bits, choice.loss)):
        if hull and choice.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], choice) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(before: Choice, after: Choice) -> float:
    return (before.loss - after.loss) / (after.bits - before.bits)


def stored_bytes(n: int, k: int, format: WeightFormat, scale_bytes: int = 2) -> int:
    """Bytes of the tensors of a layer of n outputs and k inputs in a checkpoint."""
    sizes = {"weight_scale": scale_bytes, "weight_shape": 8}
    return sum(sizes.get(name, 4) * math.prod(shape) for name, shape in layer_shapes(n, k, format).items())


def _stored(job: Job, layer: LinearLayer, format: WeightFormat) -> float:
    """Bits of a layer's tensors in a checkpoint."""
    return 8.0 * stored_bytes(layer.n, layer.k, format, max(job.dtype_of(layer.name).itemsize, 2))


def _budget(job: Job, free: Sequence[LinearLayer], bits: float | None, memory: float | None) -> float:
    """The budget in bits for the layers without an override."""
    every = [*job.layers, *job.embeddings]
    chosen = {layer.name for layer in free}
    fixed = sum(_stored(job, each, job.scheme_of(each.name).weights) for each in every if each.name not in chosen)
    if bits is not None:
        experts = weights_left(job.model)
        stored = 8 * job.source.dtype.itemsize * experts
        return bits * (sum(layer.n * layer.k for layer in every) + experts) - stored - fixed
    assert memory is not None
    whole = {f"{layer.name}.weight" for layer in every}
    rest = sum(job.source.entries[stored].bytes for name, stored in job.names.items() if name not in whole)
    return 8 * (memory - rest) - fixed


def cache_bytes(config: "PretrainedConfig", kv: KVFormat | None, tokens: int) -> float:
    """Bytes of a model's KV cache of ``tokens`` tokens, in a format or in 16 bits; layers without one count nothing."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    window = min(getattr(text, "sliding_window", None) or tokens, tokens)
    held = {"full_attention": tokens, "sliding_attention": window, "chunked_attention": window}
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    bits = 16 if kv is None else PageLayout(kv, dim).bits_per_element
    return float(sum(held.get(kind, 0) for kind in kinds) * 2 * heads * dim * bits / 8)


def _reached(
    job: Job, free: Sequence[LinearLayer], least: float, budget: float, bits: float | None, memory: float | None
) -> str:
    """The size at the smallest width, for the end of an error message."""
    if memory is not None:
        return f"with {min(WIDTHS)} bits for every layer the model takes {memory + (least - budget) / 8:.0f} bytes"
    assert bits is not None
    experts = weights_left(job.model)
    count = sum(layer.n * layer.k for layer in (*job.layers, *job.embeddings)) + experts
    what = "scales and 16-bit experts" if experts else "scales"
    return (
        f"with {min(WIDTHS)} bits for every layer the average is {bits + (least - budget) / count:.3f}, {what} included"
    )
