"""Threads: concurrent first calls of a layer, and what waits while one records a CUDA graph."""

import copy
import gc
import pickle
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from anybit.layers.linear import QuantLinear
from anybit.ops.backend import LinearSpec
from anybit.ops.capture import without_collector
from anybit.scheme import WeightFormat
from cases import random_weight

THREADS = 4


@pytest.fixture(autouse=True)
def threads_that_change_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(call: Callable[[], object]) -> list[object]:
    """Results, or exceptions, of ``call`` in several threads that start together."""
    barrier, found = threading.Barrier(THREADS), []

    def run() -> None:
        barrier.wait()
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_layers_first_call_from_several_threads() -> None:
    weight, x = random_weight(64, 128, WeightFormat(4, "sym", 64)), torch.randn(1, 128)
    expected = QuantLinear.from_weight(weight, "w4a16g64")(x)
    for _ in range(60):
        layer = QuantLinear.from_weight(weight, "w4a16g64")
        for y in at_once(lambda layer=layer: layer(x)):
            assert isinstance(y, torch.Tensor), y
            assert torch.equal(y, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_of_a_prepared_layer_is_another_one(copied: Callable[[QuantLinear], QuantLinear]) -> None:
    """CUDA graphs are discarded when the ids of a model's layers change."""
    layer = QuantLinear.from_weight(random_weight(8, 64, WeightFormat(4)), "w4a16").prepare()
    other = copied(layer)
    assert layer._prepared is not None and other._prepared is not None
    assert other._prepared.number != layer._prepared.number
    assert other._prepared.spec == layer._prepared.spec
    for prepared in (layer._prepared, other._prepared, layer._prepared.in_fused(True)):
        assert prepared.spec == LinearSpec.parse(prepared.spec_text)
    x = torch.randn(2, 64)
    assert torch.equal(other(x), layer(x))


def test_the_collector_waits_until_the_last_thread_has_left() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with without_collector():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    assert gc.isenabled()
    with without_collector():
        assert not gc.isenabled()
        thread.start()
        assert entered.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
