"""vLLM's routed experts on anybit: loaded by vLLM into two stacks of codes, w13 (gate and up) and w2 (down).

vLLM routes, dispatches, reduces over ranks and runs shared experts; the method computes the routed experts alone.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.platforms import current_platform

from anybit.codes.packing import QuantizedWeight, layer_shapes, unstack
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

_logger = init_logger("vllm.anybit")
_SHARDS = {"w1": 0, "w3": 1, "w2": 2}
"""vLLM's names of gate, up and down -> their places in ``names``."""
_GATHERED = "allgather_reducescatter"


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
            inputs = None if suffix == "bias" or self.k == self.inputs else (self.column, self.k)
            rows = parameters.rows_of(name, loaded, fmt, self.outputs, inputs, expert)
            ours = rows.narrow(0, self.row, self.n)
            # A bias is added once, and not by every rank.
            expert.narrow(0, place * self.n, self.n).copy_(ours * (not self.column) if suffix == "bias" else ours)


@dataclass
class _Kind:
    """Experts of one scheme. stacks: gate and up, and down, of those on this rank.

    experts: the checkpoint's numbers of those, local: this rank's.  names: of the layer's parameters, by
    "w13_weight_packed".
    """

    stacks: tuple[_Stack, _Stack]
    experts: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    products: tuple[Product, Product] | None = None
    spec: str = ""

    def biases(self, layer: nn.Module) -> list[Tensor | None]:
        """Of gate and up, and of down, a row an expert; None without."""
        names = [self.names.get(f"{stem}_bias") for stem in ("w13", "w2")]
        return [None if name is None else getattr(layer, name) for name in names]


class AnyBitExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Routed experts of a quantized checkpoint: one op for each of their schemes, or one by one where it cannot be.

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
            self.kinds = self._kinds(layer, scheme_of)
            self.here = [kind for kind in self.kinds if kind.local]  # with experts on this rank
            self.together = self._runs_together()
        self._experts: Experts | None = None
        warmup.expect()

    def _kinds(self, layer: RoutedExperts, scheme_of: Callable[[str], Scheme]) -> list[_Kind]:
        """The experts by their schemes. Raises LayerError for an expert whose layers no op multiplies together."""
        parallel, hidden = self.moe.moe_parallel_config, self.moe.hidden_dim
        inner = self.moe.intermediate_size_per_partition
        start, whole = parallel.tp_rank * inner, parallel.tp_size * inner
        found: dict[tuple[_Stack, _Stack], _Kind] = {}
        for expert, names in enumerate(names_of(layer, self.name)):
            gate, up, down = map(scheme_of, names)
            if gate != up or gate.activations != down.activations:
                _refuse_mixed(dict(reversed([*zip((gate, up, down), names, strict=True)])))
            stacks = (
                _Stack(("w1", "w3"), gate, inner, start, whole, hidden, 0, hidden),
                _Stack(("w2",), down, hidden, 0, hidden, inner, start, whole),
            )
            kind = found.setdefault(stacks, _Kind(stacks))
            if (number := layer._map_global_expert_id_to_local_expert_id(expert)) != -1:
                kind.experts.append(expert)
                kind.local.append(number)
        return [*found.values()]

    def create_weights(
        self, layer: RoutedExperts, params_dtype: torch.dtype, weight_loader: parameters.Loader, **_: object
    ) -> None:
        """Register {w13,w2}_{suffix}: [experts of a scheme, outputs, ...], by the suffixes of ``QuantLinear``.

        vLLM loads into those of the first scheme; those of others, whose names end in a number, get theirs from them.
        """
        known: set[str] = set()
        for place, kind in enumerate(self.kinds):
            for stack in kind.stacks:
                for suffix, data in stack.tensors(params_dtype, self.group_index, self.moe.has_bias):
                    name = f"{stack.stem}_{suffix}"
                    kind.names[name] = f"{name}_{place}" if name in known else name
                    known.add(name)
                    stacked = data.new_zeros(len(kind.local), *data.shape)
                    parameters.add(layer, kind.names[name], stacked, self._loader(layer, name))

    def _runs_together(self) -> bool:
        """Whether the experts run as one op a scheme. Raises LayerError if they do not, and graphs were asked for."""
        on = torch.empty(0)  # where vLLM builds the model
        device = Device.of(on) if on.is_cuda else None

        def alone(kind: _Kind) -> str | None:
            both, down = kind.stacks
            formats, activations = (both.format, down.format), both.scheme.activations
            return why_not(len(kind.local), both.k, both.n, formats, activations, str(self.gate), device)

        reason = next(filter(None, map(alone, self.here)), None)
        if reason is None:
            return True
        model = self._engine.model_config
        if model is not None and not model.enforce_eager:
            raise LayerError(
                f"they run one after another, which no compiled graph holds, since {reason}: add --enforce-eager"
            )
        _logger.warning_once("anybit: experts run one after another, which is slow, since %s", reason)
        return False

    def _loader(self, layer: RoutedExperts, name: str) -> parameters.Loader:
        """A loader of a checkpoint's tensors, one projection at a time; it says whether the expert is this rank's."""
        stem, _, suffix = name.partition("_")

        def load(
            param: Tensor, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int,
            return_success: bool = False,
        ) -> bool | None:  # fmt: skip
            number = layer._map_global_expert_id_to_local_expert_id(expert_id)
            if number != -1:
                kind = next(kind for kind in self.kinds if number in kind.local)
                projection = f"{self.name}.{expert_id}.{self.names[_SHARDS[shard_id]]}"
                if name not in kind.names:
                    raise CheckpointError(
                        f"{projection}.{suffix} is stored, and its scheme has none; {parameters.ANOTHER}"
                    )
                own = param if kind.names[name] == name else layer.get_parameter(kind.names[name])
                stack = kind.stacks[stem == "w2"]
                stack.place(own.data[kind.local.index(number)], loaded_weight, suffix, shard_id, projection)
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
        for kind in self.here:
            self._check_loaded(layer, kind, loaded)
        for name in loaded:
            delattr(layer, name)
        self._ready(layer, [[self._tall(kind, stack, loaded) for stack in kind.stacks] for kind in self.here])

    def _ready(self, layer: RoutedExperts, tall: Sequence[Sequence[QuantizedWeight]]) -> None:
        """Prepare both stacks' weights of each kind, expert by expert, gate before up."""
        first = self._experts is None and self.here[0].products is None
        with parameters.named(f"experts {self.name}"):
            if self.together:
                for place, (kind, weights) in enumerate(zip(self.here, tall, strict=True)):
                    self._prepare(layer, kind, place, *weights)
            else:
                self._experts = self._one_by_one(layer, tall)
        if not first:
            return
        if len(self.kinds) > 1:
            layer.register_buffer("anybit_places", self._places().to(tall[0][0].words.device), persistent=False)
        router = routing.install(layer, self._engine) if self.together else None
        words = self.moe.in_dtype, self.moe.experts_per_token, self.moe.has_bias, router
        kinds = [(ExpertsKind(kind.spec, *words), kind.products) for kind in self.here]
        self.warmup.add_experts({kind: products[0].weight(layer) for kind, products in kinds if products is not None})

    def _places(self) -> Tensor:
        """int32 [kinds here, experts + 1]: a global id, or -1 -> the expert's place in a kind, or -1."""
        places = torch.full((len(self.here), self.moe.num_logical_experts + 1), -1, dtype=torch.int32)
        for row, kind in zip(places, self.here, strict=True):
            row[kind.experts] = torch.arange(len(kind.experts), dtype=torch.int32, device=row.device)
        return places

    def _tall(self, kind: _Kind, stack: _Stack, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        """A stack's weight: expert by expert, gate before up."""
        found = {
            suffix: loaded[kind.names[f"{stack.stem}_{suffix}"]].flatten(0, 1)
            for suffix in layer_shapes(stack.n, stack.k, stack.format)
            if suffix != "weight_shape"
        }
        parts = [self.names[_SHARDS[shard]] for shard in stack.shards]
        shape = len(kind.local) * len(parts) * stack.n, stack.k
        return parameters.weight_of(f"{self.name} ({' and '.join(parts)})", found, shape, stack.format)

    def _prepare(
        self, layer: RoutedExperts, kind: _Kind, place: int, gate_up: QuantizedWeight, down: QuantizedWeight
    ) -> None:
        """Prepare what an op reads, in place when weights are loaded again: CUDA graphs hold the addresses."""
        count, activations = len(kind.local), kind.stacks[0].scheme.activations
        prepared = prepare_experts(interleaved(gate_up, count), down, count, activations, str(self.gate))
        both, first, end = (prepared.gate_up, prepared.down), kind.products is None, f"_{place}" if place else ""
        if kind.products is None:
            kind.spec = prepared.spec_text
            wide, tall = (f"anybit_{stack.stem}{end}" for stack in kind.stacks)
            kind.products = Product.of(layer, wide, both[0]), Product.of(layer, tall, both[1])
        else:
            for product, new in zip(kind.products, both, strict=True):
                product.refill(layer, new)
        bias, _ = kind.biases(layer)
        if bias is not None and (first or kind.names["w13_bias"] in dict(get_layerwise_info(layer).loaded_weights)):
            bias.copy_(bias[:, paired_rows(kind.stacks[0].n).to(bias.device)])

    def _one_by_one(self, layer: RoutedExperts, tall: Sequence[Sequence[QuantizedWeight]]) -> Experts:
        both = self.here[0].stacks[0]
        made = Experts(layer.local_num_experts, both.k, both.n, self.names, self.gate, device="meta")
        for kind, weights in zip(self.here, tall, strict=True):
            for stack, weight, bias in zip(kind.stacks, weights, kind.biases(layer), strict=True):
                parts = [self.names[_SHARDS[shard]] for shard in stack.shards]
                scheme = replace(stack.scheme, weights=stack.format)
                rows = None if bias is None else bias.flatten().split(stack.n)
                for index, own in enumerate(unstack(weight, [stack.n] * (len(kind.local) * len(parts)))):
                    place, part = divmod(index, len(parts))
                    quantized = QuantLinear.from_weight(own, scheme, None if rows is None else rows[index])
                    made.set_submodule(f"{kind.local[place]}.{parts[part]}", quantized.prepare())
        return made

    def _check_loaded(self, layer: RoutedExperts, kind: _Kind, loaded: Mapping[str, Tensor]) -> None:
        every = names_of(layer, self.name)
        mine = [every[number] for number in kind.experts]
        for stack in kind.stacks:
            stored = loaded[kind.names[f"{stack.stem}_weight_shape"]].tolist()
            for names, shapes in zip(mine, stored, strict=True):
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
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        if self._experts is None and len(self.kinds) > 1:
            pairs = zip(self.here, layer.anybit_places[:, topk_ids], strict=True)
            return functools.reduce(torch.add, (self._run(layer, *pair, x, topk_weights) for pair in pairs))
        ids = topk_ids
        if layer.expert_map is not None:
            ids = torch.where(ids < 0, -1, layer.expert_map[ids.clamp(min=0).long()])
        if self._experts is None:
            return self._run(layer, self.here[0], ids, x, topk_weights)
        y: Tensor = self._experts(x, ids, topk_weights)
        return y

    def _run(self, layer: RoutedExperts, kind: _Kind, ids: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        assert kind.products is not None
        gate_up, down = (product.weight(layer) for product in kind.products)
        y: Tensor = torch.ops.anybit.experts(x, ids, weights, gate_up, down, *kind.biases(layer), kind.spec)
        return y


class AnyBitOnlineExpertsMethod(AnyBitExpertsMethod):
    """Routed experts of an unquantized checkpoint, quantized by RTN while they are loaded, a layer at a time."""

    uses_meta_device = True

    def __init__(self, layer: RoutedExperts, name: str, scheme_of: Callable[[str], Scheme], warmup: WarmUp) -> None:
        if layer.moe_config.has_bias:
            raise LayerError("experts with biases are not quantized while vLLM loads them: quantize the model first")
        super().__init__(layer, name, scheme_of, warmup, False)

    def create_weights(
        self, layer: RoutedExperts, params_dtype: torch.dtype, weight_loader: parameters.Loader, **_: object
    ) -> None:
        """Register the float weights on the meta device; vLLM materializes a layer's and has them processed."""
        for stack in self.kinds[0].stacks:
            shape = layer.local_num_experts, stack.n * len(stack.shards), stack.k
            data = torch.empty(shape, dtype=params_dtype, device="meta")
            parameters.add(layer, f"{stack.stem}_weight", data, weight_loader)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Floats -> codes -> the layer's ``Experts``."""
        if layer.get_parameter("w13_weight").numel():  # otherwise already prepared
            self._ready(layer, [*zip(*(self._quantized(layer, place) for place in range(2)), strict=True)])

    def _quantized(self, layer: RoutedExperts, place: int) -> list[QuantizedWeight]:
        """The tall weights of w13 (place 0) or w2 (1), one a kind; the floats are freed."""
        name, several = f"{('w13', 'w2')[place]}_weight", len(self.here) > 1
        floats, made = layer.get_parameter(name).data, []
        for kind in self.here:
            own = floats[kind.local] if several else floats
            with parameters.named(f"experts {self.name}"):
                made.append(quantize_weight(own.flatten(0, 1), kind.stacks[place].format))
        delattr(layer, name)
        parameters.add(layer, name, floats.new_empty(0), _of_another_rank)
        return made


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
    moe, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    if parallel.enable_eplb:
        return "anybit's codes cannot move between ranks: leave out --enable-eplb"
    if parallel.dp_size > 1 and parallel.all2all_backend != _GATHERED:
        return f"tokens of other ranks come by --all2all-backend {_GATHERED} only, not by {parallel.all2all_backend}"
    if parallel.dp_size > 1 and current_platform.is_cpu():
        return "vLLM's ranks on a CPU cannot send each other tokens: leave out --data-parallel-size"
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


def _refuse_mixed(found: Mapping[Scheme, str]) -> None:
    (scheme, name), (other, another) = list(found.items())[:2]
    raise LayerError(
        f"{name} is {scheme} and {another} {other}; in vLLM, gate and up of an expert share a scheme, and all three "
        "have one activation format: give them one scheme"
    )


def _refuse_order(index: Tensor, fmt: WeightFormat, layer: str) -> None:
    """Raise LayerError for an activation order other than the natural one: each expert would have its own."""
    places = torch.arange(len(index), device=index.device)
    if fmt.group is not None and not torch.equal(index.long(), places // fmt.group):
        raise LayerError(
            f"layer {layer} has an activation order (weight_g_idx), which anybit does not run in experts: quantize the "
            "model without it"
        )
