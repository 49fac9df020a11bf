"""vLLM's linear layers on anybit: loaded by vLLM, prepared once for a backend, run by ``anybit.ops``."""

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
from anybit.codes.packing import QuantizedWeight, reorder, stack, words_per_row
from anybit.codes.rtn import quantize_weight
from anybit.codes.sharding import shard_format, shard_groups, shard_ordered, shard_words
from anybit.errors import AnyBitError, CheckpointError, LayerError, OptionError
from anybit.scheme import Scheme, WeightFormat
from anybit.vllm import fusion, rotary, warmup
from anybit.vllm.parameters import (
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
from anybit.vllm.product import ANOTHER_LAYOUT, Product
from anybit.vllm.streams import DUMMY

_ROWS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_minimum", "weight_indices")


@dataclass(frozen=True)
class Part:
    """One of the checkpoint's layers that vLLM fuses into one. name: as stored.  hadamard: inputs are rotated."""

    name: str
    scheme: Scheme
    hadamard: bool


class _Method(LinearMethodBase):  # type: ignore[misc]
    """Shared by both methods: preparing a loaded layer, and its forward. parts: all with one activation format."""

    def __init__(self, parts: list[Part], ledger: warmup.Ledger) -> None:
        self.parts, self.ledger = parts, ledger
        self.scheme = parts[0].scheme  # for its activation format only: weight formats of parts may differ
        ledger.expect()

    @property
    def name(self) -> str:
        """The names of the parts, for errors."""
        return " + ".join(part.name for part in self.parts)

    def _shape(self, layer: Any, inputs: int, outputs: list[int], whole_inputs: int) -> None:
        """Record the layer's shard sizes and offset for the forward and the loaders."""
        layer.anybit_inputs, layer.anybit_outputs, layer.anybit_split = inputs, outputs, inputs != whole_inputs
        layer.anybit_start = layer.tp_rank * inputs if layer.anybit_split else 0
        if len(self.parts) not in (1, len(outputs)):
            raise LayerError(
                f"vLLM fuses {len(outputs)} layers into one, and the checkpoint has {len(self.parts)} of them, "
                f"{self.name}: serve the original model with --quantization anybit and a scheme instead"
            )

    def _each(self, layer: Any) -> list[tuple[Part, int, int]]:
        """(part, first output, number of outputs) of every layer that vLLM fuses."""
        outputs = layer.anybit_outputs
        parts = self.parts if len(self.parts) == len(outputs) else self.parts * len(outputs)
        starts = [sum(outputs[:index]) for index in range(len(outputs))]
        return list(zip(parts, starts, outputs, strict=True))

    def _ready(self, layer: Any, weights: list[tuple[Part, QuantizedWeight]]) -> None:
        """Prepare the weights of a layer's parts; adjacent parts that share their inputs become one GEMM."""
        if {weight.format.code for _, weight in weights} == {"sym", "asym"}:  # GPTQ with constant zeros is sym
            weights = [(part, _with_zeros(weight)) for part, weight in weights]
        runs: list[list[tuple[Part, QuantizedWeight]]] = []
        for weight in weights:
            if runs and _stackable(runs[-1][-1], weight):
                runs[-1].append(weight)
            else:
                runs.append([weight])
        if hasattr(layer, "anybit_products"):
            self._reload(layer, runs)
            return
        plain = len(runs) == 1 and not self.ledger.adapters  # LoRA adds to outputs in the model's order
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
        fusion.activate(layer, self.scheme, paired is not None)
        if heads is not None:
            rotary.replace_forward(attention, heads)
        self.ledger.add(layer, products, heads, paired is not None)

    def _prepare(self, run: list[tuple[Part, QuantizedWeight]], order: Tensor | None) -> ops.Prepared:
        """Stack the weights of parts that share their inputs, reorder the outputs, and prepare them for a backend."""
        joined = run[0][1] if len(run) == 1 else stack([weight for _, weight in run])
        joined = joined if order is None else reorder(joined, order)
        try:
            return ops.prepare(joined, self.scheme.activations, fused=joined.words.is_cuda)
        except AnyBitError as error:
            raise type(error)(f"layer {self.name}: {error}") from None

    def _reload(self, layer: Any, runs: list[list[tuple[Part, QuantizedWeight]]]) -> None:
        """Replace the weights in place: vLLM's reload_weights, or a trainer's weight update."""
        products, order = layer.anybit_products, layer.anybit_order
        if len(runs) != len(products):
            raise LayerError(f"layer {self.name}: {ANOTHER_LAYOUT}")
        for product, run in zip(products, runs, strict=True):
            try:
                product.refill(layer, self._prepare(run, order))
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
        if product.hadamard and layer.anybit_split:  # a rotation mixes all inputs, so gather them from all ranks
            every = ops.hadamard(tensor_model_parallel_all_gather(x.contiguous()))
            x = every[..., layer.anybit_start : layer.anybit_start + layer.anybit_inputs].contiguous()
        elif product.hadamard:
            return ops.hadamard_linear(x, product.weight(layer), bias, product.spec)
        return product.multiply(layer, x, bias)


@register_weight_loader_v2_supported_method
class AnyBitLinearMethod(_Method):
    """Linear layers of a quantized checkpoint."""

    def __init__(self, parts: list[Part], ledger: warmup.Ledger, group_index: bool) -> None:
        super().__init__(parts, ledger)
        self.group_index = group_index

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
        """Create parameters for this rank's shard of the tensors that ``QuantLinear`` documents."""
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
        for name, data, cut in own:
            layer.register_parameter(name, PerPart(data, weight_loader=loader, name=f"{self.name}.{name}", cut=cut))
        if isinstance(layer, ReplicatedLinear):
            for parameter in layer.parameters():  # every rank loads the whole tensor
                parameter.tp_rank, parameter.tp_size = 0, 1
        # Folders that only anybit reads have an empty weight per layer, which makes other programs' loaders fail.
        nothing = torch.nn.Parameter(empty(0, dtype=torch.uint8), requires_grad=False)
        nothing.weight_loader = nothing_of(self.name)  # type: ignore[attr-defined]
        layer.register_parameter("weight", nothing)
        layer.anybit_whole_inputs = input_size

    def _formats(self, layer: Any) -> list[tuple[int, int, WeightFormat]]:
        """(first output, number of outputs, format) of each part; a single entry for all if they share a format."""
        each = [(start, n, part.scheme.weights) for part, start, n in self._each(layer)]
        formats = {fmt for _, _, fmt in each}
        return each if len(formats) > 1 else [(0, sum(layer.anybit_outputs), formats.pop())]

    def _rows(
        self, layer: Any, fmt: WeightFormat, n: int, inputs: int, dtype: torch.dtype, loader: Any
    ) -> "dict[str, Rows | Zeros]":
        """Parameters for n outputs in a format. inputs: of the whole layer; each rank keeps its shard of them."""
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
        """Codes as vLLM loaded them -> a backend's layout."""
        if "weight_packed" not in dict(layer.named_parameters(recurse=False)):
            return  # already prepared
        loaded = dict(layer.named_parameters(recurse=False))
        self._check_loaded(layer, loaded["weight_shape"].data)
        weights = []
        for index, (part, start, n) in enumerate(self._each(layer)):
            found = {name: loaded[name].part(start, n) for name in _ROWS if name in loaded}
            check_values(part.name, {**found, "weight_shape": torch.tensor([n, layer.anybit_inputs])})
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
            weights.append((part, weight))
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
                        f"--load-format {DUMMY} fills weights at random, which cannot make valid codes: leave it out, "
                        "or serve the unquantized model with a scheme (`anybit serve MODEL --scheme w4a16g128`)"
                    )
                raise CheckpointError(f"layer {self.name}: the checkpoint lacks the tensors of a part of it; {ANOTHER}")
            if k != layer.anybit_whole_inputs:
                raise CheckpointError(
                    f"layer {self.name} has {k} inputs in the checkpoint, and {layer.anybit_whole_inputs} in the "
                    f"model; {ANOTHER}"
                )


