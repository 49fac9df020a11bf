"""What a kernel's machine code must and must not contain, in one line per kernel.

check(gemm.kernel(config), "sm_90a", has="BGMMA.*AND", registers=168)
"""

import re
import shutil
import subprocess
import zlib
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path

import kept
from anybit import jit
from anybit.device import Device
from anybit.jit.compile import Compiled

ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90a"]
"""All architectures of the mma.sync family."""


def check(
    kernel: jit.Kernel,
    arch: str,
    *,
    has: str | Iterable[str] = (),
    lacks: str | Iterable[str] = (),
    registers: int | None = None,
    stack_bytes: int = 0,
) -> Compiled:
    """Compile `kernel` for `arch` and check it: no spills, no calls, it fits an SM, and the given conditions.

    has, lacks: regular expressions that some, or no, SASS instruction matches from its name on ("BMMA.*AND.POPC").
    registers: maximum per thread.  stack_bytes: maximum local memory, for arrays indexed at run time.
    """
    compiled = jit.cached(kernel, arch)
    what = f"{kernel.entry} for {arch} with {kernel.config}"
    assert compiled.spill_bytes == 0, f"{what} spills {compiled.spill_bytes} bytes"
    assert compiled.stack_bytes <= stack_bytes, f"{what} uses {compiled.stack_bytes} bytes of local memory"
    if registers is not None:
        assert compiled.registers <= registers, f"{what} needs {compiled.registers} registers, more than {registers}"
    assert compiled.registers * kernel.threads <= 65536, f"{what}: {compiled.registers} registers x {kernel.threads}"
    most = Device.named(arch).shared_bytes
    assert kernel.shared_bytes + compiled.static_shared_bytes <= most, f"{what}: more shared memory than {most} bytes"
    instructions = sass(compiled.cubin)
    for pattern in [has] if isinstance(has, str) else has:
        assert any(re.match(pattern, i) for i in instructions), f"{what} has no {pattern} among {_names(instructions)}"
    for pattern in ["CALL", *([lacks] if isinstance(lacks, str) else lacks)]:
        found = [i for i in instructions if re.match(pattern, i)]
        assert not found, f"{what} has {found[:3]}"
    return compiled


def sass(cubin: bytes) -> list[str]:
    """The instructions of a cubin in order, without predicates: "HMMA.16816.F32 R8, R4, R2, R8"."""
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][^;]*?)\s*;", disassembly(cubin))


def before_wait(cubin: bytes) -> set[str]:
    """The names of instructions reachable from a kernel's entry without passing griddepcontrol.wait.

    {"LDG.E", "UBLKCP.S.G", ...}. Both ways of every branch are followed, whatever its condition.
    """
    instructions: list[tuple[bool, str]] = []  # whether it has a predicate
    places: dict[str, int] = {}
    for line in disassembly(cubin).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(@!?\w+\s+)?([A-Z][^;]*?)\s*;", line):
            instructions.append((found[1] is not None, found[2]))
    # An instruction, and by barrier where lanes that wait for each other go on: BSSY says it, BSYNC goes there.
    seen: set[tuple[int, tuple[tuple[str, int], ...]]] = set()
    todo: list[tuple[int, tuple[tuple[str, int], ...]]] = [(0, ())]
    while todo:
        at, after = todo.pop()
        if (at, after) in seen or at >= len(instructions):
            continue
        predicated, instruction = instructions[at]
        if instruction.startswith("ACQBULK") and not predicated:
            continue
        seen.add((at, after))
        target = re.search(r"\.L_x_\d+", instruction)
        barrier = re.match(r"(BSSY|BSYNC)\S* (B\d+)", instruction)
        if barrier and target:
            after = tuple(sorted((dict(after) | {barrier[2]: places[target[0]]}).items()))
        elif barrier:
            todo.append((dict(after).get(barrier[2], at + 1), after))
        elif target is not None:
            todo.append((places[target[0]], after))
        # A branch with an operand as its condition, or one that waits for lanes to converge, may fall through.
        always = re.fullmatch(r"(EXIT|BRA `?\(?\.L_x_\d+\)?`?)", instruction) is not None
        if predicated or not always:
            todo.append((at + 1, after))
    return {instructions[at][1].split()[0] for at, _ in seen}


def count(cubin: bytes, pattern: str) -> int:
    """The number of instructions of a cubin that match `pattern` from their name on."""
    return sum(bool(re.match(pattern, instruction)) for instruction in sass(cubin))


def _names(instructions: list[str]) -> list[str]:
    return sorted({instruction.split()[0] for instruction in instructions})


@lru_cache(maxsize=64)
def disassembly(cubin: bytes) -> str:
    """The SASS of a cubin, of an earlier run if it was asked for before."""

    def disassemble(target: Path) -> None:
        code = target.with_name("kernel.cubin")
        code.write_bytes(cubin)
        text = subprocess.run([_tool(), "-c", str(code)], check=True, capture_output=True).stdout
        target.write_bytes(zlib.compress(text, 1))

    name = f"{kept.digest(cubin, _tool_version())}.sass"
    return zlib.decompress(kept.built(name, disassemble).read_bytes()).decode()


@cache
def _tool_version() -> bytes:
    return subprocess.run([_tool(), "--version"], check=True, capture_output=True).stdout


@cache
def _tool() -> str:
    """nvdisasm of the pip package, of the toolkit, or on the path."""
    candidates = [Path("/usr/local/cuda/bin/nvdisasm")]
    try:
        import nvidia

        candidates = [*(p / "cu13" / "bin" / "nvdisasm" for p in map(Path, nvidia.__path__)), *candidates]
    except ImportError:
        pass
    found = next((str(p) for p in candidates if p.is_file()), shutil.which("nvdisasm"))
    assert found, "no nvdisasm: pip install nvidia-cuda-nvdisasm"
    return found
