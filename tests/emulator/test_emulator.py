"""The emulator itself: it computes what hardware would, and names the faults of wrong kernels."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import emulate
from anybit import jit
from anybit.jit.params import KERNELS
from emulator import instructions, row_sums

pytestmark = pytest.mark.emulate


@dataclass(frozen=True)
class Config:
    fault: int


@dataclass(frozen=True)
class Params:
    x: jit.Pointer
    y: jit.Pointer
    n: jit.Int32


def run(
    entry: str, fault: int, x: torch.Tensor, y: torch.Tensor, seed: int = 0, threads: int = 64, blocks: int = 1,
    shared_bytes: int = 2048, cluster: int = 1, dependent: tuple[str, ...] = (),
) -> torch.Tensor:  # fmt: skip
    kernel = jit.Kernel(
        str(Path(__file__).with_name("faults.cuh")), entry, Config(fault), Params, threads, shared_bytes, cluster
    )
    emulate.run(kernel, Params(x, y, x.numel()), (blocks, 1, 1), seed=seed, dependent=dependent)
    return y


def words(n: int) -> torch.Tensor:
    return torch.arange(1, n + 1, dtype=torch.int32)


@pytest.mark.parametrize("seed", range(6))
def test_row_sums_are_right(seed: int) -> None:
    x, y = torch.arange(9 * 200, dtype=torch.float32).reshape(9, 200) % 17, torch.full((9,), torch.nan)
    kernel = row_sums.kernel(row_sums.Config())
    emulate.run(kernel, row_sums.Params(x, y, 9, 200, 2.0), (3, 1, 1), seed=seed)
    assert torch.equal(y, 2 * x.sum(1))


@pytest.mark.parametrize(
    ("entry", "shared_bytes", "message"),
    [
        ("missing_barrier", 256, r"race: .*shared memory \+ \d+, which thread \d+ of block \(0, 0, 0\) has"),
        ("missing_wait", 256, r"load of 4 bytes from shared memory \+ \d+: an asynchronous copy is still writing"),
        ("divergent_barrier", 256, r"divergent __syncthreads \(line \d+, 64 threads\): thread \d+ .* \(line \d+, "),
        (
            "skipped_barrier",
            256,
            r"deadlock\n.*threads 32-63: have ended\n.*threads 0-31: wait at __syncthreads .* 32 of 64",
        ),
        ("divergent_shuffle", 256, r"divergent shfl.*: thread \d+ of the same group is at shfl"),
        ("global_overrun", 256, r"load of 4 bytes from x \+ 256, past its 256 bytes: overrun"),
        ("misaligned_vector", 256, r"load of 16 bytes at x \+ \d+: misaligned"),
        ("null_pointer", 256, r"access of address .*, which is no memory"),
        ("shared_overrun", 256, r"store of 4 bytes to shared memory \+ 256, past its 256 bytes: overrun"),
        ("copy_overrun", 256, r"cp.async of 16 bytes from x \+ 256, past its 256 bytes: overrun"),
        ("wrong_expect_tx", 264, r"deadlock\n.*try_wait of the mbarrier at shared memory \+ 256, parity 0 .* 1 bytes"),
        ("bulk_without_wait", 264, r"load of 4 bytes from shared memory \+ \d+: an asynchronous copy is still writing"),
        ("uninitialized_mbarrier", 256, r"mbarrier_arrive: no mbarrier was initialized at shared memory \+ 0"),
        ("missing_proxy_fence", 256, r"cp.async.bulk store .*: it was written by ordinary stores and no fence_proxy"),
        ("store_source_reused", 256, r"cp.async.bulk store: shared memory \+ 0 was written again before"),
    ],
)
def test_faults_are_named(entry: str, shared_bytes: int, message: str) -> None:
    x = words(64)
    for seed in range(3):
        run(entry, 0, x, torch.zeros(64, dtype=torch.int32), seed, shared_bytes=shared_bytes)
        with pytest.raises(emulate.EmulationError, match=message):
            run(entry, 1, x, torch.zeros(64, dtype=torch.int32), seed, shared_bytes=shared_bytes)


@pytest.mark.parametrize("grid", [(1, 65536, 1), (1, 1, 65536), (1 << 31, 1, 1)])
def test_grids_that_cuda_does_not_launch(grid: tuple[int, int, int]) -> None:
    kernel = row_sums.kernel(row_sums.Config())
    with pytest.raises(emulate.EmulationError, match="more blocks than CUDA launches"):
        emulate.run(kernel, row_sums.Params(torch.zeros(1, 1), torch.zeros(1), 1, 1, 2.0), grid)


def test_what_the_right_ones_compute() -> None:
    x, y = words(64), torch.zeros(64, dtype=torch.int32)
    assert torch.equal(run("missing_barrier", 0, x, y.clone()), x.flip(0))
    for entry in ("missing_wait", "wrong_expect_tx", "bulk_without_wait", "missing_proxy_fence", "store_source_reused"):
        assert torch.equal(run(entry, 0, x, y.clone()), x), entry


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (1, "wgmma_b1: registers were touched since the last wgmma_wait_group, and no wgmma_fence followed"),
        (3, "wgmma_b1 .*: it was written by ordinary stores and no fence_proxy_async followed"),
        (4, r"race: store writes shared memory \+ 3|operand at shared memory \+ 0 was over|\+ 3: it was written"),
    ],
)
def test_wgmma_faults_are_named(fault: int, message: str) -> None:
    x = torch.randint(-(2**31), 2**31, (64, 8), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    with pytest.raises(emulate.EmulationError, match=message):
        run("product", fault, x, words(64), threads=128)


def test_wgmma_lands_only_when_waited_for() -> None:
    x = torch.randint(-(2**31), 2**31, (64, 8), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ones = torch.tensor([sum(int(w).bit_count() if w >= 0 else (int(w) + 2**32).bit_count() for w in row) for row in x])
    assert torch.equal(run("product", 0, x, words(64), threads=128).long(), ones)
    assert (run("product", 2, x, words(64), threads=128) == -1).all()  # poison


@pytest.mark.parametrize("seed", range(3))
def test_clusters_exchange_words(seed: int) -> None:
    x = words(256)
    y = run("cluster_exchange", 0, x, torch.zeros_like(x), seed, blocks=4, cluster=2)
    assert torch.equal(y.view(4, 64), x.view(4, 64)[[1, 0, 3, 2]])
    for fault, message in ((1, r"race: |has ended"), (2, "has ended, and its shared memory")):
        with pytest.raises(emulate.EmulationError, match=message):  # some thread orders succeed
            for other in range(20):
                run("cluster_exchange", fault, x, torch.zeros_like(x), other, blocks=4, cluster=2)


@pytest.mark.parametrize("seed", range(8))
def test_rings_are_dealt_evenly(seed: int) -> None:
    """In any thread order, a wait that could end too early in another order is reported, even if it was in time."""
    x = words(32 * 12)
    assert torch.equal(run("ring", 0, x, torch.zeros_like(x), seed, threads=96), x)
    with pytest.raises(emulate.EmulationError, match="skipped wait: the mbarrier at shared memory"):
        run("ring", 1, x, torch.zeros_like(x), seed, threads=96)


def test_blocks_that_wait_for_each_other() -> None:
    x, y = words(1), torch.zeros(2, dtype=torch.int32)
    assert run("last_arriver", 0, x, y.clone(), threads=1, blocks=9).tolist() == [9, 9]
    with pytest.raises(emulate.EmulationError, match=r"livelock: .* ld_acquire_gpu"):
        run("last_arriver", 1, x, y.clone(), threads=1, blocks=3)


def test_reading_before_the_earlier_kernel_ended() -> None:
    x, y = words(64), torch.zeros(64, dtype=torch.int32)
    assert torch.equal(run("early_read", 0, x, y.clone(), dependent=("x", "y")), x)
    with pytest.raises(emulate.EmulationError, match=r"x \+ \d+: an earlier kernel may still be using it"):
        run("early_read", 1, x, y.clone(), dependent=("x",))
    with pytest.raises(emulate.EmulationError, match="the launch ended without griddepcontrol_wait"):
        run("early_read", 2, x, y.clone(), dependent=("x",))


@pytest.mark.parametrize("case", [case for case in instructions.CASES if case.config.n < 64], ids=str)
def test_instructions_do_not_depend_on_the_order_of_threads(case: instructions.Case) -> None:
    results = []
    for seed in range(3):
        params = case.inputs()
        emulate.run(case.kernel, params, (case.cluster, 1, 1), seed=seed)
        results.append(params)
    for other in results[1:]:
        assert torch.equal(other.y, results[0].y)
        assert torch.equal(other.z, results[0].z)


def test_every_instruction_is_emulated_and_compared_with_hardware() -> None:
    """Every function in a ptx header needs a host version, and a use in tests/emulator/instructions.cuh."""
    names: set[str] = set()
    for path in (KERNELS / "common" / "ptx").glob("*.cuh"):
        text = re.sub(r"//.*", "", path.read_text())
        names |= set(re.findall(r"(?:DEVICE|CHECKED)\s[\w\s*&:<>]*?\b(\w+)\(", text))
        names |= set(re.findall(r"^ANYBIT_(?:MMA|MMA_SP|PAIRS|WGMMA_NAME|WGMMA_SP_NAME)\((\w+),", text, re.MULTILINE))
    names -= {"name", "ss", "rs"}  # the parameters and parts of macros
    assert len(names) > 120
    host = "".join(path.read_text() for path in emulate.RUNTIME.glob("device*.h"))
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", host)) == []
    used = Path(instructions.__file__).with_suffix(".cuh").read_text()
    elsewhere = {
        name for name in names if "tensor" in name or "nvf4" in name or "e2m1" in name
    }  # sm90_packed_gemm's tests; no hardware
    assert sorted(name for name in names - elsewhere if not re.search(rf"\b{name}\b", used)) == []
