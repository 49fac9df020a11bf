"""vLLM's linear layers on anybit: what a checkpoint holds, loaded by vLLM, prepared once, run by ``anybit.ops``."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    ReplicatedLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter

from anybit import ops
from anybit.checkpoints.verify import check_values
from anybit.errors import AnyBitError, CheckpointError, LayerError, OptionError
from anybit.integrations.vllm import fusion, rotary, warmup
from anybit.integrations.vllm.parameters import (
    ANOTHER,
    Cut,
    PerPart,
    Pieces,
    Rows,
    Zeros,
    empty,
    load_replicated,
    nothing_of,
    whole,
)
from anybit.integrations.vllm.product import ANOTHER_LAYOUT, Product
from anybit.integrations.vllm.streams import DUMMY
from anybit.packing import QuantizedWeight, reorder, stack, words_per_row
from anybit.quantization.methods.rtn import quantize_weight
from anybit.scheme import Scheme, WeightFormat
from anybit.sharding import shard_format, shard_groups, shard_ordered, shard_words

_ROWS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_minimum", "weight_indices")


@dataclass(frozen=True)
class Part:
    """What a checkpoint says of one of the layers that vLLM fuses. name: as the checkpoint has it."""

    name: str
    scheme: Scheme
    hadamard: bool


class _Method(LinearMethodBase):  # type: ignore[misc]
    """What both methods share: a layer that is ready, and its forward. parts: with the same activations."""

    def __init__(self, parts: list[Part], ledger: warmup.Ledger) -> None:
        self.parts, self.ledger = parts, ledger
        self.scheme = parts[0].scheme  # of activations
        ledger.expect()

    @property
    def name(self) -> str:
        """The layers that are run, for errors."""
        return " + ".join(part.name for part in self.parts)

    def _shape(self, layer: Any, inputs: int, outputs: list[int], whole_inputs: int) -> None:
        """Keep what the forward and the loaders need of the layer's place among the ranks."""
        layer.anybit_inputs, layer.anybit_outputs, layer.anybit_split = inputs, outputs, inputs != whole_inputs
        layer.anybit_start = layer.tp_rank * inputs if layer.anybit_split else 0
        if len(self.parts) not in (1, len(outputs)):
            raise LayerError(
                f"vLLM fuses {len(outputs)} layers into one, and the checkpoint has {len(self.parts)} of them, "
                f"{self.name}: quantize the original model while it is loaded, by --quantization anybit and a scheme"
            )

    def _each(self, layer: Any) -> list[tuple[Part, int, int]]:
        """Of every layer that vLLM fuses its part of the checkpoint, its first output, and how many it has."""
        outputs = layer.anybit_outputs
        parts = self.parts if len(self.parts) == len(outputs) else self.parts * len(outputs)
        starts = [sum(outputs[:index]) for index in range(len(outputs))]
        return list(zip(parts, starts, outputs, strict=True))

    def _ready(self, layer: Any, weights: list[tuple[Part, QuantizedWeight, Tensor | None]]) -> None:
        """Prepare the weights of a layer's parts; those whose inputs are the same become one product."""
        if {weight.format.code for _, weight, _ in weights} == {"sym", "asym"}:  # GPTQ's, where all zeros are alike
            weights = [(part, _with_zeros(weight), scale) for part, weight, scale in weights]
        runs: list[list[tuple[Part, QuantizedWeight, Tensor | None]]] = []
        for weight in weights:
            if runs and _stackable(runs[-1][-1], weight):
                runs[-1].append(weight)
            else:
                runs.append([weight])
        if hasattr(layer, "anybit_products"):
            self._reload(layer, runs)
            return
        plain = len(runs) == 1 and not self.ledger.adapters  # adapters add to outputs in their own order
        attention = fusion.parent_of(layer, "qkv_proj")
        heads = rotary.heads_of(attention, layer.params_dtype, self.scheme, plain)
        _, first, scale = weights[0]
        paired = fusion.pairs_of(layer, self.scheme, first, scale is not None) if plain else None
        order = paired if heads is None else heads.order
        layer.anybit_order = None if order is None else order.cpu()  # where a sleep does not forget it
        if order is not None and layer.bias is not None:
            layer.bias.data = layer.bias.data[order.to(layer.bias.device)]
        products = []
        for number, run in enumerate(runs):
            part, _, input_scale = run[0]
            prepared = self._prepare(run, order)
            if part.hadamard:
                width = layer.anybit_inputs * (layer.tp_size if layer.anybit_split else 1)
                signs = ops.prepare_rotation(width, run[0][1].words.device)
                # A sleep of level 2 forgets what was made while loading, and gives back buffers alone.
                layer.register_buffer(f"anybit_{number}_signs", signs, persistent=False)
            products.append(Product.of(layer, f"anybit_{number}", prepared, input_scale, part.hadamard))
        layer.anybit_products = tuple(products)
        # vLLM's LoRA looks for the layer's device here.
        layer.register_buffer("weight_packed", getattr(layer, products[0].tensors[0]), persistent=False)
        fusion.activate(layer, self.scheme, paired is not None)
        if heads is not None:
            rotary.replace_forward(attention, heads)
        self.ledger.add(layer, products, heads, paired is not None)

    def _prepare(self, run: list[tuple[Part, QuantizedWeight, Tensor | None]], order: Tensor | None) -> ops.Prepared:
        """The weight of parts whose inputs are the same, its outputs in an order."""
        joined = run[0][1] if len(run) == 1 else stack([weight for _, weight, _ in run])
        joined = joined if order is None else reorder(joined, order)
        try:
            return ops.prepare(joined, self.scheme.activations, fused=joined.words.is_cuda)
        except AnyBitError as error:
            raise type(error)(f"layer {self.name}: {error}") from None

    def _reload(self, layer: Any, runs: list[list[tuple[Part, QuantizedWeight, Tensor | None]]]) -> None:
        """Put other weights in the place of those that are there: vLLM's reload_weights, an update by a trainer."""
        products, order = layer.anybit_products, layer.anybit_order
        if len(runs) != len(products):
            raise LayerError(f"layer {self.name}: {ANOTHER_LAYOUT}")
        for product, run in zip(products, runs, strict=True):
            try:
                product.refill(layer, self._prepare(run, order), run[0][2])
            except LayerError as error:
                raise LayerError(f"layer {self.name}: {error}") from None
        loaded = {name for name, _ in get_layerwise_info(layer).loaded_weights}
        if order is not None and "bias" in loaded:
            layer.bias.data.copy_(layer.bias.data[order.to(layer.bias.device)])

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Y = x W^T + bias: x [..., K] -> y [..., N] of this rank, in x's dtype."""
        products = layer.anybit_products
        if len(products) == 1:
            return self._multiply(layer, products[0], x, bias)
        biases = [None] * len(products) if bias is None else bias.split([product.outputs for product in products])
        parts = [self._multiply(layer, product, x, part) for product, part in zip(products, biases, strict=True)]
        return torch.cat(parts, dim=-1)

    def _multiply(self, layer: Any, product: Product, x: Tensor, bias: Tensor | None) -> Tensor:
        x = product.inputs(layer, x)
        if product.hadamard and layer.anybit_split:  # a rotation mixes all inputs: those of the other ranks, too
            every = ops.hadamard(tensor_model_parallel_all_gather(x.contiguous()))
            x = every[..., layer.anybit_start : layer.anybit_start + layer.anybit_inputs].contiguous()
        elif product.hadamard:
            return ops.hadamard_linear(x, product.weight(layer), bias, product.spec)
        return product.multiply(layer, x, bias)


