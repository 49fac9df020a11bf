"""vLLM's routed experts on anybit: loaded by vLLM into two stacks of codes, w13 (gate and up) and w2 (down).

vLLM routes, dispatches, reduces over ranks and runs shared experts; the method computes the routed experts alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing

from anybit.checkpoints.verify import layer_shapes
from anybit.codes.packing import QuantizedWeight, unstack
from anybit.codes.rtn import quantize_weight
from anybit.codes.sharding import shard_format
from anybit.device import Device
from anybit.errors import CheckpointError, LayerError
from anybit.layers.experts import Experts, Gate
from anybit.layers.linear import QuantLinear
from anybit.ops.compile_ahead import ExpertsKind
from anybit.ops.elementwise import paired_rows
from anybit.ops.prepared_experts import interleaved, prepare_experts, why_not
from anybit.scheme import Scheme, WeightFormat
from anybit.vllm import parameters, routing
from anybit.vllm.product import Product
from anybit.vllm.warmup import WarmUp

_SHARDS = {"w1": 0, "w3": 1, "w2": 2}
"""vLLM's names of gate, up and down -> their places in ``names``."""


@dataclass(frozen=True)
class _Stack:
    """One projection of all local experts, or gate and up together: this rank's part of it.

    shards: vLLM's names of the projections.  n, k: outputs and inputs of a projection on this rank; its first are
    ``row`` and ``column`` of the checkpoint's ``outputs`` and ``inputs``.
    """

    shards: tuple[str, ...]
    scheme: Scheme
    n: int
    row: int
    outputs: int
    k: int
    column: int
    inputs: int

    @property
    def stem(self) -> str:
        """Prefix of the stack's parameters."""
        return "w2" if self.shards == ("w2",) else "w13"

    @property
    def format(self) -> WeightFormat:
        """The format of this rank's inputs. Raises LayerError for a cut that no group size meets."""
        return shard_format(self.scheme.weights, self.column, self.k)

    def tensors(self, dtype: torch.dtype, ordered: bool, biased: bool) -> Iterator[tuple[str, Tensor]]:
        """Zeros of an expert for what is loaded, by suffix; ordered: the checkpoint has activation orders."""
        n, fmt = self.n * len(self.shards), self.format
        yield from parameters.tensors_of(fmt, n, self.k, fmt.groups(self.k), dtype).items()
        yield "weight_shape", torch.zeros(len(self.shards), 2, dtype=torch.int64)
        yield "weight", torch.zeros(0, dtype=torch.uint8)
        if ordered:
            yield "weight_g_idx", torch.zeros(0, dtype=torch.int32)
        if biased:
            yield "bias", torch.zeros(n, dtype=dtype)

    def place(self, expert: Tensor, loaded: Tensor, suffix: str, shard: str, layer: str) -> None:
        """Copy a checkpoint's tensor of one projection into an expert's. layer: the projection's name, for errors."""
        name, place, fmt = f"{layer}.{suffix}", self.shards.index(shard), self.scheme.weights
        if suffix == "weight":
            parameters.nothing_of(layer)(expert, loaded)
        elif suffix == "weight_g_idx":
            _refuse_order(loaded, fmt, layer)
        elif suffix == "weight_shape":
            expert[place] = loaded
        else:
            if suffix == "weight_zero_point":
                loaded = parameters.unpacked_zeros(name, loaded, fmt.bits, self.outputs)
            if suffix != "bias" and self.k != self.inputs:
                loaded = parameters.cut_inputs(loaded, suffix, fmt, self.column, self.k)
            if loaded.shape != (self.outputs, *expert.shape[1:]):
                raise CheckpointError(
                    f"{name} is {list(loaded.shape)} for this rank; the model and its scheme need "
                    f"{[self.outputs, *expert.shape[1:]]}; {parameters.ANOTHER}"
                )
            ours = loaded.narrow(0, self.row, self.n)
            # A bias is added once, and not by every rank.
            expert.narrow(0, place * self.n, self.n).copy_(ours * (not self.column) if suffix == "bias" else ours)


class AnyBitExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Routed experts of a quantized checkpoint, all of a layer in one format: one op, or one by one where it cannot be.

    vLLM's ``moe_kernel`` stays None: its runner dispatches and reduces.
    name: of the layer's experts.  scheme_of: the scheme of a layer of the checkpoint, by its name.
    group_index: whether the checkpoint stores activation orders, of which experts have the natural one.
    """

    def __init__(
        self, layer: RoutedExperts, name: str, scheme_of: Callable[[str], Scheme], warmup: WarmUp, group_index: bool
    ) -> None:
        super().__init__(layer.moe_config)
        self.name, self.warmup, self.group_index = name, warmup, group_index
        self.names, self._engine = projections_of(layer), get_current_vllm_config()
        with parameters.named(f"experts {name}"):
            self.gate = _gate_of(self.moe)
            if (reason := _why_not(layer)) is not None:
                raise LayerError(reason)
            gate, up, down = zip(*names_of(layer, name), strict=True)
            self.schemes = _common((*gate, *up), scheme_of), _common(down, scheme_of)
            if self.schemes[0].activations != self.schemes[1].activations:
                _refuse_mixed({self.schemes[0]: gate[0], self.schemes[1]: down[0]})
            self.stacks = self._stacks()
            self.together = self._runs_together(layer.local_num_experts)
        self._products: tuple[Product, Product] | None = None
        self._experts: Experts | None = None
        warmup.expect()

    def _stacks(self) -> tuple[_Stack, _Stack]:
        parallel, hidden, inner = (
            self.moe.moe_parallel_config,
            self.moe.hidden_dim,
            self.moe.intermediate_size_per_partition,
        )
        start, whole, (gate_up, down) = parallel.tp_rank * inner, parallel.tp_size * inner, self.schemes
        return (
            _Stack(("w1", "w3"), gate_up, inner, start, whole, hidden, 0, hidden),
            _Stack(("w2",), down, hidden, 0, hidden, inner, start, whole),
        )

    def create_weights(
        self, layer: RoutedExperts, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
        params_dtype: torch.dtype, weight_loader: parameters.Loader, **_: object,
    ) -> None:  # fmt: skip
        """Register this rank's parameters."""
        for stack in self.stacks:
            self._register(layer, stack, num_experts, params_dtype, weight_loader)

    def _register(
        self, layer: RoutedExperts, stack: _Stack, count: int, dtype: torch.dtype, loader: parameters.Loader
    ) -> None:
        """Register a stack's {w13,w2}_{suffix}: [experts, outputs, ...], by the suffixes of ``QuantLinear``."""
        for suffix, data in stack.tensors(dtype, self.group_index, self.moe.has_bias):
            stacked = data.new_zeros(count, *data.shape)
            parameters.add(layer, f"{stack.stem}_{suffix}", stacked, self._loader(layer, stack, suffix))

    def _runs_together(self, count: int) -> bool:
        """Whether the experts run as one op. Raises LayerError if they do not, and graphs were asked for."""
        both, down = self.stacks
        on = torch.empty(0)  # where vLLM builds the model
        device = Device.of(on) if on.is_cuda else None
        formats, activations = (both.format, down.format), both.scheme.activations
        reason = why_not(count, both.k, both.n, formats, activations, str(self.gate), device)
        model = self._engine.model_config
        if reason is not None and model is not None and not model.enforce_eager:
            raise LayerError(
                f"they run one after another, which no compiled graph holds, since {reason}: add --enforce-eager"
            )
        return reason is None

    def _loader(self, layer: RoutedExperts, stack: _Stack, suffix: str) -> parameters.Loader:
        """A loader of a checkpoint's tensors, one projection at a time; it says whether the expert is this rank's."""

        def load(
            param: Tensor, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int,
            return_success: bool = False,
        ) -> bool | None:  # fmt: skip
            number = layer._map_global_expert_id_to_local_expert_id(expert_id)
            if number != -1:
                projection = f"{self.name}.{expert_id}.{self.names[_SHARDS[shard_id]]}"
                stack.place(param.data[number], loaded_weight, suffix, shard_id, projection)
            return number != -1 if return_success else None

        load.supports_moe_loading = True  # type: ignore[attr-defined]
        return load

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Codes as vLLM loaded them -> the layer's ``Experts``."""
        loaded = {
            name: parameter.data
            for name, parameter in layer.named_parameters(recurse=False)
            if name.startswith(("w13_weight", "w2_weight"))
        }
        if not loaded:
            return  # already prepared
        self._check_loaded(layer, loaded)
        for name in loaded:
            delattr(layer, name)
        self._ready(layer, [self._tall(stack, loaded, layer.local_num_experts) for stack in self.stacks])

    def _ready(self, layer: RoutedExperts, tall: list[QuantizedWeight]) -> None:
        """Prepare both stacks' weights, each expert by expert, gate before up."""
        first = self._products is None and self._experts is None
        with parameters.named(f"experts {self.name}"):
            if self.together:
                self._prepare(layer, *tall)
            else:
                self._experts = self._one_by_one(layer, tall)
        if first:
            router = routing.install(layer, self._engine) if self.together else None
            weight = [] if self._products is None else self._products[0].weight(layer)
            self.warmup.add_experts(self._kind(router), weight)

    def _tall(self, stack: _Stack, loaded: Mapping[str, Tensor], count: int) -> QuantizedWeight:
        """A stack's weight: expert by expert, gate before up."""
        found = {
            suffix: loaded[f"{stack.stem}_{suffix}"].flatten(0, 1)
            for suffix in layer_shapes(stack.n, stack.k, stack.format)
            if suffix != "weight_shape"
        }
        parts = [self.names[_SHARDS[shard]] for shard in stack.shards]
        shape = count * len(parts) * stack.n, stack.k
        return parameters.weight_of(f"{self.name} ({' and '.join(parts)})", found, shape, stack.format)

    def _prepare(self, layer: RoutedExperts, gate_up: QuantizedWeight, down: QuantizedWeight) -> None:
        """Prepare what the op reads, in place when weights are loaded again: CUDA graphs hold the addresses."""
        count, activations = layer.local_num_experts, self.schemes[0].activations
        prepared = prepare_experts(interleaved(gate_up, count), down, count, activations, str(self.gate))
        both, first = (prepared.gate_up, prepared.down), self._products is None
        if self._products is None:
            self._spec = prepared.spec_text
            self._products = Product.of(layer, "anybit_w13", both[0]), Product.of(layer, "anybit_w2", both[1])
        else:
            for product, new in zip(self._products, both, strict=True):
                product.refill(layer, new)
        if self.moe.has_bias and (first or "w13_bias" in dict(get_layerwise_info(layer).loaded_weights)):
            bias = layer.get_parameter("w13_bias").data
            bias.copy_(bias[:, paired_rows(self.stacks[0].n).to(bias.device)])

    def _kind(self, router: tuple[int, bool] | None) -> ExpertsKind | None:
        """Which kernels the op and anybit's router run; None if experts run one by one."""
        if not self.together:
            return None
        return ExpertsKind(self._spec, self.moe.in_dtype, self.moe.experts_per_token, self.moe.has_bias, router)

    def _one_by_one(self, layer: RoutedExperts, tall: list[QuantizedWeight]) -> Experts:
        count, both = layer.local_num_experts, self.stacks[0]
        made = Experts(count, both.k, both.n, self.names, self.gate, device="meta")
        for stack, weights in zip(self.stacks, tall, strict=True):
            parts, scheme = (
                [self.names[_SHARDS[shard]] for shard in stack.shards],
                replace(stack.scheme, weights=stack.format),
            )
            bias = layer.get_parameter(f"{stack.stem}_bias").flatten().split(stack.n) if self.moe.has_bias else None
            for index, weight in enumerate(unstack(weights, [stack.n] * (count * len(parts)))):
                number, part = divmod(index, len(parts))
                quantized = QuantLinear.from_weight(weight, scheme, None if bias is None else bias[index])
                made.set_submodule(f"{number}.{parts[part]}", quantized.prepare())
        return made

    def _check_loaded(self, layer: RoutedExperts, loaded: Mapping[str, Tensor]) -> None:
        mine = [
            names
            for number, names in enumerate(names_of(layer, self.name))
            if layer._map_global_expert_id_to_local_expert_id(number) != -1
        ]
        for stack in self.stacks:
            for names, shapes in zip(mine, loaded[f"{stack.stem}_weight_shape"].tolist(), strict=True):
                for shard, (_, k) in zip(stack.shards, shapes, strict=True):
                    parameters.check_inputs(f"layer {names[_SHARDS[shard]]}", k, stack.inputs)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: ``apply`` needs no settings of vLLM's kernels."""

    def apply(
        self, layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        shared_experts: nn.Module | None = None, shared_experts_input: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Sum over this rank's experts among each token's, [tokens, hidden] in x's dtype.

        x: [tokens, hidden].  topk_weights: float32, topk_ids: global numbers of experts, [tokens, k]; -1 adds nothing.
        Shared experts are left to vLLM's runner.
        """
        ids = topk_ids
        if layer.expert_map is not None:
            ids = torch.where(ids < 0, -1, layer.expert_map[ids.clamp(min=0).long()])
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        if self._experts is not None:
            y: Tensor = self._experts(x, ids, topk_weights)
            return y
        assert self._products is not None
        gate_up, down = (product.weight(layer) for product in self._products)
        biases = (layer.w13_bias, layer.w2_bias) if self.moe.has_bias else (None, None)
        y = torch.ops.anybit.experts(x, ids, topk_weights, gate_up, down, *biases, self._spec)
        return y  # noqa: RET504


class AnyBitOnlineExpertsMethod(AnyBitExpertsMethod):
    """Routed experts of an unquantized checkpoint, quantized by RTN while they are loaded, a layer at a time."""

    uses_meta_device = True

    def __init__(self, layer: RoutedExperts, name: str, scheme_of: Callable[[str], Scheme], warmup: WarmUp) -> None:
        super().__init__(layer, name, scheme_of, warmup, False)

    def create_weights(self, layer: RoutedExperts, *sizes: Any, **words: Any) -> None:
        """Register the float weights on the meta device; vLLM materializes a layer's and has them processed."""
        super().create_weights(layer, *sizes, **words)
        initialize_online_processing(layer)

    def _register(
        self, layer: RoutedExperts, stack: _Stack, count: int, dtype: torch.dtype, loader: parameters.Loader
    ) -> None:
        data = torch.empty(count, stack.n * len(stack.shards), stack.k, dtype=dtype, device="meta")
        parameters.add(layer, f"{stack.stem}_weight", data, loader)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Floats -> codes -> the layer's ``Experts``."""
        if not layer.get_parameter("w13_weight").numel():
            return  # already prepared
        tall = []
        for stack in self.stacks:
            name = f"{stack.stem}_weight"
            with parameters.named(f"experts {self.name}"):
                tall.append(quantize_weight(layer.get_parameter(name).data.flatten(0, 1), stack.format))
            delattr(layer, name)
            parameters.add(layer, name, tall[-1].scale.new_empty(0), _of_another_rank)
        self._ready(layer, tall)


def _of_another_rank(*_: object, return_success: bool = False, **__: object) -> bool | None:
    """A loader of experts once this rank has all of its own."""
    return False if return_success else None


_of_another_rank.supports_moe_loading = True  # type: ignore[attr-defined]


def projections_of(layer: RoutedExperts) -> tuple[str, str, str]:
    """The checkpoint's names of an expert's gate, up and down."""
    return layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name


def names_of(layer: RoutedExperts, prefix: str) -> list[tuple[str, ...]]:
    """The checkpoint's names of each expert's gate, up and down. prefix: the name of the layer's experts."""
    count = layer.moe_config.num_logical_experts
    return [tuple(f"{prefix}.{number}.{name}" for name in projections_of(layer)) for number in range(count)]


def _why_not(layer: RoutedExperts) -> str | None:
    """Why a layer's experts cannot be served quantized, in a sentence."""
    moe = layer.moe_config
    if moe.moe_parallel_config.enable_eplb:
        return "anybit's codes cannot move between ranks: leave out --enable-eplb"
    if getattr(moe, "is_lora_enabled", False):
        return "vLLM's LoRA works with experts in 16 bits only: leave out --enable-lora, or merge the adapter"
    if layer.apply_router_weight_on_input and moe.experts_per_token != 1:
        return f"a router's weights multiply the input of one expert a token, not of {moe.experts_per_token}"
    if type(layer).__name__ == "GptOssRoutedExperts":
        return "vLLM's gpt-oss does not load experts by the names of their projections"
    return None


def _gate_of(moe: FusedMoEConfig) -> Gate:
    """How gate and up join. Raises LayerError for an activation that anybit does not have."""
    kind, limit = moe.activation.value, getattr(moe, "swiglu_limit", None)  # which older versions lack
    if kind in ("silu", "gelu", "gelu_tanh") and limit is None:
        return Gate(kind)
    if kind == "swigluoai":  # vLLM's kernel has these numbers
        return Gate("swigluoai")
    if kind == "swigluoai_uninterleave" and limit is not None and moe.swiglu_beta == 1:
        return Gate("swigluoai", moe.swiglu_alpha or 1.0, limit)
    clamped = "" if limit is None else f" with a limit of {limit}"
    raise LayerError(
        f"anybit joins gate and up by silu, gelu, gelu_tanh or swigluoai, not by {kind}{clamped}: leave the experts in "
        "16 bits"
    )


def _common(names: tuple[str, ...], scheme_of: Callable[[str], Scheme]) -> Scheme:
    """The scheme of these layers; LayerError if they have several."""
    found: dict[Scheme, str] = {}
    for name in names:
        found.setdefault(scheme_of(name), name)
    if len(found) > 1:
        _refuse_mixed(found)
    return next(iter(found))


def _refuse_mixed(found: Mapping[Scheme, str]) -> None:
    (scheme, name), (other, another) = list(found.items())[:2]
    raise LayerError(
        f"{name} is {scheme} and {another} {other}; in vLLM, the gates and ups of a layer's experts share a scheme, as "
        "their downs do, and all have one activation format: give them one scheme"
    )


def _refuse_order(index: Tensor, fmt: WeightFormat, layer: str) -> None:
    """Raise LayerError for an activation order other than the natural one: each expert would have its own."""
    places = torch.arange(len(index), device=index.device)
    if fmt.group is not None and not torch.equal(index.long(), places // fmt.group):
        raise LayerError(
            f"layer {layer} has an activation order (weight_g_idx), which anybit does not run in experts: quantize the "
            "model without it"
        )
