"""QuantLinear: a linear layer whose weight is a QuantizedWeight."""

import threading
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from anybit import ops
from anybit.codes.hadamard import inverse
from anybit.codes.packing import (
    READ_ONLY,
    DequantizedWeight,
    QuantizedWeight,
    check_fours,
    layer_shapes,
    pack_words,
    unpack_words,
)
from anybit.errors import LayerError, dtype_name
from anybit.ops.backend import RopeStoreArgs
from anybit.ops.elementwise import rotate_store
from anybit.scheme import Scheme, WeightFormat, is_whole

_Kind = TypeVar("_Kind", nn.Parameter, nn.Parameter | None)

PARTS = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_indices",
    "weight_minimum",
)  # fmt: skip
"""The tensors that a layer may store of its weight."""
PREPARING = threading.RLock()
"""Held while a layer's weight is converted: in between, neither layout is complete."""


class _Saved(Generic[_Kind]):
    """A tensor of the saved layout: a parameter, or of a prepared layer, which holds none, a copy to read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type) -> _Kind:
        own, prepared = layer._parameters.get(self.name), layer.__dict__.get("_prepared")
        if own is None and prepared is not None:
            own = layer.tensors_of(prepared.restore()).get(self.name)
            own = None if own is None else DequantizedWeight.of(own.clone())
        found: _Kind = own
        return found


class QuantLinear(nn.Module):
    """y = x W^T + bias with W in ``scheme``: x float [..., in_features] -> y [..., out_features] in x's dtype.

    Tensors are saved in compressed-tensors' pack-quantized format:
    weight_packed: int32 [N, ceil(K*bits/32)].  weight_scale: float [N, G].
    weight_zero_point: int32 [ceil(N*bits/32), G], asym only, packed along N.  weight_shape: int64 [2] (N, K).
    Extensions of that format: weight_g_idx int32 [K] (activation order), weight_indices int32 (2:4 sparse),
    weight_minimum float [N, G] (min).

    hadamard: x goes through ``ops.hadamard`` first; the weight holds the inverse (``quantization.methods.rotate``).

    The first call, or ``prepare``, converts the weight to a backend's layout, which replaces the saved layout in
    memory; ``state_dict`` converts it back. Of a prepared layer, ``parameters()`` are only weight_shape and bias,
    and the other tensors are copies to read; assigning one is a new weight for the next call.

    Gradients flow to x, so that earlier layers can be trained, and to a bias with requires_grad; the weight gets none.
    torch.func's grad, jvp, jacrev and jacfwd work too.
    """

    # Tensor parallelism in transformers shards the module's own parameters.
    _hf_quantized_needs_local_tp = True

    weight_packed = _Saved[nn.Parameter]()
    weight_scale = _Saved[nn.Parameter]()
    weight_zero_point = _Saved[nn.Parameter | None]()
    weight_shape: nn.Parameter
    weight_g_idx = _Saved[nn.Parameter | None]()
    weight_indices = _Saved[nn.Parameter | None]()
    weight_minimum = _Saved[nn.Parameter | None]()
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: Scheme | str,
        bias: bool = True,
        *,
        group_index: bool = False,
        hadamard: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.scheme = Scheme.parse(scheme)
        if not all(is_whole(count) and count >= 1 for count in (in_features, out_features)):
            raise LayerError(
                f"in_features and out_features must be whole numbers of at least 1, not {in_features!r} and "
                f"{out_features!r}"
            )
        self.in_features, self.out_features = in_features, out_features
        self.backend, self.hadamard, self._fused = backend, hadamard, False
        fmt = self.scheme.weights
        if fmt.sparse:
            check_fours(in_features)
        floats = dict.fromkeys(("weight_scale", "weight_minimum", "bias"), dtype or torch.get_default_dtype())
        kinds = {"weight_shape": torch.int64, **floats}
        shapes = layer_shapes(out_features, in_features, fmt, group_index)
        shapes |= {"bias": (out_features,)} if bias else {}
        self._parameters.update(dict.fromkeys((*PARTS, "bias")))
        for name, shape in shapes.items():
            self._parameters[name] = _frozen(torch.zeros(shape, dtype=kinds.get(name, torch.int32), device=device))
        self._prepared: ops.Prepared | None = None

    @classmethod
    def from_weight(
        cls, weight: QuantizedWeight, scheme: Scheme | str, bias: Tensor | None = None, backend: str | None = None
    ) -> "QuantLinear":
        """A layer that holds a quantized weight, on the weight's device. bias: float [N].

        Raises LayerError for a weight that is not a QuantizedWeight, a bias of the wrong shape or dtype, and a scheme
        whose weight format is not the weight's.
        """
        if not isinstance(weight, QuantizedWeight):
            raise LayerError(
                f"weight must be a QuantizedWeight, not {type(weight).__name__}: quantize_weight(tensor, "
                "Scheme.parse(scheme).weights) makes one"
            )
        n, k = weight.shape
        layer = cls(k, n, scheme, False, group_index=weight.group_index is not None, device="meta", backend=backend)
        layer.load_weight(weight)
        if bias is not None:
            if not isinstance(bias, Tensor):
                raise LayerError(f"the bias must be a torch.Tensor of {n} floats, not {type(bias).__name__}")
            if bias.shape != (n,):
                raise LayerError(f"the bias has shape {tuple(bias.shape)}, and the layer has {n} outputs")
            if not bias.is_floating_point():
                raise LayerError(f"the bias is {dtype_name(bias.dtype)}, and must be floating-point")
            layer.bias = _frozen(bias)
        return layer

    @staticmethod
    def tensors_of(weight: QuantizedWeight) -> dict[str, Tensor]:
        """The tensors that a checkpoint stores for a weight, keyed by name."""
        n, k = weight.shape
        tensors = {
            "weight_packed": weight.words,
            "weight_scale": weight.scale,
            "weight_shape": torch.tensor([n, k], dtype=torch.int64, device=weight.device),
        }
        if weight.zero is not None:
            tensors["weight_zero_point"] = pack_words(weight.zero.t(), weight.format.bits).t().contiguous()
        if weight.group_index is not None:
            tensors["weight_g_idx"] = weight.group_index
        if weight.indices is not None:
            tensors["weight_indices"] = weight.indices
        if weight.minimum is not None:
            tensors["weight_minimum"] = weight.minimum
        return tensors

    @staticmethod
    def weight_of(tensors: Mapping[str, Tensor], shape: tuple[int, int], format: WeightFormat) -> QuantizedWeight:
        """The weight that a checkpoint's tensors hold: the inverse of ``tensors_of``."""
        zero, index, indices, minimum = (
            tensors.get(f"weight_{part}") for part in ("zero_point", "g_idx", "indices", "minimum")
        )
        if zero is not None:
            zero = unpack_words(zero.t().contiguous(), format.bits, shape[0]).t().contiguous()
        words, scale = tensors["weight_packed"], tensors["weight_scale"]
        return QuantizedWeight(words, scale, zero, shape, format, index, indices, minimum)

    def load_weight(self, weight: QuantizedWeight) -> None:
        """Replace the layer's weight. Raises LayerError for another shape or format."""
        expected = (self.out_features, self.in_features)
        if weight.shape != expected or weight.format != self.scheme.weights:
            raise LayerError(
                f"the weight is {weight.shape} in {weight.format}; the layer takes {expected} in {self.scheme.weights}"
            )
        if self._prepared is not None:
            self._prepared.leave()
        self._prepared = None
        if weight.group_index is None:
            self._parameters["weight_g_idx"] = None
        for name, tensor in self.tensors_of(weight).items():
            setattr(self, name, _frozen(tensor))

    def quantized_weight(self) -> QuantizedWeight:
        """The layer's weight as codes, scales and zeros. Raises LayerError if it is on the meta device."""
        if self._prepared is not None:
            return self._prepared.restore()
        if self.weight_packed.is_meta:
            raise LayerError("the layer is on the meta device: its weight has not been loaded yet")
        tensors = {name: tensor.data for name, tensor in self._parameters.items() if tensor is not None}
        return self.weight_of(tensors, (self.out_features, self.in_features), self.scheme.weights)

    def prepare(self) -> "QuantLinear":
        """Convert the weight to the layout of the backend that will run it, and free the saved layout.

        On a GPU it synchronizes the stream, so that the layer can be called on any other. Raises LayerError while a
        CUDA graph is being captured. torch.compile breaks the graph here: with fullgraph=True, call it beforehand.
        """
        if torch.compiler.is_dynamo_compiling():
            told = "this weight is not prepared: call prepare(), or the layer, before torch.compile(fullgraph=True)"
            torch._dynamo.graph_break(msg=told)
            torch.compiler.disable(self._prepare)()  # else Dynamo would compile the unpacking
        else:
            self._prepare()
        return self

    def _prepare(self) -> None:
        with PREPARING:  # threads may race to a layer's first call: one prepares it
            if self._prepared is not None:
                return
            weight = self.quantized_weight()
            if weight.words.is_cuda and torch.cuda.is_current_stream_capturing():
                raise LayerError("a layer in a CUDA graph has not been prepared: call its prepare() before capturing")
            prepared = ops.prepare(weight, self.scheme.activations, self.backend, self._fused)
            if self.hadamard:
                ops.prepare_rotation(self.in_features, weight.words.device)
            wait_for(weight.words)
            self.hand_over(prepared, weight)

    def hand_over(self, prepared: ops.Prepared, weight: QuantizedWeight) -> None:
        """Free the saved layout: ``prepared``, which is complete, has the layer's weight and restores it."""
        self._prepared, self._dtype, self._ordered = prepared, weight.scale.dtype, weight.group_index is not None
        for name in self.tensors_of(weight).keys() - {"weight_shape"}:
            self._parameters[name] = None

    @property
    def runs_on(self) -> str | None:
        """Name of the backend that the weight is prepared for; None before ``prepare``."""
        return None if self._prepared is None else self._prepared.spec.backend

    @property
    def ordered(self) -> bool:
        """Whether the weight has an activation order."""
        return self._ordered if self._prepared is not None else self._parameters["weight_g_idx"] is not None

    def stand_in_fused(self, fused: bool) -> None:
        """Mark the layer as part of a fused layer, which changes how its kernels share the SMs."""
        self._fused = fused
        if self._prepared is not None:
            self._prepared = self._prepared.in_fused(fused)

    def unprepare(self) -> "QuantLinear":
        """Convert the weight back to the saved layout, and free the backend's."""
        if self._prepared is not None:
            weight = self._prepared.restore()
            wait_for(weight.words)
            self.load_weight(weight)
        return self

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantized weights, [N, K]."""
        return self.quantized_weight().dequantize(dtype)

    def effective_weight(self) -> Tensor:
        """W of y = x W^T + bias with the rotation folded in, float32 [N, K]."""
        weight = self.quantized_weight().dequantize(torch.float32)
        return inverse(weight) if self.hadamard else weight

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, [N, K], recomputed at every access: for code that inspects layers, not for speed.

        Writing to it, or assigning another, raises LayerError: the codes would not change.
        """
        if self._prepared is None and self.weight_packed.is_meta:
            return torch.empty(self.out_features, self.in_features, dtype=self.weight_scale.dtype, device="meta")
        return DequantizedWeight.of(self.dequantize(self._dtype if self._prepared else self.weight_scale.dtype))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise LayerError(READ_ONLY)
        prepared: ops.Prepared | None = self.__dict__.get("_prepared")
        if prepared is not None and name in PARTS and name != "weight_shape":
            self.unprepare()  # the next call prepares the layer with the new tensor
        elif prepared is not None and name in ("bias", "forward"):
            prepared.leave()
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Y = x W^T + bias: x float [..., in_features] -> [..., out_features] in x's dtype.

        On a GPU x must be float16 or bfloat16. The first call prepares the weight, and raises KernelError if no
        backend runs the layer on its device. A wrong dtype, width or device raises before anything is launched.
        """
        if not isinstance(x, Tensor):
            raise LayerError(f"x must be a torch.Tensor [..., {self.in_features}], not {type(x).__name__}")
        prepared = self._prepared
        if prepared is None:  # another thread may prepare it meanwhile: it stays so
            self.prepare()
        elif not prepared.alone:
            self.unprepare().prepare()
        assert self._prepared is not None
        bias = self.bias
        wanted = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
        if wanted or forward_ad._current_level >= 0:
            return _differentiable(x, bias, self)
        return self._multiply(x, bias)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self._prepared is not None
        if self.hadamard:
            return ops.hadamard_linear(x, self._prepared.tensors, bias, self._prepared.spec_text)
        return ops.linear(x, self._prepared, bias)

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float, silu: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return (self(RMSNorm(x + residual)), x + residual), fused where the backend's kernels allow.

        Quantized activations are normalized by the kernel that quantizes them; one or two 16-bit tokens by the GEMV.
        silu: return silu(gate) * up [..., out_features / 2]; rows of gate and up alternate in groups of eight.
        """
        ops.refuse_tangents(x)
        prepared = self._prepared or self.prepare()._prepared
        assert prepared is not None
        rest = prepared.tensors, self.bias, prepared.spec_text, silu, self.hadamard
        return ops.norm_linear(x, residual, gamma, epsilon, *rest)

    def norm_linear_rope(
        self, x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float, step: RopeStoreArgs
    ) -> tuple[Tensor, Tensor]:
        """``norm_linear`` of a fused QKV projection, then RoPE; ``step`` says where K and V go in the cache's residual.

        Outputs of the layer are Q, K and V with channels in ``kernels.elementwise.rope.paired_channels`` order.
        Returns (rotated queries [tokens, query_heads, head_dim], x + residual).
        """
        prepared = self._prepared
        if residual is None or self.hadamard or prepared is None:
            qkv, total = self.norm_linear(x, residual, gamma, epsilon)
            return rotate_store(qkv.view(-1, self.out_features), step, paired=True), total
        ops.refuse_tangents(x)
        return ops.norm_rotate_store(x, residual, gamma, epsilon, prepared.tensors, self.bias, prepared.spec_text, step)

    def silu_linear(self, gate_up: Tensor) -> Tensor:
        """Apply the layer to silu(gate) * up: [..., 2 in_features] -> [..., out_features]."""
        ops.refuse_tangents(gate_up)
        prepared = self._prepared or self.prepare()._prepared
        assert prepared is not None
        return ops.silu_linear(gate_up, prepared.tensors, self.bias, prepared.spec_text, self.hadamard)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        # Moves or casts the module: the saved layout moves, and the next call prepares it for the new device.
        self.unprepare()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, destination, prefix, keep_vars):  # type: ignore[no-untyped-def]
        if self._prepared is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        for name, tensor in self.tensors_of(self._prepared.restore()).items():
            destination[prefix + name] = tensor
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):  # type: ignore[no-untyped-def]
        shape = state_dict.get(f"{prefix}weight_shape")
        own = [self.out_features, self.in_features]
        # Layers of different widths can have equal shapes of words and scales: a row's last word and group are ragged.
        if isinstance(shape, Tensor) and not shape.is_meta and shape.flatten().tolist() != own:
            errors.append(f"{prefix}weight_shape says {shape.tolist()}, and the layer is {own} (outputs, inputs)")
            return
        self.unprepare()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        """What a printed model shows."""
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{text}, scheme={self.scheme}" + (", hadamard=True" if self.hadamard else "")


