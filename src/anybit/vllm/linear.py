"""vLLM's linear layers on anybit: loaded by vLLM, prepared once for a backend, run by ``anybit.ops``."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter

from anybit import ops
from anybit.codes.packing import QuantizedWeight, stack
from anybit.codes.rtn import quantize_weight
from anybit.codes.sharding import shard_format, shard_ordered
from anybit.errors import CheckpointError, LayerError
from anybit.scheme import Scheme, WeightFormat
from anybit.vllm import fusion, parameters, rotary
from anybit.vllm.product import ANOTHER_LAYOUT, Product
from anybit.vllm.warmup import WarmUp

_KINDS = (
    ReplicatedLinear, ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
)  # fmt: skip
_LOADERS = [kind.weight_loader for kind in _KINDS]
"""Of the classes whose ways to share a layer between ranks are this module's."""
_ONLINE = "serve the original model with one scheme, `anybit serve MODEL --scheme w4a16g128`"
_GROUPED = ("weight_scale", "weight_zero_point", "weight_minimum")


@dataclass(frozen=True)
class Part:
    """One of the checkpoint's layers that vLLM fuses into one. name: as stored.  hadamard: inputs are rotated."""

    name: str
    scheme: Scheme
    hadamard: bool


Weighed = tuple[Part, QuantizedWeight]