@register_weight_loader_v2_supported_method
class AnyBitOnlineLinearMethod(_Method):
    """Linear layers of an unquantized checkpoint, quantized by RTN while they are loaded, one after another."""

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
        """Create the float weight on the meta device; vLLM materializes it and has it processed once fully loaded."""
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
        """Floats -> codes -> a backend's layout."""
        if "weight" not in dict(layer.named_parameters(recurse=False)):
            return  # already prepared
        whole = len({part.scheme for part in self.parts}) == 1
        each = [(self.parts[0], 0, sum(layer.anybit_outputs))] if whole else self._each(layer)
        weights: list[tuple[Part, QuantizedWeight]] = []
        for part, start, n in each:
            try:
                quantized = quantize_weight(layer.weight.data[start : start + n], part.scheme.weights)
            except LayerError as error:
                raise LayerError(f"layer {self.name}: {error}") from None
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


def _stackable(one: tuple[Part, QuantizedWeight], other: tuple[Part, QuantizedWeight]) -> bool:
    """Whether two parts have one format and the same inputs (order, rotation): one GEMM runs both."""
    (a, first), (b, second) = one, other
    if a.hadamard != b.hadamard or first.format != second.format:
        return False
    order, other_order = first.group_index, second.group_index
    return order is None if other_order is None else order is not None and torch.equal(order, other_order)
