"""CUDA graphs for decoding: a static cache, and each decode step as one graph launch.

``install`` (called by ``anybit.fuse`` and for schemes with ``-kv``) changes two things about a model:

- ``generate`` creates an ``AnyBitCache``: a static one for ``cache_implementation="static"``, in 16 bits or in the
  scheme's KV format; by default a growing one, if the scheme has a KV format.
- a step of one token per row over a static AnyBitCache is captured once and then replayed, and so are short first
  prompts of fused models; prompts are padded to a multiple of 32 tokens (``PromptGraph``).

Greedy generation does not wait for the host between tokens (``greedy.py``). Other prompts, and passes that ask for more
than the last token's logits, run eagerly.
"""

import contextlib
import functools
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput
from transformers.utils import logging

from anybit.cache import kvcache
from anybit.errors import LayerError
from anybit.hf import greedy
from anybit.hf.bypass import refuse_records
from anybit.hf.cache import AnyBitCache
from anybit.hf.cache_attention import NAME, NotCausalError
from anybit.hf.cache_name import CACHE, cache_of
from anybit.hf.step_graph import BUCKET, CAPTURED, GreedyGraph, PromptGraph, StepGraph, pads_prompts
from anybit.layers.experts import Experts
from anybit.layers.linear import QuantLinear
from anybit.scheme import KVFormat

logger = logging.get_logger("anybit")

_SIXTEEN_BITS = KVFormat.parse("kv16")
_ROUND = 512  # static capacities are rounded up to this, so that calls of similar lengths share a graph
_LONGEST = 8192
"""Most tokens of a padded prompt, of a row. For each new length cuDNN plans its attention anew, in 45 ms on an H200."""
_STEP_ARGUMENTS = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "cache", "use_cache", "logits_to_keep",
    "return_dict", "cache_position",
}  # fmt: skip