class _Method(LinearMethodBase):  # type: ignore[misc]
    """Shared by both methods: preparing a loaded layer, and its forward. parts: all with one activation format."""

    def __init__(self, parts: list[Part], warmup: WarmUp) -> None:
        self.parts, self.warmup = parts, warmup
        self.scheme = parts[0].scheme  # for its activation format only: weight formats of parts may differ
        warmup.expect()

    @property
    def name(self) -> str:
        """The names of the parts, for errors."""
        return " + ".join(part.name for part in self.parts)

    def create_weights(
        self, layer: LinearBase, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, weight_loader: parameters.Loader,
    ) -> None:  # fmt: skip
        """Create this rank's parameters, and record its shard's sizes and offset for the forward and the loaders."""
        outputs, split = list(output_partition_sizes), input_size_per_partition != input_size
        layer.anybit_inputs, layer.anybit_outputs, layer.anybit_split = input_size_per_partition, outputs, split
        layer.anybit_whole_inputs, layer.anybit_start = input_size, layer.tp_rank * input_size_per_partition * split
        self._register(layer, params_dtype, weight_loader)

    @abstractmethod
    def _register(self, layer: LinearBase, dtype: torch.dtype, loader: parameters.Loader) -> None: ...

    def _each(self, layer: LinearBase) -> list[tuple[Part, int, int]]:
        """(part, first output, number of outputs) of every layer that vLLM fuses."""
        outputs = layer.anybit_outputs
        if len(self.parts) not in (1, len(outputs)):
            raise LayerError(
                f"vLLM fuses {len(outputs)} layers into one, of which it names {len(self.parts)}, {self.name}: "
                f"{_ONLINE}"
            )
        parts = self.parts if len(self.parts) == len(outputs) else self.parts * len(outputs)
        return list(zip(parts, accumulate(outputs[:-1], initial=0), outputs, strict=True))

    def _ready(self, layer: LinearBase, weights: list[Weighed]) -> None:
        """Prepare the weights of a layer's parts; adjacent parts that share their inputs become one GEMM."""
        if {weight.format.code for _, weight in weights} == {"sym", "asym"}:  # GPTQ with constant zeros is sym
            weights = [(part, _with_zeros(weight)) for part, weight in weights]
        runs: list[list[Weighed]] = []
        for weight in weights:
            if runs and _stackable(runs[-1][-1], weight):
                runs[-1].append(weight)
            else:
                runs.append([weight])
        if hasattr(layer, "anybit_products"):
            self._reload(layer, runs)
            return
        plain = len(runs) == 1 and not self.warmup.adapters  # LoRA adds to outputs in the model's order
        attention = fusion.parent_of(layer, "qkv_proj")
        heads = rotary.heads_of(attention, layer.params_dtype, self.scheme, plain)
        paired = fusion.pairs_of(layer, self.scheme, weights[0][1]) if plain else None
        order = paired if heads is None else heads.order
        layer.anybit_order = None if order is None else order.cpu()  # on the CPU, so that it survives a sleep
        if order is not None and layer.bias is not None:
            layer.bias.data = layer.bias.data[order.to(layer.bias.device)]
        products = []
        for number, run in enumerate(runs):
            part = run[0][0]
            prepared = self._prepare(run, order)
            if part.hadamard:
                width = layer.anybit_inputs * (layer.tp_size if layer.anybit_split else 1)
                signs = ops.prepare_rotation(width, run[0][1].words.device)
                # Sleep level 2 discards GPU memory allocated while loading and restores only buffers.
                layer.register_buffer(f"anybit_{number}_signs", signs, persistent=False)
            products.append(Product.of(layer, f"anybit_{number}", prepared, part.hadamard))
        layer.anybit_products = tuple(products)
        # vLLM's LoRA reads the layer's device from this attribute.
        layer.register_buffer("weight_packed", getattr(layer, products[0].tensors[0]), persistent=False)
        told = self.warmup.joined
        if len(self.parts) > 1:
            told["layers that vLLM fuses are one product"].append(len(runs) == 1)
        if attention is not None:
            told["attention layers run anybit's RoPE and cache write"].append(heads is not None)
        if fusion.parent_of(layer, "gate_up_proj") is not None:
            told["MLPs run anybit's SiLU"].append(fusion.activate(layer, paired is not None))
        if heads is not None:
            rotary.replace_forward(attention, heads)
        self.warmup.add(layer, products, heads, paired is not None)

    def _prepare(self, run: list[Weighed], order: Tensor | None) -> ops.Prepared:
        """Stack the weights of parts that share their inputs, reorder the outputs, and prepare them for a backend."""
        joined = run[0][1] if len(run) == 1 else stack([weight for _, weight in run])
        joined = joined if order is None else joined.rows(order)
        with parameters.named(f"layer {self.name}"):
            return ops.prepare(joined, self.scheme.activations, fused=joined.words.is_cuda)

    def _reload(self, layer: LinearBase, runs: list[list[Weighed]]) -> None:
        """Replace the weights in place: vLLM's reload_weights, or a trainer's weight update."""
        products, order = layer.anybit_products, layer.anybit_order
        if len(runs) != len(products):
            raise LayerError(f"layer {self.name}: {ANOTHER_LAYOUT}")
        for product, run in zip(products, runs, strict=True):
            prepared = self._prepare(run, order)
            with parameters.named(f"layer {self.name}"):
                product.refill(layer, prepared)
        loaded = {name for name, _ in get_layerwise_info(layer).loaded_weights}
        if order is not None and "bias" in loaded:
            layer.bias.data.copy_(layer.bias.data[order.to(layer.bias.device)])

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Y = x W^T + bias: x [..., K] -> y [..., N] of this rank, in x's dtype."""
        products = layer.anybit_products
        if len(products) == 1:
            return self._multiply(layer, products[0], x, bias)
        biases = [None] * len(products) if bias is None else bias.split([product.outputs for product in products])
        parts = [self._multiply(layer, product, x, part) for product, part in zip(products, biases, strict=True)]
        return torch.cat(parts, dim=-1)

    def _multiply(self, layer: LinearBase, product: Product, x: Tensor, bias: Tensor | None) -> Tensor:
        if product.hadamard and layer.anybit_split:  # a rotation mixes all inputs, so gather them from all ranks
            every = ops.hadamard(tensor_model_parallel_all_gather(x.contiguous()))
            x = every[..., layer.anybit_start : layer.anybit_start + layer.anybit_inputs].contiguous()
        elif product.hadamard:
            return ops.hadamard_linear(x, product.weight(layer), bias, product.spec)
        y: Tensor = torch.ops.anybit.linear(x, product.weight(layer), bias, product.spec)
        return y


@dataclass
class _Kind:
    """Parts of one format. outputs: of all, on this rank.  names: of the layer's parameters, by the tensors'."""

    format: WeightFormat
    outputs: int = 0
    names: dict[str, str] = field(default_factory=dict)


