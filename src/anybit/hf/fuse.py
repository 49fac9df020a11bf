"""Kernel fusion for Llama-like models: QKV and gate/up become one GEMM each, each norm includes the residual add, and
RoPE and SiLU are one launch each, or the epilogue of the GEMM at one or two tokens.

    model = anybit.fuse(model)       # for inference; anybit.unfuse(model) undoes it, for saving
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from anybit import ops
from anybit.codes.packing import stack, unstack
from anybit.errors import LayerError
from anybit.hf import graph
from anybit.hf.bypass import bypass, hooked, refuse_gradients, refuse_records, restore
from anybit.hf.cache import AnyBitCache
from anybit.hf.cache_attention import NAME
from anybit.hf.cache_name import CACHE
from anybit.layers.experts import Experts
from anybit.layers.linear import QuantLinear
from anybit.models.families import BLOCKS, ROUTERS
from anybit.ops.elementwise import (
    NO_NORMS,
    Norms,
    add_rms_norm,
    paired_channels,
    paired_rows,
    rms_norm,
    rotate,
    rotate_store,
)
from anybit.ops.kv import Masks
from anybit.ops.router import norm_router

_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
_TABLE_BYTES = 128 << 20
_QKV = ("q_proj", "k_proj", "v_proj")
_GATED = ("gate_proj", "up_proj")


class Pass(NamedTuple):
    """What holds for all layers of a forward pass of so many tokens of each row; the first layer finds it out.

    cosine, sine: [rows * tokens, head_dim].  steps: it is a decode step over packed pages.  attend: transformers'
    attention; None if the cache's packed pages are attended to, which it does itself.
    """

    rows: int
    tokens: int
    cosine: Tensor
    sine: Tensor
    steps: bool
    attend: Callable[..., tuple[Tensor, object]] | None


class Hidden(NamedTuple):
    """Passed between fused layers: the last one's output and the residual, [rows * tokens, hidden], and the pass."""

    output: Tensor
    residual: Tensor
    now: Pass


