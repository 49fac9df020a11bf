"""Layers that are kept in two layouts, so that every token count runs the strategy that is fastest there.

ADAngel's dispatcher over whole strategies: decoding may read bit planes while prefill multiplies packed tiles, and a
weight-only layer may quantize its activations above some token count, where that has been allowed. The policy map
decides which layers are worth the memory.
"""

from dataclasses import replace

import torch
from torch import Tensor

from anybit.device import Device
from anybit.kernels.gemm.builtin import step
from anybit.kernels.gemm.families import Layout
from anybit.ops.backend import Backend, LinearSpec
from anybit.ops.checks import layouts_of, product_of
from anybit.ops.prologue import LinearInput, opened
from anybit.packing import QuantizedWeight
from anybit.scheme import ActivationFormat, Scheme
from anybit.tune.dispatch import allowed, dispatcher, forget_with_maps, tell

_UNWANTED = 9
"""A cost above every other backend's: it runs only when it is named."""
_EIGHT = (ActivationFormat(8, "sym"), ActivationFormat(8, "float"))

_FREE = 0.3
"""How much of the GPU's memory must stay free for caches where layers are kept twice."""

_Decided = tuple[int, LinearSpec]
_decided: dict[tuple[int, int, torch.dtype, int], _Decided] = {}
forget_with_maps(_decided)


def _room(weight: QuantizedWeight) -> bool:
    """Whether a part of the GPU's memory stays free when a layer is kept twice; said once where it does not."""
    if not weight.words.is_cuda:
        return True
    free, total = torch.cuda.mem_get_info(weight.words.device)
    if free - 2 * weight.words.numel() * weight.words.element_size() >= _FREE * total:
        return True
    tell(f"less than {_FREE:.0%} of the GPU's memory would stay free: layers from here on are kept in one layout")
    return False


class MultiLayoutBackend(Backend):
    """Two backends in one; ``layouts``: what each reads, ``first``: how many of the tensors are the first one's."""

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
        self.codes = not self.eight and all(part.codes for part in parts)

    def why_not(self, weight: QuantizedWeight, activations: ActivationFormat) -> str | None:
        """Why one of the two cannot run this layer where it is, in a sentence."""
        if self.eight and activations.quantized:
            return "it quantizes 16-bit activations to 8 bits, and these are quantized already"
        if self.eight and "a8" not in allowed():
            return 'quantizing 16-bit activations has not been allowed (anybit.tune.dispatch.allow("a8"))'
        if self.eight and weight.group_index is not None:
            return "it does not support activation order"
        formats = (activations, _EIGHT[0] if self.eight else activations)
        for part, form in zip(self.parts, formats, strict=True):
            if (reason := part.why_not(weight, form)) is not None:
                return f"{part.name}: {reason}"
        return None

    @property
    def eight(self) -> bool:
        """Whether the second layout is for activations that were 16-bit ones."""
        return Layout.tiles_a16 in self.layouts

    def cost(self, weight: QuantizedWeight, activations: ActivationFormat) -> int:
        """Before all others where the policy map finds both layouts worth keeping, and there is room for them.

        Where 8-bit activations won at every count that was measured both are kept, too: what no map decides (inputs
        that are not aligned) runs with 16-bit ones.
        """
        if not self.unasked:
            return _UNWANTED  # nor is room for it asked about, which tells where there is none
        found = set(layouts_of(weight, activations))
        made_eight = self.eight and not activations.quantized
        wanted = found == set(self.layouts) or (made_eight and found == {self.layouts[1]})
        return -1 if wanted and _room(weight) else _UNWANTED

    def prepare(self, weight: QuantizedWeight, activations: ActivationFormat) -> list[Tensor]:
        """The tensors of both."""
        formats = (activations, _EIGHT[0] if self.eight else activations)
        pairs = zip(self.parts, formats, strict=True)
        return [tensor for part, form in pairs for tensor in part.prepare(weight, form)]

    def restore(self, tensors: list[Tensor], spec: LinearSpec) -> QuantizedWeight:
        """The packed weight, exactly as it was."""
        return self.parts[0].restore(tensors[: self._first], spec)

    def rows(self, ids: Tensor, tensors: list[Tensor], spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        """By the first of the two."""
        return self.parts[0].rows(ids, tensors[: self._first], spec, dtype)

    def linear(self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec) -> Tensor:
        """The faster of the two at this many tokens."""
        which, mine, inner = self._chosen(x, tensors, spec)
        return self.parts[which].linear(x, mine, bias, inner)

    def linear_silu(
        self, x: LinearInput, tensors: list[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> Tensor | None:
        """By the same one, if it can."""
        which, mine, inner = self._chosen(x, tensors, spec)
        return self.parts[which].linear_silu(x, mine, bias, inner)

    def _chosen(self, x: LinearInput, tensors: list[Tensor], spec: LinearSpec) -> tuple[int, list[Tensor], LinearSpec]:
        """Which of the two, its tensors, and what it is told of the layer."""
        rows, _ = opened(x)
        tokens = rows.numel() // spec.k if spec.k else 0
        key = id(spec), step(tokens), rows.dtype, rows.get_device()
        found = _decided.get(key)
        if found is None:
            found = _decided[key] = self._decide(rows, spec, tokens)
        which, inner = found
        return which, tensors[self._first :] if which else tensors[: self._first], inner

    def _decide(self, x: Tensor, spec: LinearSpec, tokens: int) -> _Decided:
        product = product_of(spec, step(max(tokens, 1)), x)
        by = dispatcher(Device.of(x).name)
        layouts = by.in_fused(product, self.layouts) if spec.fused else self.layouts
        chosen = by.choose(product, layouts, allowed()).candidate
        which = self.layouts.index(chosen.layout)
        if chosen.activations != spec.activations:
            scheme = Scheme(spec.weights, spec.activations)
            kind = "int8" if chosen.activations.integer else "e4m3"
            tell(f"{scheme}: activations of large products are quantized to {kind}, as was allowed (a8)")
        inner = replace(spec, backend=self.parts[which].name, activations=chosen.activations)
        return which, LinearSpec.parse(str(inner))  # the one that is kept, whose identity plans go by
