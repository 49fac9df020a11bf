"""Commands killed at any moment: a folder stays whole, and the next run leaves no leftovers.

ANYBIT_KILLS is the number of kills (6); each forks a process that has imported everything, so that the time is spent
in the work and not before it.
"""

import contextlib
import hashlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.cases_calibration import sequences
from tests.cases_models import save_tiny

from anybit.checkpoints.scratch import PREFIX
from anybit.cli.checkpoints import convert
from anybit.errors import ConversionError
from anybit.quantization.methods.registry import quantize_folder

KILLS = int(os.environ.get("ANYBIT_KILLS", "6"))
TOKENS = [(s % 96).tolist() for s in sequences(16)]


def content(folder: Path) -> dict[str, str]:
    """Every finished file in a folder, and its content."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and PREFIX not in str(file)
    }


class Job:
    """Puts a folder into one of two states; ``turn`` selects which."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root, root / "out"
        self.source = root / "source"

    def run(self, turn: int) -> None:
        quantize_folder(self.source, self.out, ("w4a16g32", "w2a16g32asym")[turn], overwrite=True)

    def after(self) -> None:
        """Discard stored progress, so that there is something to do."""


class Calibrate(Job):
    def run(self, turn: int) -> None:
        remember = {"resume": self.root / f"resume{turn}", "spill": self.root / "spill"}
        options = {"sequences": TOKENS, "tokens": 300} | remember
        scheme = ("w4a16g32", "w2a16g32asym")[turn]
        quantize_folder(self.source, self.out, scheme, "gptq", overwrite=True, options=options)

    def after(self) -> None:
        for turn in (0, 1):
            shutil.rmtree(self.root / f"resume{turn}", ignore_errors=True)


class Convert(Job):
    def run(self, turn: int) -> None:
        with contextlib.suppress(ConversionError):  # already done
            convert(str(self.out), ("anybit", "compressed-tensors")[turn], as_json=False)


def killed(job: Job, turn: int, seconds: float) -> None:
    """Run a job repeatedly, and die in the middle of it."""
    child = os.fork()
    if not child:
        try:
            while True:
                job.run(turn)
                job.after()
        finally:
            os._exit(7)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the job failed before it was killed"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_killed_command_loses_nothing_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    chance, seen = random.Random(24), Counter()
    jobs: list[tuple[Job, list[dict[str, str]], float]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # no threads that a fork would lose
    try:
        for kind in (Job, Calibrate, Convert):
            root = tmp_path / kind.__name__
            job = kind(root)
            save_tiny("llama-tied", job.source)
            (job.source / "README.md").write_text("a model\n" * 1000)
            quantize_folder(job.source, job.out, "w4a16g32")
            states: list[dict[str, str]] = [{}, {}]
            for turn in (0, 1, 0, 1):
                job.after()
                began = time.perf_counter()
                job.run(turn)
                took = time.perf_counter() - began
                states[turn] = content(job.out)
            assert states[0] != states[1]
            jobs.append((job, states, took))
        for number in range(KILLS):
            job, states, took = jobs[number % len(jobs)]
            turn = number // len(jobs) % 2  # the folder is in the other state
            killed(job, turn, chance.uniform(0, 1.5 * took))
            assert content(job.out) in states, f"{type(job).__name__} {number}: neither the old folder nor the new one"
            name, left = type(job).__name__, list(job.root.rglob(f"{PREFIX}*"))
            seen.update([name, *[f"{name}: left something"] * bool(left)])
            job.run(turn)
            assert content(job.out) == states[turn], f"{name} {number}: the next run differs"
            left = list(job.root.rglob(f"{PREFIX}*"))
            assert not left, f"{name} {number}: {left} left behind"
            job.after()
            names = {path.name for path in job.root.iterdir()}
            assert names <= {"source", "out", "spill"}, names
    finally:
        torch.set_num_threads(threads)
        print(dict(seen))