class Decoder:
    """A model's static caches and their graphs, kept between calls of ``generate``.

    Threads may share the model. A lock serializes forward passes (``attention``), which switch the attention
    implementation in the model's configuration; another serializes ``generate`` over static caches (``turn``).
    """

    def __init__(self, model: PreTrainedModel, kv: KVFormat | None) -> None:
        self._model, self.kv = weakref.ref(model), kv
        self._overridden = model.__dict__.get("forward")  # a forward set on the instance: accelerate's hooks
        self.caches: dict[tuple[object, ...], AnyBitCache] = {}
        self.graphs: weakref.WeakKeyDictionary[AnyBitCache, StepGraph] = weakref.WeakKeyDictionary()
        self.greedy: weakref.WeakKeyDictionary[AnyBitCache, GreedyGraph] = weakref.WeakKeyDictionary()
        self.prompts: weakref.WeakKeyDictionary[AnyBitCache, dict[int, PromptGraph]] = weakref.WeakKeyDictionary()
        self._weights: list[tuple[int, bool]] = []
        self.attention, self._turns = threading.RLock(), threading.RLock()
        self._ended: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Exclusive use of the static caches, on the thread's current stream."""
        on_gpu = self.model.device.type == "cuda"
        with self._turns:
            if on_gpu and self._ended is not None:  # the previous user may have run on another stream
                torch.cuda.current_stream(self.model.device).wait_event(self._ended)
            try:
                yield
            finally:
                if on_gpu:
                    self._ended = torch.cuda.current_stream(self.model.device).record_event()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Decoder":
        return Decoder(memo[id(self.model)], self.kv)  # a copied model has caches and graphs of its own

    def __reduce__(self) -> NoReturn:
        raise LayerError(
            "a model that was fused, or whose scheme has a KV format, cannot be pickled: call anybit.unfuse(model) if "
            "it was fused, then model.save_pretrained(folder)"
        )

    @property
    def model(self) -> PreTrainedModel:
        """The model (a weak reference: the model owns this object)."""
        return self._model()

    @property
    def config(self) -> "PreTrainedConfig | _Plain":
        """The configuration for caches: the text model's, or a stand-in where attention cannot read packed pages."""
        config = self.model.config.get_text_config(decoder=True)
        return config if _attention_is_open(self.model) else _Plain(config)

    def forward(self, *args: object, **kwargs: object) -> ModelOutput:
        """The model's original forward pass."""
        if self._overridden is not None:
            return self._overridden(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    def attend(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> ModelOutput:
        """The model's forward pass, with attention over the packed pages of an AnyBitCache that it is given."""
        cache = cache_of(kwargs)
        if not isinstance(cache, AnyBitCache) or cache.config is None:
            if cache is not None and not isinstance(cache, AnyBitCache) and self.kv is not None:
                logger.warning_once(f"a {type(cache).__name__} keeps keys and values, not in the scheme's {self.kv}")
            return self.forward(*args, **kwargs)
        if cache.config is not self.model.config and not isinstance(cache.config, _Plain):
            cache.config = self.config  # an unpickled cache brought a copy
        try:
            with _packed(cache.config):
                ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
                if not args and isinstance(ids, Tensor) and (graph := self.graph(cache, ids, kwargs)) is not None:
                    logits = graph(ids, positions if isinstance(positions, Tensor) else cache.seen).clone()
                    return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})
                return self.forward(*args, **kwargs)
        except NotCausalError:  # before any layer has run
            if cache.packed_attention or cache.unpadded:
                raise  # the model's own attention is the one that cannot be, or keys and values lack the padding
            logger.warning_once("attention over a dequantized cache, which is slower: the mask is not simply causal")
            cache.config = _Plain(cache.config)
            return self.forward(*args, **kwargs)

    def forget(self) -> None:
        """Drop every cache and graph."""
        self.caches.clear()
        self.graphs.clear()
        self.greedy.clear()
        self.prompts.clear()

    def _check_weights(self) -> None:
        """Forget if weights moved, run on another backend or have an adapter: graphs would read freed addresses."""
        weights = list(weights_of(self.model))
        if weights != self._weights:
            self.forget()
            self._weights = weights

    def cache(self, rows: int, capacity: int, static: bool, keep: bool) -> AnyBitCache:
        """An empty cache for a ``generate`` call. keep: the caller keeps it, so it must not be reused."""
        kv = self.kv or _SIXTEEN_BITS
        if not static:
            return AnyBitCache(kv, config=self.config, capacity=capacity)
        capacity = -(-(capacity + 1) // _ROUND) * _ROUND
        self._check_weights()
        key = (rows, capacity, str(self.model.device), self.model.dtype)
        found = self.caches.pop(key, None)
        if found is None:
            self.caches.clear()  # keep one at a time: caches are large
            found = AnyBitCache(kv, capacity=capacity, static=True)
        found.config = self.config  # a previous prefill may have replaced it
        found.reset()
        if not keep:
            self.caches[key] = found
        return found

    def tokens(
        self, cache: AnyBitCache, first: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Yield the greedy tokens [rows, 1] of each step over a static cache.

        first, positions: [rows, 1].  mask: of padding, [rows, tokens before the first].
        """
        if not first.is_cuda or isinstance(cache.config, _Plain):  # no graph: dequantized keys grow at every step
            ids = first
            while True:
                if mask is not None:  # packed attention needs none: it stores no padding
                    mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
                call = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": True}
                ids = self.model(**call, **{CACHE: cache}).logits[:, -1].float().argmax(-1, keepdim=True)
                positions = positions + 1
                yield ids
        graph = self.greedy.get(cache)
        if graph is None:
            graph = self.greedy[cache] = GreedyGraph(self.model, self.forward, cache)
        made = graph.tokens(first, positions)
        while True:
            with self.attention, _packed(cache.config):
                ids = next(made)
            yield ids

    def graph(self, cache: AnyBitCache, ids: Tensor, kwargs: Mapping[str, object]) -> StepGraph | None:
        """The graph of a pass over tokens ``ids``: of a step of one token per row, or of a prompt; None for others."""
        if not _is_plain(cache, ids, kwargs):
            return None
        if not cache.seen and cache not in self.caches.values():  # the caller's own; ``generate`` has checked for its
            self._check_weights()
        if ids.shape[1] == 1 and cache.takes_step(1):
            graph = self.graphs.get(cache)
            if graph is None:
                graph = self.graphs[cache] = StepGraph(self.model, self.forward, cache)
            return graph
        tokens = -(-ids.shape[1] // BUCKET) * BUCKET
        short = 0 < tokens * len(ids) <= CAPTURED  # else padding few tokens of many rows would cost too much
        if not ((short or CAPTURED < tokens <= _LONGEST) and _is_first_prompt(cache, ids, kwargs)):
            return None
        graphs = self.prompts.setdefault(cache, {})
        prompt = graphs.get(tokens * short)
        if prompt is None:
            if not pads_prompts(self.model, cache):
                return None
            prompt = graphs[tokens * short] = PromptGraph(self.model, self.forward, cache, tokens * short, graphs)
        if prompt._has_hooks():  # which see no padding
            return None
        refuse_records(self.model.get_decoder(), None, kwargs)  # a replay would not
        return prompt


class _Plain:
    """Stand-in configuration for a cache whose model cannot run attention over packed pages."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.num_hidden_layers = config.num_hidden_layers
        self._attn_implementation = None


@contextlib.contextmanager
def _packed(config: PreTrainedConfig) -> Iterator[None]:
    """Run the attention of a configuration's model over packed pages."""
    before = getattr(config, "_attn_implementation", None)
    if before is None or before == NAME:
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def install(model: PreTrainedModel, kv: KVFormat | None) -> None:
    """Make a transformers model create AnyBitCaches and replay decode steps as CUDA graphs (see the module)."""
    if "_anybit_decoder" in model.__dict__ or not hasattr(model, "_prepare_cache_for_generation"):
        return

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: object, **kwargs: object) -> ModelOutput:
        decoder: Decoder = self._anybit_decoder
        # When compiling, a graph break must not happen while a lock is held.
        with contextlib.nullcontext() if torch.compiler.is_compiling() else decoder.attention:
            return decoder.attend(args, kwargs)

    @functools.wraps(type(model)._prepare_cache_for_generation)
    def prepare_cache(
        self: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, object], mode: object,
        batch_size: int, length: int, *rest: object,
    ) -> object:  # fmt: skip
        decoder: Decoder = self._anybit_decoder
        wanted = generation_config.cache_implementation
        free = cache_of(model_kwargs) is None and generation_config.use_cache is not False
        free = free and not getattr(generation_config, "is_assistant", False)
        reason = why_not(self, decoder.kv or _SIXTEEN_BITS) if free else None
        static = wanted == "static" and reason is None
        if reason is not None and decoder.kv is not None and wanted in (None, "dynamic", "static"):
            raise LayerError(f"the KV format {decoder.kv} cannot serve this model: {reason}")
        if reason is not None and wanted == "static":
            warnings.warn(f"this model uses transformers' own static cache, which is slower: {reason}", stacklevel=2)
        if not free or not (static or (decoder.kv is not None and wanted in (None, "dynamic"))):
            prepare = type(self)._prepare_cache_for_generation
            return prepare(self, generation_config, model_kwargs, mode, batch_size, length, *rest)
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        keep = bool(generation_config.return_dict_in_generate)
        made = decoder.cache(rows, length, static, keep)
        if decoder.kv is not None:
            logger.warning_once(f"generate uses an AnyBitCache in the scheme's KV format, {made.format}")
        model_kwargs[CACHE] = made
        return None

    signature = inspect.signature(model.generate)

    @functools.wraps(type(model).generate)
    def generate(self: PreTrainedModel, *args: object, **kwargs: object) -> Tensor | ModelOutput:
        decoder: Decoder = self._anybit_decoder
        usual = types.MethodType(type(self).generate, self)
        given = signature.bind(*args, **kwargs)
        named = dict(zip(signature.parameters, given.args, strict=False)) | given.kwargs
        static = greedy.setting(self, named, "cache_implementation") == "static"
        if greedy.wanted(self, named) and why_not(self, decoder.kv or _SIXTEEN_BITS) is None:
            streamer = named.pop("streamer", None)
            named["custom_generate"] = functools.partial(greedy.generate, steps=decoder.tokens, streamer=streamer)
        with decoder.turn() if static else contextlib.nullcontext():
            return usual(**named)

    model._anybit_decoder = Decoder(model, kv)
    model.generate = types.MethodType(generate, model)
    model.forward = types.MethodType(forward, model)
    model._prepare_cache_for_generation = types.MethodType(prepare_cache, model)


