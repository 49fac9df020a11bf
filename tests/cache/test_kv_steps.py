"""Later layers of a vLLM step launch what they would as its first. No GPU: launches are recorded."""

import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from anybit.kernels.attention import kv_page
from anybit.ops import kv, kv_rows
from anybit.ops.kv import Masks
from anybit.ops.kv_rows import PAGE
from anybit.scheme import KVFormat
from anybit.vllm import kv_step
from anybit.vllm.kv_step import Batch, run
from cases_launches import Driver, install

HEADS, KV_HEADS, DIM, BLOCKS = 8, 2, 128, 16
BATCHES = {
    "decodes": ((300, 1), (5, 1), (128, 1)),
    "prompts": ((400, 400), (300, 100), (130, 129)),
    "both": ((300, 1), (129, 1), (400, 400), (300, 100)),
    "drafts": ((300, 5), (129, 2), (128, 1)),
    "drafts and prompts": ((300, 5), (129, 2), (128, 1), (400, 400), (300, 100)),
    "prompts that begin a page": ((300, 1), (400, 400), (300, 44), (258, 130)),
    "prompts of a page": ((300, 1), (100, 100), (128, 128), (5, 5)),
}
"""Tokens of each request, and how many of them are new."""
LAUNCHES = {
    "decodes": (2, 0),
    "prompts": (2, 2),
    "both": (4, 2),
    "drafts": (2, 0),
    "drafts and prompts": (4, 2),
    "prompts that begin a page": (3, 2),
    "prompts of a page": (3, 1),
}
"""What a layer launches or calls: once, and per group of prompts."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = install(monkeypatch)
    found.look = comparable
    yield found
    kv._spaces.clear()


def comparable(values: dict[str, Any]) -> None:
    values["lse"] = 0  # written, and never read
    if values.get("sinks"):  # created for the launch: compare contents
        values["sinks"] = ctypes.string_at(values["sinks"], 4 * HEADS)


def batch_of(name: str, room: int = 100, front: int = 4) -> Batch:
    given = BATCHES[name]
    lengths, new = torch.tensor(given).int().unbind(1)
    starts = torch.cat((torch.zeros(1), new.cumsum(0))).int()
    most = 5 if "drafts" in name else 1
    decodes = int((new <= most).sum())
    batch = Batch(
        torch.ones(len(given), front + 4).int(), lengths.contiguous(), starts, int(starts[-1]), decodes,
        int(starts[decodes]), most,
    )  # fmt: skip
    if decodes < len(given):
        batch.add_prompts(starts[decodes:].long().numpy(), lengths[decodes:].long().numpy(), room)
    return batch


@dataclass
class One:
    """A layer that records its attention inputs and its launches."""

    driver: Driver
    tokens: int
    format: str = "kv4g128"
    slack: int = 32
    masks: Masks = Masks()  # noqa: RUF009
    dtype: torch.dtype = torch.float16
    capacity: int = 4096
    heads: int = HEADS
    gap: int = 0  # bytes between blocks
    fused: bool = False  # q, k and v are parts of one tensor
    shift: int = 0  # elements before q, k, v and out
    pages: Tensor | None = None

    def __post_init__(self) -> None:
        self.rows = kv_rows.layout(KVFormat.parse(self.format), DIM, self.slack)
        size = KV_HEADS * self.rows.layout.page_bytes
        raw = torch.zeros(BLOCKS * (size + self.gap), dtype=torch.uint8)
        shape, strides = (BLOCKS, KV_HEADS, self.rows.layout.page_bytes), (size + self.gap, size // KV_HEADS, 1)
        self.pages = raw.as_strided(shape, strides)
        heads = [self.heads, KV_HEADS, KV_HEADS]
        if self.fused:
            parts = self._tokens(sum(heads)).split(heads, 1)
        else:
            parts = tuple(self._tokens(count) for count in heads)
        self.q, self.k, self.v = parts
        self.out = self._tokens(self.heads)

    def _tokens(self, heads: int) -> Tensor:
        size = self.tokens * heads * DIM
        return torch.zeros(size + self.shift, dtype=self.dtype)[self.shift :].view(self.tokens, heads, DIM)

    def __call__(self, batch: Batch) -> list[Any]:
        """Everything that the layer does in a step."""

        def prompts(*given: Any) -> None:
            self.driver.launches.append(
                [(x.data_ptr(), x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in given]
            )

        shape = (PAGE, 2, KV_HEADS, PAGE, DIM)
        plain = spaces.setdefault((shape, self.dtype), torch.empty(shape, dtype=self.dtype))
        run(
            batch, self.rows, self.pages, self.q, self.k, self.v, self.masks, self.out, capacity=self.capacity,
            space=lambda pages: plain, prompts=prompts,
        )  # fmt: skip
        return self.driver.take()


spaces: dict[Any, Tensor] = {}


def parts_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the layers that determine their launches themselves."""
    plain, asked = kv_step._parts, list[int]()
    monkeypatch.setattr(kv_step, "_parts", lambda *given: asked.append(1) or plain(*given))
    return asked