class FusedLayer(nn.Module):
    """A decoder layer in about eight launches, five at one or two tokens, instead of more than twenty.

    Children that the decoder layer has, too, have the same names.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp = layer.self_attn, layer.mlp
        self.config = attention.config
        self.layer_idx = attention.layer_idx
        self.head_dim = attention.head_dim
        self.heads = self.config.num_attention_heads, self.config.num_key_value_heads
        window_of = self.config if BLOCKS[type(layer).__name__].window_in_config else attention
        self.masks = Masks(scale=attention.scaling, window=getattr(window_of, "sliding_window", None))
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        # Interleave the channels that RoPE rotates together, so that the GEMM of one or two tokens can apply RoPE and
        # store keys and values in its epilogue. Not for models with a QK norm (Qwen3), nor for quantized activations,
        # whose GEMMs have no such epilogue.
        self.normed = normed = getattr(attention, "q_norm", None) is not None
        coded = attention.q_proj.scheme.activations.quantized
        projections = [getattr(attention, name) for name in _QKV]
        plain = not (normed or coded or self.head_dim % 16) and _alike(projections)
        self.channels = paired_channels(*self.heads, self.head_dim) if plain else None
        self.qkv: Any = _joined(projections, self.channels)
        self.output: QuantLinear = attention.o_proj
        self.gate_up: Any = None
        products = [self.qkv, self.output]
        if _is_mixture(mlp):
            mlp.experts.prepare()
        else:
            products += self._join_mlp(mlp)
        for product in products:
            product.stand_in_fused(True)
        self.original = [bypass(layer)]  # in a list, so that nn.Module does not register its parameters a second time
        for parent, names in ((attention, _QKV), (mlp, _GATED)):
            for name in names if parent is attention or self.gate_up is not None else ():
                delattr(parent, name)
        bypass(self)

    def _join_mlp(self, mlp: Any) -> list[Any]:
        """Make gate and up one product; returns the MLP's products."""
        # Interleave outputs of gate and up, so that the GEMM's epilogue can apply SiLU. If no GEMM with quantized
        # activations has that epilogue, the kernel that quantizes them applies SiLU, and takes gate and up unmixed.
        size = mlp.gate_proj.out_features
        projections = [getattr(mlp, name) for name in _GATED]
        coded, one = mlp.down_proj.scheme.activations.quantized, projections[0]
        ends = not coded or ops.ends_with_silu(one.quantized_weight(), one.scheme.activations, one.backend)
        plain = size % 8 == 0 and ends and _alike(projections)
        self.pairs = paired_rows(size) if plain else None
        self.gate_up = _joined(projections, self.pairs)
        self.down: QuantLinear = mlp.down_proj
        return [self.gate_up, self.down]

    def forward(
        self,
        hidden_states: Tensor | Hidden,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Hidden:
        """One decoder layer. hidden_states: [rows, tokens, hidden] for the first, then what the one before returned."""
        cache = kwargs.pop(CACHE, None)  # kwargs then hold continuous batching's, for attention or ``update``
        if isinstance(hidden_states, Tensor):
            assert position_embeddings is not None
            now = self._begin(hidden_states, attention_mask, position_embeddings, cache)
            x, residual = hidden_states.flatten(0, 1), None
        else:
            x, residual, now = hidden_states
        norm, paired = self.input_layernorm, self.channels is not None
        step = cache.step(self.layer_idx, now.cosine, now.sine, self.heads, now.rows, x.dtype) if now.steps else None
        if step is not None and paired:
            q, residual = self.qkv.norm_linear_rope(x, residual, norm.weight, _epsilon(norm), step)
        else:
            qkv, residual = self.qkv.norm_linear(x, residual, norm.weight, _epsilon(norm))
            if step is not None:
                q = rotate_store(qkv, step, self._head_norms(), paired)
        shape = now.rows, now.tokens, -1, self.head_dim
        if step is not None:
            out = cache.attend_turned(self.layer_idx, q.view(shape), self.masks)
        else:
            q, k = rotate(qkv, now.cosine, now.sine, *self.heads, self._head_norms(), paired)
            q, k, v = q.view(shape), k.view(shape), qkv.view(shape)[:, :, -self.heads[1] :]
            if now.attend is None:
                out = cache.attend_new(self.layer_idx, q, k, v, attention_mask, self.masks)
            else:
                out = self._attend(now.attend, q, k, v, attention_mask, cache, kwargs)
        attended = self.output(out.reshape(len(x), -1))
        if self.gate_up is None:
            return self._mixed(attended, residual, now)
        norm, silu = self.post_attention_layernorm, self.pairs is not None
        gated, residual = self.gate_up.norm_linear(attended, residual, norm.weight, _epsilon(norm), silu)
        return Hidden(self.down(gated) if silu else self.down.silu_linear(gated), residual, now)

    def _begin(
        self, x: Tensor, mask: Tensor | None, position_embeddings: tuple[Tensor, Tensor], cache: Cache | None
    ) -> Pass:
        rows, tokens, _ = x.shape
        cosine, sine = (e.expand(rows, tokens, -1).reshape(-1, self.head_dim) for e in position_embeddings)
        name = self.config._attn_implementation
        pads = mask is None or mask.dim() == 2
        if pads and name == NAME and isinstance(cache, AnyBitCache) and cache.packed_attention:
            return Pass(rows, tokens, cosine, sine, mask is None and cache.takes_step(tokens), None)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        return Pass(rows, tokens, cosine, sine, False, attend)

    def _mixed(self, x: Tensor, residual: Tensor, now: Pass) -> Hidden:
        """The experts' output of x + residual, and that sum."""
        norm, gate, experts = self.post_attention_layernorm, self.mlp.gate, self.mlp.experts
        y, total, ids, shares = norm_router(
            x, residual, norm.weight, _epsilon(norm), gate.weight, gate.top_k, getattr(gate, "norm_topk_prob", True)
        )
        return Hidden(experts(y, ids, shares), total, now)

    def _head_norms(self) -> Norms:
        if not self.normed:
            return NO_NORMS
        norm = self.self_attn.q_norm
        return norm.weight, self.self_attn.k_norm.weight, _epsilon(norm)

    def _attend(
        self, attend: Callable[..., tuple[Tensor, object]], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
        cache: Cache | None, kwargs: dict[str, object],
    ) -> Tensor:  # fmt: skip
        """Attention as the model computes it: q, k, v [rows, tokens, heads, dim] -> q's shape."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        if self.masks.window is not None:
            kwargs["sliding_window"] = self.masks.window
        return attend(self.self_attn, q, k, v, mask, dropout=0.0, scaling=self.masks.scale, **kwargs)[0]


class FusedNorm(nn.Module):
    """The final norm, including the last layer's residual add."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden_states: Hidden) -> Tensor:
        """The norm of the last layer's sum: [rows, tokens, hidden]."""
        output, residual, now = hidden_states
        y = add_rms_norm(output, residual, self.norm.weight, _epsilon(self.norm))[0]
        return y.view(now.rows, now.tokens, -1)


class FusedRotary(nn.Module):
    """The rotary embedding; in CUDA graphs, two lookups in precomputed tables instead of nine small kernels.

    in_tables: whether all positions are known to be within the tables, which the owner of a static cache sets.
    """

    def __init__(self, rotary: nn.Module, positions: int) -> None:
        super().__init__()
        self.rotary = bypass(rotary)
        self.positions, self.in_tables = positions, False
        self.tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [batch, tokens, head_dim] of positions [batch, tokens], in x's dtype."""
        if not self.in_tables:
            plain: tuple[Tensor, Tensor] = self.rotary(x, position_ids)
            return plain
        key = x.device, x.dtype
        if key not in self.tables:
            with torch.inference_mode(False), torch.no_grad():
                every = torch.arange(self.positions, device=x.device)[None]
                cosine, sine = self.rotary(torch.empty(0, dtype=x.dtype, device=x.device), every)
            self.tables[key] = cosine[0].contiguous(), sine[0].contiguous()
        cosine, sine = self.tables[key]
        return cosine[position_ids], sine[position_ids]


def _rotary_of(body: PreTrainedModel) -> nn.Module | None:
    """A model's rotary embedding as FusedRotary, if it depends only on the position and its tables are small."""
    rotary = getattr(body, "rotary_emb", None)
    positions = getattr(body.config, "max_position_embeddings", 0)
    inverse = getattr(rotary, "inv_freq", None)
    if rotary is None or inverse is None or hooked(rotary) or getattr(rotary, "rope_type", None) not in _FIXED_ROTARY:
        return None
    return FusedRotary(rotary, positions) if 0 < positions * inverse.numel() * 8 <= _TABLE_BYTES else None


def fuse(model: nn.Module) -> nn.Module:
    """Fuse the decoder layers of a quantized transformers model, in place, for inference. Returns the model.

    Supports Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE; raises LayerError, naming the layer, for anything
    else. Projections that share an input but not a scheme stay separate GEMMs. To save or train a fused model, hook or
    replace its parts, or get hidden states, ``unfuse`` it: all of these raise LayerError.
    """
    body = _body(model)
    layers = getattr(body, "layers", None)
    if layers is None or not len(layers):
        raise LayerError(f"{type(model).__name__} has no list of decoder layers; fuse knows {', '.join(BLOCKS)}")
    if isinstance(layers[0], FusedLayer):
        return model
    ends = hooked(body.norm, "norm") if isinstance(getattr(body, "norm", None), nn.Module) else None
    reason = f"{ends} would no longer be called: remove them first" if ends else graph.on_several_devices(model)
    if reason is not None:
        raise LayerError(f"the model cannot be fused: {reason}")
    for index, layer in enumerate(layers):
        if (reason := _why_not(layer)) is not None:
            raise LayerError(f"layer {index} cannot be fused: {reason}")
    for index, layer in enumerate(layers):
        try:
            layers[index] = FusedLayer(layer)
        except LayerError as error:  # found only while joining, such as projections with different activation orders
            _restore(layers)
            raise LayerError(f"layer {index} cannot be fused: {error}") from None
        except BaseException:  # out of memory, for example: a half-fused model would not run
            _restore(layers)
            raise
    body.norm = bypass(FusedNorm(body.norm))
    body.rotary_emb = _rotary_of(body) or body.rotary_emb
    graph.install(model, layers[0].qkv.scheme.kv)
    model.__dict__["_anybit_refusals"] = (
        model.register_state_dict_pre_hook(_refuse_state_dict),
        model.register_load_state_dict_pre_hook(_refuse_state_dict),
        body.register_forward_pre_hook(refuse_records, with_kwargs=True),
        body.register_forward_hook(refuse_gradients),
    )
    return model


def accelerate(model: PreTrainedModel) -> bool:
    """Prepare a model for fast ``generate(cache_implementation="static")``: fused layers if possible, CUDA graphs.

    Works in place, also on unquantized models. Returns whether static generation will use an AnyBitCache and CUDA
    graphs; if not, generate as before.
    """
    with contextlib.suppress(LayerError):  # in which case nothing was fused
        fuse(model)
    graph.install(model, None)
    return graph.serves(model)


def unfuse(model: nn.Module) -> nn.Module:
    """Undo ``fuse`` and ``accelerate`` in place, restoring the layers and their tensors. Returns the model."""
    body = _body(model)
    _restore(getattr(body, "layers", nn.ModuleList()))
    if isinstance(getattr(body, "norm", None), FusedNorm):
        body.norm = restore(body.norm).norm
    if isinstance(getattr(body, "rotary_emb", None), FusedRotary):
        body.rotary_emb = restore(body.rotary_emb.rotary)
    graph.uninstall(model)
    schemes = [module.scheme for module in model.modules() if isinstance(module, QuantLinear)]
    kv = next((scheme.kv for scheme in schemes if scheme.kv is not None), None)  # per-layer overrides have none
    if kv is not None:
        graph.install(model, kv)
    for refusal in model.__dict__.pop("_anybit_refusals", ()):
        refusal.remove()
    return model


def _restore(layers: nn.ModuleList) -> None:
    """Replace fused layers by the originals, giving them back their projections."""
    for index, layer in enumerate(layers):
        if isinstance(layer, FusedLayer):
            restore(layer)
            queries, keys = layer.heads
            _split(layer.qkv, layer.self_attn, dict(zip(_QKV, (queries, keys, keys), strict=True)), layer.channels)
            layer.output.stand_in_fused(False)
            if layer.gate_up is not None:
                _split(layer.gate_up, layer.mlp, dict.fromkeys(_GATED, 1), layer.pairs)
                layer.down.stand_in_fused(False)
            layers[index] = restore(layer.original[0])


def _body(model: PreTrainedModel) -> PreTrainedModel:
    return model.get_decoder() if hasattr(model, "get_decoder") else model


def _why_not(layer: Any) -> str | None:
    if type(layer).__name__ not in BLOCKS:
        return f"it is a {type(layer).__name__}, and fuse knows {', '.join(BLOCKS)}"
    if not type(layer).__module__.startswith("transformers.models."):
        return f"its {type(layer).__name__} is not transformers' own, but of {type(layer).__module__}"
    if (found := hooked(layer)) is not None:
        return f"{found} would no longer be called: remove them first"
    mixture = _is_mixture(layer.mlp)
    if mixture and (reason := _why_not_mixture(layer.mlp)) is not None:
        return reason
    parts = (("self_attn", _QKV, "o_proj"), ("mlp", _GATED, "down_proj"))
    for parent, joined, alone in parts[: 1 if mixture else 2]:
        rotated = layer.get_submodule(f"{parent}.{joined[0]}")
        for name in (*joined, alone):
            module = layer.get_submodule(f"{parent}.{name}")
            if not isinstance(module, QuantLinear):
                return f"{parent}.{name} is a {type(module).__name__}, not a QuantLinear: quantize every linear layer"
            if name != alone and module.hadamard != rotated.hadamard:
                both = f"{parent}.{joined[0]} and {parent}.{name}"
                return f"only one of {both} rotates its inputs, so they cannot be joined"
    activation = layer.self_attn.config.hidden_act
    return None if activation in ("silu", "swish") else f"its activation is {activation}, and fuse knows silu"


def _is_mixture(mlp: nn.Module) -> bool:
    return hasattr(mlp, "experts")


def _why_not_mixture(mlp: Any) -> str | None:
    if {name for name, _ in mlp.named_children()} != {"experts", "gate"} or type(mlp.gate).__name__ not in ROUTERS:
        return f"its {type(mlp).__name__} is more than experts and one of {', '.join(ROUTERS)}"
    if not isinstance(mlp.experts, Experts):
        return f"its experts are {type(mlp.experts).__name__}, in 16 bits: quantize them"
    return None


class SideBySide(nn.Module):
    """Projections that share an input but not a scheme: one GEMM each, outputs concatenated.

    Takes the place of a joined QuantLinear after a norm.
    """

    def __init__(self, layers: list[QuantLinear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.scheme = layers[0].scheme

    def norm_linear(
        self, x: Tensor, residual: Tensor | None, gamma: Tensor, epsilon: float, silu: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``QuantLinear.norm_linear``: (y of RMSNorm(x + residual), x + residual); ``silu`` is not supported."""
        assert not silu
        if residual is None:
            normed, total = rms_norm(x, gamma, epsilon), x
        else:
            normed, total = add_rms_norm(x, residual, gamma, epsilon)
        return torch.cat([layer(normed) for layer in self.layers], dim=-1), total

    def stand_in_fused(self, fused: bool) -> None:
        """Mark every layer as ``QuantLinear.stand_in_fused`` does."""
        for layer in self.layers:
            layer.stand_in_fused(fused)  # type: ignore[operator]


def _alike(layers: list[QuantLinear]) -> bool:
    """Whether layers have the same scheme, so that they can be one GEMM."""
    return all(layer.scheme == layers[0].scheme for layer in layers)


def _joined(layers: list[QuantLinear], order: Tensor | None = None) -> QuantLinear | SideBySide:
    """Layers joined into one QuantLinear, outputs in ``order``; SideBySide if schemes differ."""
    if not _alike(layers):
        return SideBySide(layers)
    weight = stack([layer.quantized_weight() for layer in layers])
    biases = [layer.bias for layer in layers]
    bias = torch.cat([b for b in biases if b is not None]) if all(b is not None for b in biases) else None
    if bias is None and any(b is not None for b in biases):
        raise LayerError("some of the layers to join have a bias, and some do not")
    if order is not None:
        weight, bias = weight.rows(order), None if bias is None else bias[order.to(bias.device)]
    joined = QuantLinear.from_weight(weight, layers[0].scheme, bias, layers[0].backend)
    joined.hadamard = layers[0].hadamard
    if joined.bias is not None:
        joined.bias.requires_grad_(any(b is not None and b.requires_grad for b in biases))
    return joined.prepare()


def _split(fused: QuantLinear | SideBySide, parent: nn.Module, shares: dict[str, int], order: Tensor | None) -> None:
    if isinstance(fused, SideBySide):
        fused.stand_in_fused(False)
        for name, layer in zip(shares, fused.layers, strict=True):
            setattr(parent, name, layer)
        return
    outputs = [fused.out_features // sum(shares.values()) * share for share in shares.values()]
    whole, bias = fused.quantized_weight(), None if fused.bias is None else fused.bias.data
    if order is not None:
        before = order.argsort()
        whole, bias = whole.rows(before), None if bias is None else bias[before.to(bias.device)]
    biases = [None] * len(outputs) if bias is None else list(bias.split(outputs))
    for name, weight, part in zip(shares, unstack(whole, outputs), biases, strict=True):
        layer = QuantLinear.from_weight(weight, fused.scheme, part, fused.backend)
        layer.hadamard = fused.hadamard
        if layer.bias is not None and fused.bias is not None:
            layer.bias.requires_grad_(fused.bias.requires_grad)
        setattr(parent, name, layer.prepare())


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon)


def _refuse_state_dict(*_: object) -> NoReturn:
    raise LayerError("a fused model is for inference: call anybit.unfuse(model) before saving or loading its state")