class AnyBitLinearMethod(_Method):
    """Linear layers of a quantized checkpoint. rows: each part's kind, and its first output among that kind's."""

    def __init__(self, parts: list[Part], warmup: WarmUp, group_index: bool) -> None:
        super().__init__(parts, warmup)
        self.group_index = group_index
        self.rows: list[tuple[_Kind, int]] = []

    def _register(self, layer: LinearBase, dtype: torch.dtype, loader: parameters.Loader) -> None:
        """Register parameters for this rank's shard of the tensors that ``QuantLinear`` documents.

        vLLM loads into those of the first format; those of others, whose names end in a number, get theirs from them.
        """
        if layer.tp_size > 1 and type(layer).weight_loader not in _LOADERS:
            raise LayerError(
                f"vLLM shares {self.name} between ranks as only its {type(layer).__name__} does: serve it without "
                f"--tensor-parallel-size, or {_ONLINE}"
            )
        kinds: dict[WeightFormat, _Kind] = {}
        for part, _, n in self._each(layer):
            kind = kinds.setdefault(part.scheme.weights, _Kind(part.scheme.weights))
            self.rows.append((kind, kind.outputs))
            kind.outputs += n
        known: set[str] = set()
        k, count = layer.anybit_inputs, len(layer.anybit_outputs)
        for number, kind in enumerate(kinds.values()):
            with parameters.named(f"layer {self.name}, tensor-parallel rank {layer.tp_rank}"):
                mine = shard_format(kind.format, layer.anybit_start, k)
            groups = kind.format.groups(layer.anybit_whole_inputs) if self._ordered(layer, kind) else mine.groups(k)
            for name, data in parameters.tensors_of(kind.format, kind.outputs, k, groups, dtype).items():
                kind.names[name] = f"{name}_{number}" if name in known else name
                known.add(name)
                parameters.add(layer, kind.names[name], data, self._loader(layer, name))
        parameters.add(
            layer, "weight_shape", torch.zeros(count, 2, dtype=torch.int64), self._loader(layer, "weight_shape")
        )
        if self.group_index:
            order = torch.zeros(count, k, dtype=torch.int32)
            parameters.add(layer, "weight_g_idx", order, self._loader(layer, "weight_g_idx"))
        parameters.add(layer, "weight", torch.zeros(0, dtype=torch.uint8), parameters.nothing_of(self.name))

    def _ordered(self, layer: LinearBase, kind: _Kind) -> bool:
        """Whether every rank loads all groups, since its inputs may be of any."""
        return self.group_index and kind.format.group is not None and layer.anybit_split

    def _loader(self, layer: LinearBase, name: str) -> parameters.Loader:
        """A loader of a checkpoint's tensor, of one part of the layer, of several or (None) of all."""
        full, start, k = f"{self.name}.{name}", layer.anybit_start, layer.anybit_inputs

        def load(
            param: Tensor, loaded_weight: Tensor, loaded_shard_id: str | int | tuple[int, ...] | None = None
        ) -> None:
            shard, outputs = loaded_shard_id, layer.anybit_outputs
            shard = "qkv".index(shard) if isinstance(shard, str) else shard
            numbers = (shard,) if isinstance(shard, int) else range(len(outputs)) if shard is None else shard
            if name in ("weight_shape", "weight_g_idx"):  # of a whole part
                own = loaded_weight if name == "weight_shape" else loaded_weight[start : start + k]
                parameters.check_shape(full, loaded_weight, own, param.shape[1:])
                for number in numbers:
                    param.data[number].copy_(own)
                return
            kind = self.rows[numbers[0]][0]
            if name not in kind.names:
                raise CheckpointError(f"{full} is stored, and its scheme has none; {parameters.ANOTHER}")
            target = param if kind.names[name] == name else layer.get_parameter(kind.names[name])
            shares = [self._share(layer, number) for number in numbers]
            wholes = [outputs[number] * ranks for number, (_, ranks) in zip(numbers, shares, strict=True)]
            whole = not layer.anybit_split or (self._ordered(layer, kind) and name in _GROUPED)
            inputs = None if whole else (start, k)
            rows = parameters.rows_of(full, loaded_weight, kind.format, sum(wholes), inputs, target)
            for number, (rank, _), own in zip(numbers, shares, rows.split(wholes), strict=True):
                n, first = outputs[number], self.rows[number][1]
                target.data[first : first + n].copy_(own[rank * n : (rank + 1) * n])

        return load

    def _share(self, layer: LinearBase, number: int) -> tuple[int, int]:
        """(rank, ranks) that share a part's outputs: only column-parallel layers do, and some ranks have a KV head."""
        if not isinstance(layer, ColumnParallelLinear):
            return 0, 1
        copies = getattr(layer, "num_kv_head_replicas", 1) if number else 1
        return layer.tp_rank // copies, layer.tp_size // copies

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Codes as vLLM loaded them -> a backend's layout."""
        loaded = {name: each.data for name, each in layer.named_parameters(recurse=False) if name.startswith("weight")}
        if "weight_packed" not in loaded:
            return  # already prepared
        for _, stored in loaded["weight_shape"].tolist():
            parameters.check_inputs(f"layer {self.name}", stored, layer.anybit_whole_inputs)
        weights, k = list[Weighed](), layer.anybit_inputs
        for number, (part, _, n) in enumerate(self._each(layer)):
            kind, first = self.rows[number]
            found = {name: loaded[own][first : first + n] for name, own in kind.names.items()}
            mine = shard_format(kind.format, layer.anybit_start, k)
            if self.group_index:
                order = loaded["weight_g_idx"][number]
                if self._ordered(layer, kind):
                    names = [name for name in _GROUPED if name in found]
                    values, order, mine = shard_ordered(tuple(map(found.get, names)), order, kind.format)
                    found |= zip(names, values, strict=True)
                found["weight_g_idx"] = order
            weights.append((part, parameters.weight_of(part.name, found, (n, k), mine)))
        for name in loaded:
            delattr(layer, name)
        self._ready(layer, weights)


