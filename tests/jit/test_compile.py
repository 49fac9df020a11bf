"""jit.source and jit.compile: Config -> text -> machine code, with no GPU."""

import enum
import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from anybit import jit
from anybit.jit.params import layout_of
from anybit.jit.source import config_struct
from emulator import row_sums


class Layout(enum.Enum):
    rows = 0


@dataclass(frozen=True)
class Inner:
    stages: int = 3


@dataclass(frozen=True)
class Everything:
    tile: int = -2
    fast: bool = True
    slope: float = 0.1
    layout: Layout = Layout.rows
    element: str = "uint16_t"
    inner: Inner = Inner()


def test_config_becomes_constants() -> None:
    text = config_struct(Everything(), {"threads": 128})
    for line in (
        "static constexpr int tile = -2;",
        "static constexpr bool fast = true;",
        f"static constexpr float slope = {(0.1).hex()}f;",
        "static constexpr Layout layout = Layout::rows;",
        "using element = uint16_t;",
        "struct inner {     static constexpr int stages = 3; };",
        "static constexpr int threads = 128;",
    ):
        assert line in text


def test_kernels_are_values() -> None:
    one, two = row_sums.kernel(row_sums.Config()), row_sums.kernel(row_sums.Config())
    assert one is not two
    assert {one: 1}[two] == 1
    assert one != row_sums.kernel(row_sums.Config(128))
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert "_hash" not in again.__dict__


def test_the_page_on_kernels_shows_the_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "writing-kernels.md").read_text()
    host = Path(row_sums.__file__)
    for kind, example in (("cpp", host.with_suffix(".cuh").read_text()), ("python", host.read_text())):
        shown = page.partition(f"```{kind}\n")[2].partition("```")[0].rstrip(";\n")
        assert shown and shown in example, f"the first {kind} block of the page is not in the example:\n{shown}"


def test_config_refuses_what_has_no_form() -> None:
    @dataclass(frozen=True)
    class Bad:
        tiles: tuple[int, ...] = (1, 2)

    with pytest.raises(TypeError, match=r"tiles = \(1, 2\) has no C\+\+ form"):
        config_struct(Bad())
    with pytest.raises(ValueError, match="the kernel says tile = 4, its config says -2"):
        config_struct(Everything(), {"tile": 4})


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_compiles_without_gpu(arch: str) -> None:
    compiled = jit.compile(row_sums.kernel(row_sums.Config()), arch)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert 0 < compiled.registers < 64
    assert compiled.spill_bytes == compiled.stack_bytes == compiled.static_shared_bytes == 0
    assert "row_sums" in compiled.entry


def test_refusal_names_config_error_and_source() -> None:
    kernel = replace(row_sums.kernel(row_sums.Config()), shared_bytes=12)
    with pytest.raises(jit.CompileError, match="one chunk of floats a warp") as caught:
        jit.compile(kernel, "sm_90a")
    message = str(caught.value)
    assert "Config(columns_a_step=64)" in message
    kept = Path(message.partition("kept in ")[2].partition(";")[0])
    assert "row_sums<Config>" in kept.read_text()
    kept.unlink()


def test_twins_must_agree() -> None:
    @dataclass(frozen=True)
    class Params:
        x: jit.Pointer
        y: jit.Pointer
        columns: jit.Int32
        rows: jit.Int32
        scale: jit.Float32

    kernel = replace(row_sums.kernel(row_sums.Config()), params=Params)
    with pytest.raises(jit.CompileError, match="Params::columns is not at byte 16"):
        jit.compile(kernel, "sm_90a")


def test_params_are_those_of_the_header(tmp_path: Path) -> None:
    header = tmp_path / "some.cuh"
    header.write_text(
        "struct Params {\n    const ptx::TensorMap map;  // of x\n    const int8_t* x;\n    int rows, columns;\n\n"
        "    DEVICE int size() const {\n        int all = rows;\n        return all;\n    }\n};\n"
        "struct Odd : Params {\n    double y;\n};\n"
    )

    class Params(jit.Params, header=str(header)):
        pass

    assert [field.offset for field in layout_of(Params).fields] == [0, 128, 136, 140]
    with pytest.raises(TypeError, match=r"Odd of .* has double y: use a pointer or int, int32_t"):

        class Odd(Params, header=str(header)):
            pass

    with pytest.raises(TypeError, match="has no struct Other"):

        class Other(jit.Params, header=str(header)):
            pass


def test_missing_instruction_is_a_sentence(tmp_path: Path) -> None:
    header = tmp_path / "late.cuh"
    header.write_text(
        '#include "common/ptx/base.cuh"\nstruct Params { const void* x; void* y; int rows, columns; float scale; };\n'
        "template <class Config> __global__ void late(const __grid_constant__ Params p) { ptx::fence_proxy_async(); }\n"
    )
    kernel = replace(row_sums.kernel(row_sums.Config()), header=str(header), entry="late")
    assert jit.compile(kernel, "sm_90a").registers > 0
    with pytest.raises(jit.CompileError, match="the async proxy needs sm_90 or later"):
        jit.compile(kernel, "sm_86")
