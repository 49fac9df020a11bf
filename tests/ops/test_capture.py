"""What waits while a thread records a CUDA graph."""

import gc
import threading

from anybit.ops.capture import without_collector


def test_the_collector_waits_until_the_last_thread_has_left():
    entered, leave = threading.Event(), threading.Event()

    def other():
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


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
