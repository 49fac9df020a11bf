"""Compile the GPU tests' kernels in parallel, without touching the GPU:

    python tests/kernels/precompile.py tests.kernels.block.test_hadamard_gpu

Tests also compile what they need, one kernel after another; this fills the disk cache first.
"""

import importlib
import multiprocessing
import os
import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in (*Path(__file__).parents[:3], Path(__file__).parents[1] / "emulator")]

from anybit import jit  # noqa: E402


def main(names: list[str], arch: str = "sm_90a") -> None:
    """Compile the kernels that the modules ``names`` list."""
    kernels = list({kernel for name in names for kernel in importlib.import_module(name).kernels_used()})
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        pool.starmap(jit.cached, [(kernel, arch) for kernel in kernels], chunksize=4)
    print(f"{len(kernels)} kernels compiled")


if __name__ == "__main__":
    main(sys.argv[1:])