@register_weight_loader_v2_supported_method
class AnyBitLinearMethod(_Method):
    """Layers of a checkpoint that holds codes."""

    def __init__(self, parts: list[Part], ledger: warmup.Ledger, group_index: bool, input_scale: bool) -> None:
        super().__init__(parts, ledger)
        self.group_index, self.input_scale = group_index, input_scale

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Room for this rank's part of the tensors that ``QuantLinear`` documents."""
        k, outputs = input_size_per_partition, list(output_partition_sizes)
        self._shape(layer, k, outputs, input_size)
        start, count = layer.anybit_start, len(outputs)
        loader = load_replicated if isinstance(layer, ReplicatedLinear) else extra["weight_loader"]
        pieces: dict[str, dict[int, Rows | Zeros]] = {}
        formats = self._formats(layer)
        for first, n, fmt in formats:
            for name, piece in self._rows(layer, fmt, n, input_size, params_dtype, loader).items():
                pieces.setdefault(name, {})[first] = piece
        for name, found in pieces.items():
            one = (
                found[0]
                if len(formats) == 1
                else Pieces(empty(0, dtype=torch.uint8), weight_loader=loader, pieces=found)
            )
            layer.register_parameter(name, one)

        def of_channels(values: Tensor) -> Tensor:
            return values[start : start + k]

        own: list[tuple[str, Tensor, Cut]] = [("weight_shape", empty(count, 2, dtype=torch.int64), whole)]
        if self.group_index:
            own.append(("weight_g_idx", empty(count, k, dtype=torch.int32), of_channels))
        if self.input_scale:
            own.append(("input_scale", empty(count, k, dtype=params_dtype), of_channels))
        for name, data, cut in own:
            layer.register_parameter(name, PerPart(data, weight_loader=loader, name=f"{self.name}.{name}", cut=cut))
        if isinstance(layer, ReplicatedLinear):
            for parameter in layer.parameters():  # of which no other layer is a part
                parameter.tp_rank, parameter.tp_size = 0, 1
        # Folders that only anybit reads hold an empty weight a layer, at which others' loaders fail.
        nothing = torch.nn.Parameter(empty(0, dtype=torch.uint8), requires_grad=False)
        nothing.weight_loader = nothing_of(self.name)  # type: ignore[attr-defined]
        layer.register_parameter("weight", nothing)
        layer.anybit_whole_inputs = input_size

    def _formats(self, layer: Any) -> list[tuple[int, int, WeightFormat]]:
        """The first output and the count of those that have a format: of all at once, unless formats differ."""
        each = [(start, n, part.scheme.weights) for part, start, n in self._each(layer)]
        formats = {fmt for _, _, fmt in each}
        return each if len(formats) > 1 else [(0, sum(layer.anybit_outputs), formats.pop())]

    def _rows(
        self, layer: Any, fmt: WeightFormat, n: int, inputs: int, dtype: torch.dtype, loader: Any
    ) -> "dict[str, Rows | Zeros]":
        """Room for n outputs in a format, for the inputs of this rank among all ``inputs``."""
        k, start, split, kept = layer.anybit_inputs, layer.anybit_start, layer.anybit_split, 2 if fmt.sparse else 1
        try:
            mine = shard_format(fmt, start, k)
        except LayerError as error:
            raise LayerError(f"layer {self.name}, tensor-parallel rank {layer.tp_rank}: {error}") from None
        ordered = self.group_index and fmt.group is not None and split

        def of_inputs(bits: int) -> Cut:
            return lambda words: shard_words(words, bits, start // kept, k // kept) if split else words

        def of_groups(values: Tensor) -> Tensor:
            return values if ordered or not split else shard_groups(values, fmt, start, k)

        groups = fmt.groups(inputs) if ordered else mine.groups(k)
        rows: list[tuple[str, Tensor, Cut]] = [
            ("weight_packed", empty(n, words_per_row(k // kept, fmt.bits), dtype=torch.int32), of_inputs(fmt.bits)),
            ("weight_scale", empty(n, groups, dtype=dtype), of_groups),
        ]
        if fmt.code == "min":
            rows.append(("weight_minimum", empty(n, groups, dtype=dtype), of_groups))
        if fmt.sparse:
            rows.append(("weight_indices", empty(n, words_per_row(k // kept, 2), dtype=torch.int32), of_inputs(2)))
        found: dict[str, Rows | Zeros] = {
            name: Rows(data, weight_loader=loader, name=f"{self.name}.{name}", cut=cut) for name, data, cut in rows
        }
        if fmt.code == "asym":
            zeros, name = empty(n, groups, dtype=torch.uint8), "weight_zero_point"
            found[name] = Zeros(zeros, weight_loader=loader, name=f"{self.name}.{name}", cut=of_groups, bits=fmt.bits)
        return found

    def process_weights_after_loading(self, layer: Any) -> None:
        """Codes as vLLM loaded them -> the layout of a backend."""
        if "weight_packed" not in dict(layer.named_parameters(recurse=False)):
            return  # they are ready
        loaded = dict(layer.named_parameters(recurse=False))
        self._check_loaded(layer, loaded["weight_shape"].data)
        if self.input_scale:
            check_values(self.name, {"input_scale": loaded["input_scale"].data})
        weights = []
        for index, (part, start, n) in enumerate(self._each(layer)):
            found = {name: loaded[name].part(start, n) for name in _ROWS if name in loaded}
            check_values(part.name, found)
            fmt = part.scheme.weights
            mine = shard_format(fmt, layer.anybit_start, layer.anybit_inputs)
            order = loaded["weight_g_idx"].data[index].contiguous() if self.group_index else None
            parts = [found.get(name) for name in ("weight_scale", "weight_zero_point", "weight_minimum")]
            scale, zero, minimum = (None if one is None else one.contiguous() for one in parts)
            if order is not None and fmt.group is not None and layer.anybit_split:
                (scale, zero, minimum), order, mine = shard_ordered((scale, zero, minimum), order, fmt)
            words, indices, shape = found["weight_packed"], found.get("weight_indices"), (n, layer.anybit_inputs)
            assert words is not None and scale is not None
            weight = QuantizedWeight(words, scale, zero, shape, mine, order, indices, minimum)
            weights.append((part, weight, loaded["input_scale"].data[index] if self.input_scale else None))
        for name, parameter in loaded.items():
            if isinstance(parameter, Pieces):
                parameter.release()
            if name != "bias":
                delattr(layer, name)
        self._ready(layer, weights)

    def _check_loaded(self, layer: Any, shapes: Tensor) -> None:
        for n, k in shapes.tolist():
            if (n, k) == (0, 0):
                config = get_current_vllm_config_or_none()
                if config is not None and str(config.load_config.load_format) == DUMMY:
                    raise OptionError(
                        f"--load-format {DUMMY} makes numbers up, which codes are not: leave it out, or serve the "
                        "model that is not quantized with a scheme (`anybit serve MODEL --scheme w4a16g128`)"
                    )
                raise CheckpointError(f"layer {self.name}: the checkpoint has no tensors for a part of it; {ANOTHER}")
            if k != layer.anybit_whole_inputs:
                raise CheckpointError(
                    f"layer {self.name} has {k} inputs in the checkpoint, and {layer.anybit_whole_inputs} in the "
                    f"model; {ANOTHER}"
                )


@register_weight_loader_v2_supported_method
class AnyBitOnlineLinearMethod(_Method):
    """Layers of a checkpoint of floats, rounded to nearest while they are loaded, one after another."""

    uses_meta_device = True

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """A float weight on the meta device; vLLM makes it real, and has it processed, once all of it was read."""
        self._shape(layer, input_size_per_partition, list(output_partition_sizes), input_size)
        shape = sum(output_partition_sizes), input_size_per_partition
        weight = ModelWeightParameter(
            data=torch.empty(shape, dtype=params_dtype, device="meta"),
            input_dim=1,
            output_dim=0,
            weight_loader=extra["weight_loader"],
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Floats -> codes -> the layout of a backend."""
        if "weight" not in dict(layer.named_parameters(recurse=False)):
            return  # they are ready
        whole = len({part.scheme for part in self.parts}) == 1
        each = [(self.parts[0], 0, sum(layer.anybit_outputs))] if whole else self._each(layer)
        weights: list[tuple[Part, QuantizedWeight, Tensor | None]] = []
        for part, start, n in each:
            try:
                quantized = quantize_weight(layer.weight.data[start : start + n], part.scheme.weights)
            except LayerError as error:
                raise LayerError(f"layer {self.name}: {error}") from None
            weights.append((Part(self.name if whole else part.name, part.scheme, False), quantized, None))
        del layer.weight
        self._ready(layer, weights)


def _with_zeros(weight: QuantizedWeight) -> QuantizedWeight:
    """The same layer as an asymmetric one: its zeros are all in the middle."""
    fmt = replace(weight.format, code="asym")
    if weight.format == fmt:
        return weight
    zero = torch.full(weight.scale.shape, 1 << (fmt.bits - 1), dtype=torch.uint8, device=weight.device)
    return replace(weight, format=fmt, zero=zero)


def _stackable(
    one: tuple[Part, QuantizedWeight, Tensor | None], other: tuple[Part, QuantizedWeight, Tensor | None]
) -> bool:
    """Whether two parts take the same inputs, so that one product gives both."""
    (a, first, scale), (b, second, scale_too) = one, other
    if a.hadamard != b.hadamard or first.format != second.format or scale is not None or scale_too is not None:
        return False
    order, other_order = first.group_index, second.group_index
    return order is None if other_order is None else order is not None and torch.equal(order, other_order)