def installed(model: PreTrainedModel) -> bool:
    """Whether ``install`` was called on a model."""
    return "_anybit_decoder" in model.__dict__


def uninstall(model: PreTrainedModel) -> None:
    """Undo ``install``."""
    if installed(model):
        model._anybit_decoder.forget()
        for name in ("_anybit_decoder", "forward", "generate", "_prepare_cache_for_generation"):
            del model.__dict__[name]


def _is_plain(cache: AnyBitCache, ids: Tensor, kwargs: Mapping[str, object]) -> bool:
    """Whether a pass of some tokens per row over a static cache on a GPU asks only for logits."""
    if not (cache.static and ids.is_cuda and ids.shape[0] == len(cache.rows)) or kwargs.get("return_dict") is False:
        return False
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return False
    return {name for name, value in kwargs.items() if value is not None and value is not False} <= _STEP_ARGUMENTS


def weights_of(module: nn.Module) -> Iterator[tuple[int, bool]]:
    """What changes when a weight of a module moves; of experts in one op, whose layers may be 18,000, the first's."""
    if isinstance(module, QuantLinear):
        yield -1 if module._prepared is None else module._prepared.number, False
    yield from ((p.data_ptr(), p.requires_grad) for p in module._parameters.values() if p is not None)
    together = isinstance(module, Experts) and module._joined is not None and not module._joined.changed
    for child in islice(module.children(), 1 if together else None):
        yield from weights_of(child)


