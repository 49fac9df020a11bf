"""Random models for generate.py, and the check of a fused step."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StaticCache

import anybit
from anybit import AnyBitCache
from anybit.cache import attention
from anybit.checkpoints.configuration import Overrides
from anybit.codes import reference
from anybit.codes.packing import QuantizedWeight
from anybit.hf import fuse
from anybit.hf.transformers import quantized_layers
from anybit.kernels.block.rope import RopeStoreArgs
from anybit.layers.experts import Experts
from anybit.layers.linear import QuantLinear
from anybit.models.experts import unfuse
from anybit.ops import elementwise
from anybit.ops.kv import implement
from anybit.scheme import Scheme
from cases import random_places
from timing import worst_of

LLAMA = "Llama-3-8B"
MODELS: dict[str, dict[str, Any]] = {
    LLAMA: {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 1 << 18,
        "rope_theta": 500000.0,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 1 << 17, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shapes, by name."""


def random_model(
    scheme: str | None, layers: int, prepare: bool = True, head: str | None = None, name: str = LLAMA
) -> PreTrainedModel:
    """A model of shape ``name`` on the GPU, in fp16 or in a scheme, with random weights of realistic size.

    prepare: repack quantized weights for their kernel; False for a model that is then fused.
    head: the scheme of lm_head; None for 16 bits.
    """
    config = AutoConfig.for_model(**{**MODELS[name], "num_hidden_layers": layers}, dtype=torch.float16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(torch.float16).eval()
    if scheme is not None:
        unfuse(model)
        heads = Overrides({} if head is None else {"lm_head": Scheme.parse(head)})
        found = quantized_layers(model, Scheme.parse(scheme), [] if heads else ["lm_head"], overrides=heads)
        for each, layer in found.items():
            model.set_submodule(each, layer)
    for module in list(model.modules()):
        if isinstance(module, QuantLinear):
            fill(module)
        else:
            for own, parameter in list(module.named_parameters(recurse=False)):
                ones = "norm" in type(module).__name__.lower()
                fresh = torch.empty(parameter.shape, dtype=torch.float16, device="cuda")
                fresh = fresh.fill_(1.0) if ones else fresh.normal_(0, 0.02)
                setattr(module, own, torch.nn.Parameter(fresh, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to("cuda")
    for module in model.modules() if prepare else ():
        if isinstance(module, QuantLinear | Experts):
            module.prepare()
    return model


def fill(layer: QuantLinear) -> None:
    """Give a layer random codes whose weights have a standard deviation of about 0.02."""
    n, k, fmt = layer.out_features, layer.in_features, layer.scheme.weights
    words = torch.randint(-(2**31), 2**31, layer.weight_packed.shape, dtype=torch.int32, device="cuda")
    scale = torch.full((n, fmt.groups(k)), 0.07 / 2**fmt.bits, dtype=torch.float16, device="cuda")
    # Scales of both signs: signed codes have a mean of -1/2, which 32 layers would amplify beyond fp16.
    scale *= torch.randint(0, 2, scale.shape, device="cuda") * 2 - 1
    zero = None
    if fmt.code == "asym":
        zero = torch.full((n, fmt.groups(k)), 2 ** (fmt.bits - 1), dtype=torch.uint8, device="cuda")
    places = random_places(n, k) if fmt.sparse else None
    layer.load_weight(QuantizedWeight(words, scale, zero, (n, k), fmt, None, places))


def history(layer: int, batch: int, context: int, heads: int = 8, head: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values [batch, kv_heads, context, head_dim] of a layer, the same for every model."""
    generator = torch.Generator("cuda").manual_seed(layer)
    shape = (batch, heads, context, head)
    k, v = (torch.randn(shape, dtype=torch.float16, device="cuda", generator=generator) for _ in range(2))
    return k, v


def packed_cache(model: PreTrainedModel, kv: str, batch: int, context: int) -> AnyBitCache:
    """A static cache with the random history."""
    cache = AnyBitCache(kv, config=model.config, capacity=context + 512, static=True)
    heads = model.config.num_key_value_heads, model.config.head_dim
    for layer in range(model.config.num_hidden_layers):
        k, v = (x.transpose(1, 2) for x in history(layer, batch, context, *heads))
        if layer == 0:
            cache._allocate(k.transpose(1, 2).shape, k, context)
            cache.store.extend(cache.rows, context)
        cache.store.write(layer, cache.rows, k, v)
    cache.seen = context
    return cache


def unfused_logits(model: PreTrainedModel, batch: int, context: int) -> torch.Tensor:
    """Logits of a step by transformers' own code and StaticCache."""
    cache = StaticCache(config=model.config, max_cache_len=context + 16)
    ids = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    model(ids, past_key_values=cache)  # allocates its tensors
    for i, layer in enumerate(cache.layers):
        keys = layer.keys
        keys[:, :, :context], layer.values[:, :, :context] = history(i, batch, context, keys.shape[1], keys.shape[3])
        layer.cumulative_length.fill_(context)
    return model(ids, position_ids=torch.full_like(ids, context), past_key_values=cache).logits.float()


def reference_logits(model: PreTrainedModel, cache: AnyBitCache, ids: torch.Tensor, context: int) -> torch.Tensor:
    """Logits of a step with exact attention over the dequantized cache, which is restored."""
    before = model.config._attn_implementation
    implement(attention.decode_reference)
    try:
        model.config._attn_implementation = "anybit"
        logits = model._anybit_decoder.forward(
            input_ids=ids, position_ids=torch.full_like(ids, context), past_key_values=cache
        ).logits.float()
    finally:
        implement(attention.decode)
        model.config._attn_implementation = before
    for row in cache.rows:
        cache.store.crop(row, context)
    cache.seen = context
    return logits


def stepper(
    model: PreTrainedModel, kv: str, batch: int, context: int
) -> tuple[AnyBitCache, Callable[[], torch.Tensor]]:
    """A fused model's static cache with the history, and its step as generate calls it."""
    cache = packed_cache(model, kv, batch, context)
    ids = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    return cache, lambda: model(input_ids=ids, past_key_values=cache).logits


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error of logits."""
    return float((got.float() - wanted).norm() / wanted.norm())


@dataclass(frozen=True)
class Check:
    """Errors of a fused step of two layers against the unfused model over transformers' StaticCache.

    part: of the worst product, including norm or SiLU, or attention, against torch on the same inputs. logits: of the
    output.
    """

    part: float
    logits: float

    def __str__(self) -> str:
        return (
            f"each part within {self.part:.1e} of the reference on the same input; logits of two layers within "
            f"{self.logits:.1e} of unfused"
        )


_PARTS = ("forward", "norm_linear", "silu_linear", "norm_linear_rope")


@contextlib.contextmanager
def parts_compared(model: PreTrainedModel, errors: list[float]) -> Iterator[None]:
    """Within this context, also compute a fused model's products, experts and attention in torch, and compare."""
    mixtures = [module for module in model.modules() if isinstance(module, Experts)]
    inside = {layer for mixture in mixtures for layer in mixture.modules()}
    layers = [module for module in model.modules() if isinstance(module, QuantLinear) and module not in inside]

    def compare_experts(mixture: Experts) -> None:
        forward = mixture.forward

        def mixed(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
            y, joined = forward(x, ids, shares), mixture._joined
            assert joined is not None
            gate_up, down = joined.groups[0].prepared.restore()  # they have one scheme
            wanted = reference.experts(
                x.float(), ids, shares, gate_up, down, (2 * down.shape[1], gate_up.shape[1]), len(mixture),
                mixture[0]["up_proj"].scheme.activations, str(mixture.gate),
            )  # fmt: skip
            errors.append(apart(y, wanted))
            return y

        vars(mixture)["forward"] = mixed

    def norm_router(
        x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, epsilon: float, weight: torch.Tensor, top: int,
        renormalize: bool,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        y, total, ids, shares = norm_and_route(x, residual, gamma, epsilon, weight, top, renormalize)
        errors.append(apart(y, elementwise._rms_norm_cpu(x + residual, gamma, epsilon).float()))
        every = torch.softmax(y.float() @ weight.float().T, -1)
        taken, best = every.gather(1, ids.long()), every.topk(top)[0].sum()
        errors.append(float((best - taken.sum()) / best))  # near ones may swap
        errors.append(apart(shares, taken / taken.sum(-1, keepdim=True) if renormalize else taken))
        return y, total, ids, shares

    norm_and_route = fuse.norm_router

    def expected(layer: QuantLinear, x: torch.Tensor) -> torch.Tensor:
        return reference.linear(x, layer.quantized_weight(), layer.scheme.activations, layer.bias).float()

    def compare(layer: QuantLinear) -> None:
        forward, norm, silu, turn = layer.forward, layer.norm_linear, layer.silu_linear, layer.norm_linear_rope

        def plain(x: torch.Tensor) -> torch.Tensor:
            y = forward(x)
            errors.append(apart(y, expected(layer, x)))
            return y

        def norm_linear(
            x: torch.Tensor, residual: torch.Tensor | None, gamma: torch.Tensor, epsilon: float, silu: bool = False
        ) -> tuple[torch.Tensor, torch.Tensor]:
            y, total = norm(x, residual, gamma, epsilon, silu)
            added = x if residual is None else x + residual
            errors.append(apart(total, added.float()))
            wanted = expected(layer, elementwise._rms_norm_cpu(added, gamma, epsilon))
            errors.append(apart(y, elementwise._silu_mul_cpu(wanted.to(y.dtype), paired=True) if silu else wanted))
            return y, total

        def norm_linear_rope(
            x: torch.Tensor, residual: torch.Tensor | None, gamma: torch.Tensor, epsilon: float, step: RopeStoreArgs
        ) -> tuple[torch.Tensor, torch.Tensor]:
            new = torch.zeros_like(step.ring)
            q, total = turn(x, residual, gamma, epsilon, step)
            added = x if residual is None else x + residual
            qkv = expected(layer, elementwise._rms_norm_cpu(added, gamma, epsilon)).to(q.dtype)
            wanted = elementwise._rotate_store_cpu(
                qkv.view(len(step.cosine), -1), *replace(step, ring=new).operands(), None, None, 0.0, True
            )
            errors.extend((apart(total, added.float()), apart(q, wanted.float())))
            stored = new != 0
            errors.append(apart(step.ring[stored], new[stored].float()))
            return q, total

        def silu_linear(gate_up: torch.Tensor) -> torch.Tensor:
            y = silu(gate_up)
            errors.append(apart(y, expected(layer, elementwise._silu_mul_cpu(gate_up))))
            return y

        watched = (plain, norm_linear, silu_linear, norm_linear_rope)
        vars(layer).update(zip(_PARTS, watched, strict=True))  # a fused layer refuses an assigned forward

    kernel = attention.decode

    def decode(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        out = kernel(*args, **kwargs)
        errors.append(apart(out[0], attention.decode_reference(*args)[0].float()))
        return out

    for layer in layers:
        compare(layer)
    for mixture in mixtures:
        compare_experts(mixture)
    implement(decode)
    fuse.norm_router = norm_router
    try:
        yield
    finally:
        implement(kernel)
        fuse.norm_router = norm_and_route
        for mixture in mixtures:
            del mixture.__dict__["forward"]
        for layer in layers:
            for name in _PARTS:
                del layer.__dict__[name]


@functools.cache
@torch.inference_mode()
def check(scheme: str, batch: int, head: str | None = None, layers: int = 2, name: str = LLAMA) -> Check:
    """Compare a fused step of a few layers over an AnyBitCache of 512 tokens with the unfused model."""
    model = random_model(str(replace(Scheme.parse(scheme), kv=None)), layers, head=head, name=name)
    expected = unfused_logits(model, batch, 512)
    cache, step = stepper(anybit.fuse(model), "kv16", batch, 512)
    logits = apart(step(), expected)
    for sequence in cache.rows:
        cache.store.crop(sequence, 512)
    cache.seen = 512
    errors: list[float] = []
    ids = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    before, model.config._attn_implementation = model.config._attn_implementation, "anybit"
    with parts_compared(model, errors):
        model._anybit_decoder.forward(
            input_ids=ids, position_ids=torch.full_like(ids, 512), past_key_values=cache, use_cache=True
        )
    model.config._attn_implementation = before
    assert len(errors) >= 7 * layers, f"only {len(errors)} parts were compared"
    return Check(worst_of(errors), logits)


def prompt_of(tokens: int) -> torch.Tensor:
    """A random prompt [1, tokens], the same for every model."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    return torch.randint(MODELS[LLAMA]["vocab_size"], (1, tokens), device="cuda", generator=generator)


@torch.inference_mode()
def check_prompt(scheme: str, tokens: int, layers: int = 2) -> Check:
    """Compare a fused pass of a few layers over a prompt with the unfused model."""
    model, ids = random_model(scheme, layers), prompt_of(tokens)
    expected = model(ids, logits_to_keep=1).logits.float()
    errors: list[float] = []
    with parts_compared(anybit.fuse(model), errors):
        cache = AnyBitCache("kv16", config=model.config, capacity=tokens + 512, static=True)
        logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
    assert len(errors) >= 6 * layers, f"only {len(errors)} parts were compared"
    return Check(worst_of(errors), apart(logits, expected))