class _Differentiable(torch.autograd.Function):
    """A layer's product with gradients for input and bias; activation rounding is a straight-through estimator."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, layer: QuantLinear) -> Tensor:
        """Apply the layer to x [..., K]; bias is the layer's own, passed for its gradient."""
        return layer._multiply(x.detach(), None if bias is None else bias.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
        """Save the layer for backward and jvp."""
        ctx.layer = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradients of x and of the bias, in the dtype of y's gradient."""
        layer: QuantLinear = ctx.layer
        wide, (of_x, of_bias, _) = gradient.float(), ctx.needs_input_grad
        return (
            (wide @ layer.effective_weight()).to(gradient.dtype) if of_x else None,
            wide.reshape(-1, wide.shape[-1]).sum(0).to(gradient.dtype) if of_bias else None,
            None,
        )

    @staticmethod
    def vmap(
        info: Any, dims: tuple[int | None, ...], x: Tensor, bias: Tensor | None, layer: QuantLinear
    ) -> tuple[Tensor, int]:
        """Batch rule of torch.func.vmap: the batch of x becomes more rows of one product."""
        x = x.expand(info.batch_size, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
        if bias is None or dims[1] is None:
            return _differentiable(x, bias, layer), 0
        y = _differentiable(x, None, layer)
        return y + bias.movedim(dims[1], 0).view(info.batch_size, *[1] * (y.ndim - 2), -1).to(y.dtype), 0


class _ForwardMode(_Differentiable):
    """``_Differentiable`` with forward mode (jvp, jacfwd); separate, because torch.compile rejects jvp methods."""

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor, of_bias: Tensor | None, _: None) -> Tensor:
        """The tangent of y from the tangents of x and bias."""
        moved: Tensor = (of_x.float() @ ctx.layer.effective_weight().T).to(of_x.dtype)
        return moved if of_bias is None else moved + of_bias.to(moved.dtype)


def _differentiable(x: Tensor, bias: Tensor | None, layer: QuantLinear) -> Tensor:
    forwards = forward_ad._current_level >= 0
    if forwards and torch.compiler.is_compiling():  # compiled, y would be treated as a constant
        torch._dynamo.graph_break(msg="forward-mode derivatives of quantized layers are not compiled")
    function = _ForwardMode if forwards else _Differentiable
    y: Tensor = function.apply(x, bias, layer)  # type: ignore[no-untyped-call]
    return y


def use_backend(model: nn.Module, backend: str | None) -> nn.Module:
    """Run every QuantLinear of a model on the named backend; None lets each layer choose. Returns the model.

    On a CPU "reference-decoded" is fast and keeps float32 weights; "reference-packed" is slow and keeps them packed.
    Raises LayerError for anything but a model, KernelError for a backend that is unknown or cannot run a layer. After
    any error, running out of memory included, all layers keep their old backend.
    """
    if not isinstance(model, nn.Module):
        raise LayerError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    changed: list[tuple[QuantLinear, str | None]] = []
    try:
        for module in model.modules():
            if isinstance(module, QuantLinear):
                changed.append((module, module.backend))
                module.unprepare()
                module.backend = backend
                module.prepare()
    except Exception:
        for module, before in changed:
            module.unprepare()
            module.backend = before
        raise
    return model


def wait_for(tensor: Tensor) -> None:
    """Synchronize the current stream, which produced the tensor: other streams may read it next."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