def _is_first_prompt(cache: AnyBitCache, ids: Tensor, kwargs: Mapping[str, object]) -> bool:
    """Whether a pass is a prompt without padding, into an empty cache, that asks for the last token's logits."""
    if cache.seen or cache.store is None or cache.slack < BUCKET or not cache.packed_attention:
        return False
    if ids.shape[1] > cache.store.ledger.capacity:
        return False  # the error says how many tokens do not fit, without padding
    mask, keep = kwargs.get("attention_mask"), kwargs.get("logits_to_keep")
    if not isinstance(keep, int) or keep != 1:
        return False
    return mask is None or (isinstance(mask, Tensor) and mask.shape == ids.shape and bool(mask.all()))


def serves(model: PreTrainedModel) -> bool:
    """Whether static ``generate`` of a model uses AnyBitCaches, and CUDA graphs on a GPU (after ``install``)."""
    decoder = model.__dict__.get("_anybit_decoder")
    return decoder is not None and _attention_is_open(model) and why_not(model, decoder.kv or _SIXTEEN_BITS) is None


def why_not(model: PreTrainedModel, kv: KVFormat) -> str | None:
    """Why a model cannot use an AnyBitCache of a format, as a sentence; None if it can."""
    return kvcache.why_not(model, kv) or on_several_devices(model)


def on_several_devices(model: PreTrainedModel) -> str | None:
    """A sentence that says a model is spread over several devices (``device_map``); None if it is on one."""
    devices = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    return None if len(devices) < 2 else f"it is spread over the devices {', '.join(devices)}: load it onto one"


def _attention_is_open(model: PreTrainedModel) -> bool:
    """Whether anybit's attention can replace a model's: it is replaceable, and every layer has its own K and V."""
    shared = getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
    return bool(getattr(model, "_supports_attention_backend", False)) and not shared
