"""Calibration, block by block: each linear layer is quantized on the inputs that it will see in the quantized model.

Two streams of hidden states advance in step: ``reference``, the unquantized model's, and ``quantized``, in which all
earlier blocks are quantized. Only one block's statistics are in memory. Finished blocks are written to the resume
folder, if there is one; a later run with the same model, text and options continues from there, with bitwise equal
results.
"""

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from anybit.checkpoints.configuration import Overrides, Quantization
from anybit.codes.packing import QuantizedWeight, unstack
from anybit.codes.reference import quantize_activations
from anybit.errors import CalibrationError, TextError
from anybit.models.blocks import find_blocks, linear_modules, set_weight, weight_of
from anybit.quantization.pipeline import blocks as walk
from anybit.quantization.pipeline import resume as resuming
from anybit.quantization.pipeline.lazy import LazyModel
from anybit.scheme import ActivationFormat, Scheme

# Fewer tokens cannot characterize a layer of any real model.
MINIMUM_TOKENS = 256


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of a linear layer's inputs, x in the quantized model and x' in the original.

    hessian: mean of x x^T, float32 [K, K].  drift: mean of (x' - x) x^T, float32 [K, K], or None if not followed.
    """

    hessian: Tensor
    drift: Tensor | None
    tokens: int

    def corrected(self, weight: Tensor, strength: float = 1.0) -> Tensor:
        """The weight [N, K] whose outputs for x best match the original's for x': W + W drift (H + damping I)^-1.

        This compensates errors of earlier layers; damping is a hundredth of the mean diagonal of H, and strength 0
        returns the weight unchanged.
        """
        if self.drift is None or strength == 0:
            return weight
        h = self.hessian.double()
        damped = h + torch.eye(len(h), dtype=h.dtype, device=h.device) * (0.01 * h.diagonal().mean())
        shift: Tensor = torch.linalg.solve(damped, self.drift.double().T).T
        corrected = weight.double() + strength * (weight.double() @ shift)
        return corrected.to(weight.dtype)


LayerQuantizer = Callable[[Tensor, Statistics | None, str], QuantizedWeight]
"""Quantizes a layer, or several with the same input, stacked along N: rows are independent.

Called with a weight, float32 [N, K]; the statistics of its input, or None for an expert that too few tokens reach and
that is rounded to nearest; and the name of the layer or layers, for errors.
"""

BlockLearner = Callable[[int, nn.Module, dict[str, QuantizedWeight], walk.Examples], dict[str, QuantizedWeight]]
"""Learns a block's weights once they are quantized; called with its number, the block as it was, its weights by full
name, and what it is to learn.
"""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Settings of a calibration run.

    drift: follow the original model's activations too, so that layers can correct for earlier errors (twice the
    forward passes).  device: where blocks are processed, one at a time.  resume: a folder for finished blocks.
    spill: a folder for activations beyond ``budget`` bytes.  batch_tokens: tokens per forward pass.
    learn: what learns a block before the next one is calibrated; it needs ``drift``.
    """

    drift: bool = True
    device: torch.device | str = "cpu"
    resume: Path | None = None
    spill: Path | None = None
    budget: int = 8 << 30
    batch_tokens: int = 4096
    learn: BlockLearner | None = None
    options: dict[str, object] = field(default_factory=dict)


def batched(sequences: Iterable[Tensor | Sequence[int]], batch_tokens: int) -> list[Tensor]:
    """Batch sequences by length, without padding: int64 [B, L] each, of about batch_tokens tokens.

    Raises TextError for fewer than MINIMUM_TOKENS tokens in all.
    """
    by_length: dict[int, list[Tensor]] = {}
    for sequence in sequences:
        tokens = torch.as_tensor(sequence, dtype=torch.int64)
        if tokens.ndim != 1:
            raise TextError(f"a calibration sequence must be a list of token ids, not of shape {tuple(tokens.shape)}")
        if len(tokens):
            by_length.setdefault(len(tokens), []).append(tokens)
    total = sum(length * len(items) for length, items in by_length.items())
    if total < MINIMUM_TOKENS:
        raise TextError(f"calibration needs at least {MINIMUM_TOKENS} tokens of text, and this has {total}")
    batches = []
    for length, items in sorted(by_length.items(), reverse=True):
        size = max(batch_tokens // length, 1)
        batches += [torch.stack(items[i : i + size]) for i in range(0, len(items), size)]
    return batches


def calibrate(
    model: LazyModel,
    sequences: Iterable[Tensor | Sequence[int]],
    scheme: Scheme,
    names: set[str],
    quantizer: LayerQuantizer,
    settings: Calibration | None = None,
    progress: Callable[[int, int], None] | None = None,
    overrides: Mapping[str, Scheme] | None = None,
) -> dict[str, QuantizedWeight]:
    """Quantize the named linear layers inside a model's blocks; the model itself is not changed.

    model: a causal language model of transformers.  sequences: token ids, any lengths.
    names: full names of the layers to quantize; those outside the blocks are ignored.
    overrides: per-layer schemes, by name or pattern; the quantizer gets layers of one scheme at a time.
    progress: called after each block with blocks done, and blocks in all.
    Returns the quantized weights by name. Raises CalibrationError, naming the layer, and TextError for a short text.
    """
    settings = settings or Calibration()
    batches = batched(sequences, settings.batch_tokens)
    run = _Run(model, batches, Quantization(scheme, overrides=Overrides(overrides or {})), names, quantizer, settings)
    try:
        for index in range(len(run.calls)):
            run.block(index)
            if progress is not None:
                progress(index + 1, len(run.calls))
    finally:
        run.finish()
    if run.rare:
        warnings.warn(
            f"{len(run.rare)} experts saw fewer than {MINIMUM_TOKENS} tokens of the calibration text and are rounded "
            f"to nearest: {', '.join(run.rare)}; calibrate on more tokens to include them",
            stacklevel=2,
        )
    return run.done


class _Run:
    """One pass over a model's blocks: both streams, and the layers quantized so far."""

    def __init__(
        self,
        model: LazyModel,
        batches: list[Tensor],
        schemes: Quantization,
        names: set[str],
        quantizer: LayerQuantizer,
        settings: Calibration,
    ) -> None:
        self.model, self.schemes, self.names, self.quantizer, self.settings = model, schemes, names, quantizer, settings
        self.device = torch.device(settings.device)
        self.prefix, blocks = find_blocks(model.model)
        self.count = len(batches)
        self.stores: list[walk.Store] = []
        self.quantized = self._store()
        self.reference = self._store() if settings.drift else None
        hidden: dict[int, Tensor] = {}
        # With a spill folder, inputs go straight to the stores; otherwise they are all in memory anyway.
        keep = hidden.__setitem__ if settings.spill is None else self._enter
        self.calls = walk.first_inputs(model.model, blocks, model.block(0, model.device), batches, keep)
        place = self.device if _fits(list(hidden.values()), self.device, settings) else model.device
        for i, x in hidden.items():
            self._enter(i, x.to(place))
        self.done: dict[str, QuantizedWeight] = {}
        self.rare: dict[str, None] = {}
        self.resume = None
        if settings.resume is not None:
            told = [sorted(names), settings.drift, settings.batch_tokens, settings.options]
            key = fingerprint(model, batches, schemes, told)
            self.resume = resuming.Folder(settings.resume, key)

    def _enter(self, index: int, x: Tensor) -> None:
        """Start both streams with the input of the first block."""
        self.quantized[index] = x.clone()
        if self.reference is not None:
            self.reference[index] = x

    def _store(self, part: int = 1) -> walk.Store:
        """A store for activations, with 1 / part of the budget."""
        self.stores.append(walk.Store(self.settings.spill, self.settings.budget // part))
        return self.stores[-1]

    def finish(self) -> None:
        """Free the activations in memory and on disk."""
        for store in self.stores:
            store.clear()

    def block(self, index: int) -> None:
        """Quantize a block, or take it from the resume folder, and advance both streams past it."""
        name = f"{self.prefix}.{index}"
        block = self.model.block(index, self.device)
        linears = linear_modules(block, name, self.names)
        calls = [call.to(self.device) for call in self.calls[index]]
        formats = {layer: self.schemes.scheme_of(layer).weights for layer in linears}
        saved = None if self.resume is None else self.resume.read(index, formats)
        if saved is None:
            weights = self._quantize(name, block, linears, calls)
            if self.settings.learn is not None and linears:
                assert self.reference is not None
                examples = walk.Examples(self.quantized, self.reference, calls)
                weights = self.settings.learn(index, self.model.block(index, self.device), weights, examples)
        else:
            weights = saved
            self._advance(self.reference, block, calls)
            self._round_inputs(linears)
        for layer, module in linears.items():
            set_weight(module, weights[layer].to(self.device).dequantize())
        self._advance(self.quantized, block, calls, name)
        weights = {layer: weight.to("cpu") for layer, weight in weights.items()}
        if saved is None and self.resume is not None:
            self.resume.write(index, weights)
        self.done.update(weights)

    @torch.no_grad()
    def _quantize(
        self, name: str, block: nn.Module, linears: dict[str, nn.Module], calls: list[walk.Call]
    ) -> dict[str, QuantizedWeight]:
        """Quantize a block's layers in place, in execution order, once the reference stream is past it."""
        weights: dict[str, QuantizedWeight] = {}
        runs = walk.expert_stages(block, name, linears)
        routed = {layer for run in runs for stage in run for layer in stage}
        x = self.quantized[0].to(self.device)
        stages = walk.stages(block, linears, x, calls[0], routed) if linears else []
        # Experts' layers stand where the first of them runs.
        place = next((i for i, stage in enumerate(stages) if stage[0] in routed), len(stages))
        stages = [stage for stage in stages if stage[0] not in routed]
        seen = self._advance_reference(block, {stage[0]: linears[stage[0]] for stage in stages}, calls)
        self._round_inputs(linears)

        def put(stage: list[str], statistics: Statistics | None) -> None:
            by_scheme: dict[Scheme, list[str]] = {}
            for layer in stage:
                by_scheme.setdefault(self.schemes.scheme_of(layer), []).append(layer)
            for alike in by_scheme.values():
                rows = [weight_of(linears[layer]).float() for layer in alike]
                stacked = self.quantizer(torch.cat(rows), statistics, ", ".join(alike))
                for layer, weight in zip(alike, unstack(stacked, [len(weight) for weight in rows]), strict=True):
                    weights[layer] = weight
                    set_weight(linears[layer], weights[layer].dequantize())

        for run in [*([stage] for stage in stages[:place]), *runs, *([stage] for stage in stages[place:])]:
            found = self._statistics(block, {stage[0]: linears[stage[0]] for stage in run}, seen, calls, routed)
            for stage in run:
                put(stage, found.pop(stage[0], None))
        return weights

    def _round_inputs(self, linears: dict[str, nn.Module]) -> None:
        for layer, module in linears.items():
            _round_inputs({layer: module}, self.schemes.scheme_of(layer).activations)

    def _advance_reference(
        self, block: nn.Module, layers: dict[str, nn.Module], calls: list[walk.Call]
    ) -> dict[str, walk.Store]:
        """Advance the reference stream past a block; returns the inputs of some of its layers if drift is followed."""
        if self.reference is None:
            return {}
        seen = {name: self._store(4) for name in layers}
        for i in range(self.count):
            found: dict[str, Tensor] = {}
            with walk.watching(layers, found.__setitem__):
                out = walk.run_block(block, self.reference[i].to(self.device), calls[i])
            for name, x in found.items():
                seen[name][i] = x.reshape(-1, x.shape[-1])
            self.reference[i] = out.to(self.reference[i].device)
        return seen

    def _statistics(
        self,
        block: nn.Module,
        layers: dict[str, nn.Module],
        seen: dict[str, walk.Store],
        calls: list[walk.Call],
        routed: Collection[str],
    ) -> dict[str, Statistics]:
        """Statistics of the inputs of some layers in the quantized block.

        seen: inputs in the original model, by layer.  routed: experts' layers, whose inputs are the tokens that the
        quantized model routes to them, without drift: the original may route others. None of those that too few reach.
        """
        hessians: dict[str, Tensor] = {}
        drifts: dict[str, Tensor] = {}
        tokens: Counter[str] = Counter()
        for i in range(self.count):
            inputs = walk.inputs_of(block, layers, self.quantized[i].to(self.device), calls[i])
            for name, x in ((name, x.float()) for name, x in inputs.items()):
                tokens[name] += len(x)
                _add(hessians, name, x.T @ x)
                if name in seen:
                    _add(drifts, name, (seen[name][i].to(self.device).float() - x).T @ x)
        enough = {}
        for name in layers:
            if name in seen:
                seen.pop(name).clear()
            if name not in routed or tokens[name] >= MINIMUM_TOKENS:
                _check_finite(hessians[name], name)
                if bool(hessians[name].diagonal().any()):
                    drift = drifts[name] / tokens[name] if name in drifts else None
                    enough[name] = Statistics(hessians[name] / tokens[name], drift, tokens[name])
                    continue
            if name not in routed:
                raise walk.unreached([name], ", whose inputs are all zero")
            self.rare[name.rpartition(".")[0]] = None
        return enough

    @torch.no_grad()
    def _advance(
        self, stream: walk.Store | None, block: nn.Module, calls: list[walk.Call], name: str | None = None
    ) -> None:
        """Advance a stream past a block, in place: its inputs are gone afterwards."""
        if stream is None:
            return
        for i in range(self.count):
            out = walk.run_block(block, stream[i].to(self.device), calls[i])
            if name is not None and not bool(out.isfinite().all()):
                raise CalibrationError(f"the outputs of {name} hold NaN or infinity after it was quantized")
            stream[i] = out.to(stream[i].device)


def _add(sums: dict[str, Tensor], name: str, product: Tensor) -> None:
    sums[name] = sums[name].add_(product) if name in sums else product


def _check_finite(hessian: Tensor, layer: str) -> None:
    if not bool(hessian.isfinite().all()):
        raise CalibrationError(
            f"the inputs of {layer} hold NaN or infinity during calibration; a model in 16 bits may overflow: "
            "try float32"
        )


def _fits(hidden: list[Tensor], device: torch.device, settings: Calibration) -> bool:
    """Whether both streams fit on the GPU with room for activations, so that they need no host copies."""
    if device.type != "cuda" or settings.spill is not None:
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return 2 * sum(x.nbytes for x in hidden) < min(free // 8, settings.budget)


def _round_inputs(linears: dict[str, nn.Module], format: ActivationFormat) -> None:
    """Quantize the inputs of linear layers with forward pre-hooks, as at inference."""
    if not format.quantized:
        return

    def rounded(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0]
        return (quantize_activations(x, format).dequantize().reshape(x.shape).to(x.dtype), *args[1:])

    for module in linears.values():
        module.register_forward_pre_hook(rounded)


def fingerprint(model: LazyModel, batches: list[Tensor], schemes: Quantization, told: object) -> str:
    """A hash of what a resumed run must share with the interrupted one: weights, text, schemes and what is told."""
    head = [schemes.scheme, dict(schemes.overrides), told]
    digest = hashlib.sha256(json.dumps(head, default=str, sort_keys=True).encode())
    for tokens in batches:
        digest.update(str(tuple(tokens.shape)).encode() + tokens.numpy().tobytes())
    for name, parameter in model.parameters():
        # Sums of halves distinguish any two real checkpoints, at a thousandth of the cost of hashing every byte.
        flat = parameter.flatten()
        sums = [float(part.double().sum()) for part in flat.tensor_split(2)]
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {sums}".encode())
    return digest.hexdigest()
