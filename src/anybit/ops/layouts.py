"""Layers kept in two weight layouts, so that every token count runs the fastest strategy.

ADAngel's dispatcher over whole strategies: decode may read bit planes while prefill multiplies packed tiles, and a
weight-only layer may quantize its activations above some token count, if that is allowed. The policy map decides which
layers are worth the memory.
"""

from dataclasses import replace

import torch
from torch import Tensor

from anybit.choose.builtin import step
from anybit.choose.dispatch import allowed, dispatcher, forget_with_maps, tell
from anybit.choose.families import Layout
from anybit.codes.packing import QuantizedWeight
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.ops.backend import Backend, LinearSpec
from anybit.ops.checks import layouts_of
from anybit.scheme import ActivationFormat, Scheme

_UNWANTED = 9
"""A cost above every other backend's."""
_EIGHT = (ActivationFormat(8, "sym"), ActivationFormat(8, "float"))

_FREE = 0.3
"""Fraction of GPU memory that must stay free (for KV caches) if layers are kept twice."""

_Decided = tuple[int, LinearSpec]
_decided: dict[tuple[int, int, torch.dtype, int], _Decided] = {}
forget_with_maps(_decided)


def _room(weight: QuantizedWeight) -> bool:
    """Whether enough GPU memory stays free if a layer is kept twice; says so once if not."""
    if not weight.words.is_cuda:
        return True
    free, total = torch.cuda.mem_get_info(weight.words.device)
    if free - 2 * weight.words.numel() * weight.words.element_size() >= _FREE * total:
        return True
    tell(f"less than {_FREE:.0%} of the GPU's memory would stay free: layers from here on are kept in one layout")
    return False


class MultiLayoutBackend(Backend):
    """Two backends in one. layouts: the layout that each reads.  first: number of tensors of the first one."""

    def __init__(
        self,
        name: str,
        parts: tuple[Backend, Backend],
        layouts: tuple[Layout, Layout],
        first: int,
        unasked: tuple[str, ...] = (),
    ) -> None:
        self.name, self.parts, self.layouts, self._first = name, parts, layouts, first
        self.unasked = unasked

    def why_not(self, weight: QuantizedWeight, activations: ActivationFormat) -> str | None:
        """Why one of the two cannot run this layer on its device, as a sentence; None if both can."""
        if self.eight and activations.quantized:
            return "it quantizes 16-bit activations to 8 bits, and these are already quantized"
        if self.eight and "a8" not in allowed():
            return 'quantizing 16-bit activations is not allowed (allow it: anybit.choose.dispatch.allow("a8"))'
        if self.eight and weight.group_index is not None:
            return "it does not support activation order"
        formats = (activations, _EIGHT[0] if self.eight else activations)
        for part, form in zip(self.parts, formats, strict=True):
            if (reason := part.why_not(weight, form)) is not None:
                return f"{part.name}: {reason}"
        return None

    @property
    def eight(self) -> bool:
        """Whether the second layout is for 16-bit activations quantized to 8 bits."""
        return Layout.tiles_a16 in self.layouts

    def cost(self, weight: QuantizedWeight, activations: ActivationFormat) -> int:
        """Lowest of all if the policy map finds both layouts worth keeping and memory suffices; else highest.

        If 8-bit activations won at every measured token count, both are still kept: misaligned inputs, which no map
        covers, run with 16-bit activations.
        """
        if not self.unasked:
            return _UNWANTED  # before asking for memory, which would log that there is none
        found = set(layouts_of(weight, activations))
        made_eight = self.eight and not activations.quantized
        wanted = found == set(self.layouts) or (made_eight and found == {self.layouts[1]})
        return -1 if wanted and _room(weight) else _UNWANTED

    def prepare(self, weight: QuantizedWeight, activations: ActivationFormat) -> list[Tensor]:
        """The tensors of both layouts."""
        formats = (activations, _EIGHT[0] if self.eight else activations)
        pairs = zip(self.parts, formats, strict=True)
        return [tensor for part, form in pairs for tensor in part.prepare(weight, form)]

    def restore(self, tensors: list[Tensor], spec: LinearSpec) -> QuantizedWeight:
        """The packed weight, exactly as it was."""
        return self.parts[0].restore(tensors[: self._first], spec)

    def rows(self, ids: Tensor, tensors: list[Tensor], spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        """Through the first backend."""
        return self.parts[0].rows(ids, tensors[: self._first], spec, dtype)

    def linear(self, x: Tensor, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """Through the faster backend at this token count."""
        which, mine, inner = self._chosen(x, tensors, spec)
        return self.parts[which].linear(x, mine, bias, inner)

    def _chosen(self, x: Tensor, tensors: list[Tensor], spec: LinearSpec) -> tuple[int, list[Tensor], LinearSpec]:
        """(index of the backend, its tensors, its spec)."""
        tokens = x.numel() // spec.k if spec.k else 0
        key = id(spec), step(tokens), x.dtype, x.get_device()
        found = _decided.get(key)
        if found is None:
            found = _decided[key] = self._decide(x, spec, tokens)
        which, inner = found
        return which, tensors[self._first :] if which else tensors[: self._first], inner

    def _decide(self, x: Tensor, spec: LinearSpec, tokens: int) -> _Decided:
        gpu, formats = Device.of(x), (spec.weights, spec.activations)
        product = LinearProblem(step(max(tokens, 1)), spec.n, spec.k, *formats, x.dtype, gpu)
        by = dispatcher(gpu.name)
        layouts = by.in_fused(product, self.layouts) if spec.fused else self.layouts
        chosen = by.choose(product, layouts, allowed()).candidate
        which = self.layouts.index(chosen.layout)
        if chosen.activations != spec.activations:
            scheme = Scheme(spec.weights, spec.activations)
            kind = "int8" if chosen.activations.integer else "e4m3"
            tell(f"{scheme}: activations of large GEMMs are quantized to {kind}, as allowed (a8)")
        inner = replace(spec, backend=self.parts[which].name, activations=chosen.activations)
        return which, LinearSpec.parse(str(inner))  # the unique object of its text, as plans are cached by identity