@pytest.mark.parametrize("room", [1, 100])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("format", ["kv4g128", "kv4g128rot", "kv2g32"])
@pytest.mark.parametrize("name", BATCHES)
def test_layers_that_look_alike_launch_the_same(driver, monkeypatch, name, format, sinks, room) -> None:
    batch = batch_of(name, room)
    layers = [
        One(driver, batch.tokens, format, masks=Masks(0.1, sinks=torch.randn(HEADS) if sinks else None))
        for _ in range(4)
    ]
    wanted = [layer(replace(batch)) for layer in layers]
    assert len({str(one) for one in wanted}) == 4, "each has its own addresses"
    once, each = LAUNCHES[name]
    assert len(wanted[0]) == once + each * len(batch.groups)
    asked = parts_of(monkeypatch)
    assert [layer(batch) for layer in layers] == wanted
    assert [layer(batch) for layer in reversed(layers)] == wanted[::-1]
    assert len(asked) == 1


@pytest.mark.parametrize("name", BATCHES)
def test_layers_that_look_different_do_not(driver: Driver, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    batch = batch_of(name)
    kinds: list[dict[str, Any]] = [
        {},
        {"format": "kv4"},
        {"slack": 64},
        {"masks": Masks(0.1)},
        {"masks": Masks(window=200)},
        {"masks": Masks(window=300)},
        {"masks": Masks(softcap=20.0)},
        {"masks": Masks(sinks=torch.randn(HEADS))},
        {"dtype": torch.bfloat16},
        {"capacity": 8192},
        {"heads": 4},
        {"gap": 256},
        {"fused": True},
    ]
    pairs = [(One(driver, batch.tokens, **kind), One(driver, batch.tokens, **kind)) for kind in kinds]
    layers = [pair[i] for i in range(2) for pair in pairs]
    wanted = [layer(replace(batch)) for layer in layers]
    asked = parts_of(monkeypatch)
    assert [layer(batch) for layer in layers] == wanted
    assert len(asked) == len(batch.plans) == len(kinds)


def test_copies_slopes_and_debugging_are_launched_anew(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of("both")
    asked = parts_of(monkeypatch)
    for kind in ({"shift": 1}, {"masks": Masks(alibi=torch.ones(HEADS))}):
        for layer in (One(driver, batch.tokens, **kind), One(driver, batch.tokens, **kind)):  # type: ignore[arg-type]
            before = len(asked)
            assert len(layer(batch)) == 6 and len(asked) == before + 1
    layer = One(driver, batch.tokens)
    with monkeypatch.context() as patch:
        patch.setattr(kv_page, "debugging", lambda: True)
        patch.setattr(kv_page, "report", lambda errors, layer: asked.append(errors))
        before = len(asked)
        layer(batch)
    assert len(asked) == before + 4, "three launches that store are looked at"
    assert not batch.plans


def test_streams_and_captures_have_workspaces_of_their_own(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, where = batch_of("both"), [7, 0]
    monkeypatch.setattr(kv, "stream_of", lambda device: tuple(where))
    layers = [One(driver, batch.tokens) for _ in range(2)]

    def partial_of(said: list[Any]) -> int:
        (found,) = (one[3]["partial"] for one in said if isinstance(one, tuple) and "partial" in one[3])
        return int(found)

    spaces_seen = []
    for stream, capture in ((7, 0), (8, 0), (8, 1), (8, 2)):
        where[:] = stream, capture
        wanted = [layer(replace(batch)) for layer in layers]
        assert [layer(batch) for layer in layers] == wanted
        spaces_seen.append({partial_of(one) for one in wanted})
        assert len(batch.plans) == (2 if stream == 8 else 1), "captures cache nothing"
    assert all(len(seen) == 1 for seen in spaces_seen)
    assert len({seen.pop() for seen in spaces_seen}) == 4


def test_a_step_holds_no_tensor_of_a_layer(driver: Driver) -> None:
    batch = batch_of("both")
    layer = One(driver, batch.tokens, masks=Masks(sinks=torch.randn(HEADS)))
    layer(batch)
    tensors = (layer.pages, layer.q, layer.k, layer.v, layer.out)
    homes = {x.untyped_storage().data_ptr() for x in tensors if x is not None}
    del layer, tensors
    gc.collect()
    assert batch.plans
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # left by other tests, and without storage
    alive = (x for x in gc.get_objects() if type(x) is Tensor and not wrapped(x))
    assert not homes & {x.untyped_storage().data_ptr() for x in alive}