@register_weight_loader_v2_supported_method
class AnyBitOnlineLinearMethod(_Method):
    """Linear layers of an unquantized checkpoint, quantized by RTN while they are loaded, one after another."""

    uses_meta_device = True

    def _register(self, layer: LinearBase, dtype: torch.dtype, loader: parameters.Loader) -> None:
        """Register the float weight on the meta device; vLLM materializes it and has it processed once loaded."""
        data = torch.empty(sum(layer.anybit_outputs), layer.anybit_inputs, dtype=dtype, device="meta")
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Floats -> codes -> a backend's layout."""
        if "weight" not in dict(layer.named_parameters(recurse=False)):
            return  # already prepared
        whole = len({part.scheme for part in self.parts}) == 1
        each = [(self.parts[0], 0, sum(layer.anybit_outputs))] if whole else self._each(layer)
        weights: list[Weighed] = []
        for part, start, n in each:
            with parameters.named(f"layer {self.name}"):
                quantized = quantize_weight(layer.weight.data[start : start + n], part.scheme.weights)
            weights.append((Part(self.name if whole else part.name, part.scheme, False), quantized))
        del layer.weight
        self._ready(layer, weights)


def _with_zeros(weight: QuantizedWeight) -> QuantizedWeight:
    """A symmetric weight in the asymmetric format, with all zero points at the middle code."""
    fmt = replace(weight.format, code="asym")
    if weight.format == fmt:
        return weight
    zero = torch.full(weight.scale.shape, 1 << (fmt.bits - 1), dtype=torch.uint8, device=weight.device)
    return replace(weight, format=fmt, zero=zero)


def _stackable(one: Weighed, other: Weighed) -> bool:
    """Whether two parts have one format and the same inputs (order, rotation): one GEMM runs both."""
    (a, first), (b, second) = one, other
    if a.hadamard != b.hadamard or first.format != second.format:
        return False
    order, other_order = first.group_index, second.group_index
    return order is None if other_order is None else order is not None and torch.equal(order, other_order)
