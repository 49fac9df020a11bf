"""A model's kernel choices, stored on disk: a second process reads them, and chooses nothing again."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anybit.choose import dispatch
from anybit.choose.builtin import builtin_layout
from anybit.choose.dispatch import Dispatcher, dispatcher, use
from anybit.choose.families import FAMILIES
from anybit.choose.policy import SHIPPED
from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import Kernel
from anybit.jit.cache import clear_memory, keep_note
from anybit.kernels.linear_problem import LinearProblem
from anybit.layers.functional import quantize
from anybit.ops import compile_ahead as ahead
from anybit.ops import kept_choices
from anybit.scheme import Scheme

H200 = Device.named("sm_90a")
SCHEMES = ("w4a16g128", "w4a8", "w2a2", "w4a16g64s24", "w3a16g64asym", "w4a8fp")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ANYBIT_CACHE_DIR", str(tmp_path / "kernels"))
    clear_memory()
    use()
    yield tmp_path / "kernels"
    clear_memory()
    use()


def problems() -> list[LinearProblem]:
    forms = [Scheme.parse(text) for text in SCHEMES]
    return [LinearProblem(m, 6144, 4096, one.weights, one.activations) for one in forms for m in (1, 40, 1000)]


def chosen(by: Dispatcher) -> list[tuple[Kernel, ...]]:
    """The kernels of each problem, chosen by a dispatcher."""
    return [tuple(by.kept(one, builtin_layout(one)).candidate.kernels(one)) for one in problems()]


def test_another_process_reads_what_this_one_chose() -> None:
    """Its strings have other hashes, and it must find every choice by an equal problem."""
    by = Dispatcher("NVIDIA H200", dispatch._files("NVIDIA H200"))
    kernels = chosen(by)
    kept_choices.write("chosen-x", kept_choices.Chosen([one for some in kernels for one in some], by.choices))
    code = (
        "import test_kept_choices as t\n"
        "from anybit.ops.kept_choices import read; from anybit.choose.dispatch import *\n"
        "by, kept = Dispatcher('NVIDIA H200', []), read('chosen-x'); by.choices.update(kept.choices)\n"
        "by.choose = None; found = [one for some in t.chosen(by) for one in some]\n"
        "assert found == kept.kernels and len(set(found + kept.kernels)) == len(set(found)); print(len(found))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{sum(map(len, kernels))}\n", done.stderr


def test_an_entry_makes_values_and_calls_nothing(tmp_path: Path, folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "called",)

    for content in (pickle.dumps(([], Evil())), pickle.dumps(([KernelError("x")], {})), b"", b"\x80\x05K\x01."):
        keep_note("chosen-x", content)
        assert kept_choices.read("chosen-x") is None
    assert not (tmp_path / "called").exists()
    keep_note("chosen-x", pickle.dumps(([], {})))
    assert kept_choices.read("chosen-x") == ([], {})
    (entry,) = folder.glob("chosen-x*")
    entry.write_bytes(entry.read_bytes()[:-1] + b"x")
    assert kept_choices.read("chosen-x") is None, "damaged"
    entry.chmod(0o666)
    assert kept_choices.read("chosen-x") is None, "anybody could have written it"


def test_an_entry_is_of_a_gpu_its_layers_and_no_maps_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        kept_choices.name_of(layers, most, device)
        for layers in (["a"], ["b"], ["a", "b"])
        for most in (64, 128)
        for device in (H200, Device.named("sm_80"))
    }
    assert len(names) == 12 and None not in names
    before = kept_choices.name_of(["a"], 64, H200)
    monkeypatch.setattr(kept_choices, "_build", lambda: b"another build")
    assert kept_choices.name_of(["a"], 64, H200) != before
    use(SHIPPED / "nvidia-h200.json")
    assert kept_choices.name_of(["a"], 64, H200) is None


def test_a_second_load_asks_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, one = [], problems()[0]
    kernel = FAMILIES["sm90_packed_gemv"].module.kernel(
        dispatcher(H200.name).kept(one, builtin_layout(one)).candidate.config
    )

    def call(kind: Any, tensors: Any, tokens: int) -> None:
        asked.append(tokens)

    def kernels_of(call_all: Any) -> list[Kernel]:
        call_all()
        return [kernel]

    monkeypatch.setattr(ahead, "_call", call)
    monkeypatch.setattr(ahead.jit, "kernels_of", kernels_of)
    monkeypatch.setattr(ahead, "make_ready", lambda kernels, *_: kernels)
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: H200))
    kind = ahead.LayerKind("packed 6144 4096 w4a16g128", torch.float16, False)
    tensors, other = [torch.zeros(4)], [torch.zeros(8)]
    assert ahead.compile_ahead({kind: tensors}, 512) == [kernel] and asked
    asked.clear()
    use()
    assert ahead.compile_ahead({kind: tensors}, 512) == [kernel] and not asked
    assert one in [product for product, *_ in dispatcher(H200.name).choices]
    assert ahead.compile_ahead({kind: other}, 512) == [kernel] and asked, "another layer"


def test_one_of_several_products_before_turned_heads() -> None:
    """Queries, keys and values of different formats are several products; the rotary kernel takes all their outputs."""
    values = quantize(torch.randn(128, 256), "w4a16g128")
    kind = ahead.LayerKind(values.spec_text, torch.float16, False, heads=(4, 2, 64, False))
    ahead._call(kind, values.tensors, 3)


def test_a_map_that_may_not_be_read_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of root's; dispatchers report ignoring it."""

    def refuse(self: Path, *arguments: Any, **options: Any) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    kept_choices._build()
    expected = kept_choices.name_of(["a"], 8, H200)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "is_file", refuse)
    assert kept_choices.name_of(["a"], 8, H200) == expected
