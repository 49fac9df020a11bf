"""Steps of one token a row over a static cache, replayed as CUDA graphs: a small model's step is a thousand launches.

Attention is two batched products, in which the query heads of a group share their keys: transformers' own repeats these
for each query head, or waits for the host.
"""

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import DynamicLayer

from anybit.errors import one_line
from anybit.ops.capture import capture
from anybit.quantization.learn.fuse import can_capture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attention reads a multiple of so many positions; each has a graph.
_REACH = 128
_NAME, _PLACE = "anybit-static-step", "_anybit_place"
# Positions, and the largest difference of logits relative to the largest logit, of the trial.
_TRIED, _APART = 4, 0.05


class StaticStep:
    """Logits [rows, V] of a model after tokens int64 [rows, 1] at a position; the next call overwrites them."""

    def __init__(self, model: "PreTrainedModel", rows: int, length: int) -> None:
        self.model, self.length, self.device = model, length, model.device
        self.place = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.ids = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
        self.reach = min(_REACH, length)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.cache = Cache(layers=[_Layer(self) for _ in range(layers)])
        self.name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.records = self.device.type == "cuda" and can_capture(model)
        self.logits: Tensor | None = None

    @classmethod
    def of(cls, model: "PreTrainedModel", rows: int, length: int) -> "StaticStep | None":
        """Steps of a model, whose attention is replaced, if a trial shows that they give its logits."""
        ids = torch.arange(_TRIED, device=model.device)[None] + 1
        wanted, before = model(input_ids=ids, use_cache=False).logits[0].float(), model.config._attn_implementation
        model.config._attn_implementation = _NAME
        try:
            step = cls(model, rows, length)
            found = [step._run(token.expand(rows, 1), i)[0].float() for i, token in enumerate(ids[0])]
            if float((torch.stack(found) - wanted).abs().max()) < _APART * float(wanted.abs().max()):
                return step
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            pass  # another kind of cache, or of attention
        model.config._attn_implementation = before
        return None

    def __call__(self, ids: Tensor, position: int) -> Tensor:
        """Logits [rows, V] after tokens [rows, 1]; all positions before have been given."""
        self._put(ids, position)
        if self.records and self.reach not in self.graphs:
            self._record()
        if not self.records:
            return self._forward()
        self.graphs[self.reach].replay()
        assert self.logits is not None
        return self.logits

    def _record(self) -> None:
        """Capture a step of this reach."""
        first = self._forward()  # warms up; it writes what the replay will write again
        self.logits = first if self.logits is None else self.logits
        graph = torch.cuda.CUDAGraph()
        try:
            with capture(graph):
                self.logits.copy_(self._forward())
        except RuntimeError as error:  # a model that synchronizes (reads values on the host) cannot be captured
            warnings.warn(f"text is written without CUDA graphs, which is slower: {one_line(error)}", stacklevel=2)
            self.records = False
            return
        self.graphs[self.reach] = graph

    def _run(self, ids: Tensor, position: int) -> Tensor:
        self._put(ids, position)
        return self._forward()

    def _put(self, ids: Tensor, position: int) -> None:
        self.ids.copy_(ids)
        self.place.fill_(position)
        self.reach = min((position // _REACH + 1) * _REACH, self.length)

    def _forward(self) -> Tensor:
        logits: Tensor = self.model(
            input_ids=self.ids, position_ids=self.place[None], use_cache=True, **{self.name: self.cache}
        ).logits
        return logits[:, -1]


class _Layer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [rows, heads, length, dim] of a layer."""

    def __init__(self, step: StaticStep) -> None:
        super().__init__()
        self.step = step
        self.held: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store a position; returns all within reach."""
        if self.held is None:
            rows, heads, _, _ = key_states.shape
            keys, values = (x.new_zeros(rows, heads, self.step.length, x.shape[-1]) for x in (key_states, value_states))
            self.held = keys, values
        keys, values = (
            held.index_copy_(2, self.step.place, new)[:, :, : self.step.reach]
            for held, new in zip(self.held, (key_states, value_states), strict=True)
        )
        setattr(keys, _PLACE, self.step.place)  # where _attend finds it
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        """Positions before this one, as far as the host knows."""
        return self.step.reach - 1


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one position a row, [rows, heads, 1, dim], over a ``_Layer``; transformers' interface."""
    if others.get("softcap") is not None or others.get("s_aux") is not None or query.shape[2] != 1:
        raise NotImplementedError
    rows, heads, _, dim = query.shape
    place: Tensor = getattr(key, _PLACE)
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], dim)
    weights = (grouped @ key.mT).float() * (scaling or dim**-0.5)
    at = torch.arange(key.shape[2], device=key.device)
    seen = at <= place if sliding_window is None else (at <= place) & (at > place - sliding_window)
    weights = weights.masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype)
    return (weights @ value).view(rows, 1, heads, value.shape[-1]), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Attention masks positions itself."""


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _no_mask)
