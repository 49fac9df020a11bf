"""jit.launch on hardware: streams, graphs, threads, several devices, torch.compile, and host overhead."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anybit import jit
from anybit.ops.capture import capture
from emulator import row_sums

ROWS, COLUMNS = 37, 200


def inputs(device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(ROWS * COLUMNS, device=device, dtype=torch.float32).reshape(ROWS, COLUMNS) % 17
    return x, torch.full((ROWS,), torch.nan, device=device)


def sum_rows(x: torch.Tensor, y: torch.Tensor, scale: float = 2.0, step: int = 64) -> None:
    rows, columns = x.shape
    params = row_sums.Params(x, y, rows, columns, scale)
    jit.launch(row_sums.kernel(row_sums.Config(step)), params, (-(-rows // 4), 1, 1))


def test_current_stream() -> None:
    x, y = inputs()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x += 1  # on any other stream, the sums would be those of the old x
        sum_rows(x, y)
    stream.synchronize()
    assert torch.equal(y, 2 * x.sum(1))


def test_graph_capture_of_the_first_launch() -> None:
    x, y = inputs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sum_rows(x, y, step=128)  # a step that no other test uses: compiled and loaded inside the capture
    for seed in range(3):
        x.copy_(torch.randint(9, x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(y, 2 * x.sum(1))


def test_a_dead_graph_does_not_end_a_capture() -> None:
    """Garbage collection would find a dead cycle with a graph, and destroy it during another's capture."""
    x, y = inputs()
    sum_rows(x, y)
    dead: list[object] = [torch.cuda.CUDAGraph(), *inputs()]
    with torch.cuda.graph(dead[0]):  # type: ignore[arg-type]
        sum_rows(dead[1], dead[2])  # type: ignore[arg-type]
    dead.append(dead)
    found = weakref.ref(dead[1])  # type: ignore[type-var]
    thresholds, graph = gc.get_threshold(), torch.cuda.CUDAGraph()
    gc.set_threshold(1, 1, 1)
    try:
        with capture(graph):
            del dead
            kept = [[i] for i in range(100)]
            assert found() is not None and kept
            sum_rows(x, y)
    finally:
        gc.set_threshold(*thresholds)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, 2 * x.sum(1))


def test_threads_do_not_mix_parameters() -> None:
    pairs = [inputs() for _ in range(4)]

    def work(index: int) -> None:
        x, y = pairs[index]
        for _ in range(200):
            sum_rows(x, y, scale=float(index))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (x, y) in enumerate(pairs):
        assert torch.equal(y, i * x.sum(1))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices() -> None:
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x, y = inputs(device)
        jit.launch(
            row_sums.kernel(row_sums.Config()),
            row_sums.Params(x, y, ROWS, COLUMNS, 2.0),
            (10, 1, 1),
            device=x.get_device(),
        )
        assert torch.equal(y, 2 * x.sum(1))


def test_refusals() -> None:
    x, y = inputs()
    with pytest.raises(ValueError, match=r"Params.x is on cpu, but row_sums is launched on cuda:0"):
        sum_rows(x.cpu(), y)
    with pytest.raises(ValueError, match=r"grid \(0, 1, 1\)"):
        jit.launch(row_sums.kernel(row_sums.Config()), row_sums.Params(x, y, 0, 0, 1.0), (0, 1, 1))
    with pytest.raises(jit.KernelError, match="setting CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 262144"):
        sum_rows(x, y, step=16384)


def test_torch_compile() -> None:
    @torch.library.custom_op("anybit_test::row_sums", mutates_args=(), device_types="cuda")
    def op(x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(x.shape[0])
        sum_rows(x, y)
        return y

    @op.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape[0])

    x, _ = inputs()
    compiled = torch.compile(lambda x: op(x + 1) * 0.5, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), (x + 1).sum(1))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYBIT_CACHE_DIR", str(tmp_path))


def test_first_use_and_disk(empty_cache: None) -> None:
    times = {}
    for name in ("compiled", "disk"):
        start = time.perf_counter()
        jit.cached(row_sums.kernel(row_sums.Config(96)), "sm_90a")
        times[name] = time.perf_counter() - start
    print(f"first use {times['compiled']:.3f} s, from disk {1e3 * times['disk']:.2f} ms")
    assert times["compiled"] < 3
    assert times["disk"] < 0.020


def host_us(call: Callable[[], object]) -> float:
    """Host microseconds of a call, the minimum of 20: the host may be busy with other tests."""
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        best = min(best, (time.perf_counter() - start) / 200)
    return 1e6 * best


def test_host_cost_of_a_launch() -> None:
    """Relative to torch's smallest operation on the same host: hosts differ by a factor of two."""
    x, y = inputs()
    kernel, grid = row_sums.kernel(row_sums.Config()), (10, 1, 1)
    torchs = host_us(lambda: torch.add(y, y, out=y))
    ours = host_us(lambda: jit.launch(kernel, row_sums.Params(x, y, ROWS, COLUMNS, 2.0), grid))
    print(f"one launch, its parameters included: {ours:.2f} us of host time, an addition in torch {torchs:.2f}")
    assert ours < 2 * torchs
