"""A family's revision (``anybit.choose.registry.REVISIONS``) is raised when its kernels' machine code changes.

Maps depend on these revisions: after an unnoticed change of machine code, times of other kernels would stay
in force. ``revisions.json`` has hashes of the machine code of a few configs per family. After an intended change:

    python tests/compile/test_revisions.py          # compile, and write the new hashes
"""

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anybit.choose.families import FAMILIES, Candidate
from anybit.choose.policy import SHIPPED, read
from anybit.choose.registry import REVISIONS
from anybit.jit import Kernel
from anybit.jit.cache import compiler_version
from anybit.jit.identity import machine_code
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme

STORED = Path(__file__).with_name("revisions.json")
ARCH = "sm_90a"
AGAIN = "python tests/compile/test_revisions.py"
_EACH = 4


def configs(family: str) -> Iterator[tuple[LinearProblem, Candidate]]:
    """A few configs of a family, far apart in the shipped map; the defaults if it is not in the map."""
    found: dict[Candidate, LinearProblem] = {}
    for (scheme, dtype, n, k), points in read(SHIPPED / "nvidia-h200.json").layers.items():
        form = Scheme.parse(scheme)
        for m, point in points.items():
            for measured in point.strategies.values():
                if measured.kernel == family:
                    one = LinearProblem(m, n, k, form.weights, form.activations, getattr(torch, dtype))
                    found.setdefault(measured.candidate(one), one)
    of = FAMILIES[family]
    for scheme, m in (("w4a16g128", 4), ("w4a8", 16), ("w2a2", 4)) if not found else ():
        form = Scheme.parse(scheme)
        one = LinearProblem(m, 4096, 4096, form.weights, form.activations)
        if of.module.why_not(one) is None:
            found[Candidate(family, of.module.default(one), one.activations)] = one
    ordered = [(one, candidate) for candidate, one in found.items()]
    yield from ordered[:: max(1, len(ordered) // _EACH)][:_EACH]


@functools.cache
def kernels(family: str) -> dict[str, Kernel]:
    """Representative kernels of a family, by a name independent of config fields."""
    if family == "quantize_activations":
        found: dict[str, Kernel] = {}
        for other in ("sm90_bitplane_gemm", "sm90_packed_gemm"):
            for one, candidate in configs(other):
                coding = [kernel for kernel in candidate.kernels(one) if "quantize_activations" in kernel.header]
                found |= {f"{one}, for {other}": kernel for kernel in coding}
        return found
    return {
        f"{i}: {one}": FAMILIES[family].module.kernel(candidate.config)
        for i, (one, candidate) in enumerate(configs(family))
    }


def hashes(family: str) -> dict[str, str]:
    """Hashes of a family's machine code, by name."""
    return {name: machine_code(kernel, ARCH) for name, kernel in kernels(family).items()}


@pytest.mark.parametrize("family", REVISIONS)
def test_machine_code_is_that_of_the_revision(family: str) -> None:
    stored = json.loads(STORED.read_text())
    if stored["compiler"] != compiler_version():
        pytest.skip(f"hashes are of {stored['compiler']}, and this is {compiler_version()}")
    assert kernels(family), f"no config stands for {family}"
    then = stored["families"][family]
    if then["revision"] != REVISIONS[family]:
        pytest.fail(f"{family} has a new revision: run {AGAIN}, and remeasure its map points")
    now = hashes(family)
    lacking = now.keys() - then["machine code"].keys()
    assert not lacking, f"the map names other configs of {family} than those recorded: run {AGAIN}"
    changed = [name for name, code in now.items() if then["machine code"][name] != code]
    assert not changed, (
        f"the machine code of {family} has changed in {len(changed)} of {len(now)} configs ({changed[0]}). If that was "
        f"meant, raise REVISIONS[{family!r}] in anybit/choose/registry.py and run {AGAIN}; if machine code "
        "should be unchanged, look again"
    )


if __name__ == "__main__":
    recorded = {name: {"revision": number, "machine code": hashes(name)} for name, number in REVISIONS.items()}
    STORED.write_text(json.dumps({"compiler": compiler_version(), "arch": ARCH, "families": recorded}, indent=1) + "\n")
    sys.exit(0)
