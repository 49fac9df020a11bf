"""anybit explain and anybit tune on the command line, without a GPU."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.cases_damage import save_gguf
from tests.cases_models import save_tiny
from tests.checkpoints.test_gguf_blocks import MIXED

from anybit.checkpoints import source
from anybit.choose import dispatch as dispatching
from anybit.choose.builtin import builtin
from anybit.choose.policy import Measured, Origin, Point, Policy, save
from anybit.choose.space import GRID, STEPS, space
from anybit.kernels.linear_problem import LinearProblem
from anybit.quantization.methods.registry import quantize_folder
from anybit.scheme import Scheme
from anybit.tune.search import Options

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="explains the GPU that is present")


def empty(gpu: str = "NVIDIA H200") -> Policy:
    return Policy(Origin.here(gpu, "sm_90a", "575.1", "2.11"))


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    parsed = Scheme.parse("w3a3")
    one = LinearProblem(64, 4096, 14336, parsed.weights, parsed.activations)
    other = next(c for c in space(one).candidates if c.kernel == "sm90_bitplane_skinny")
    found = {"bitwise": Measured.of(other, 15.0), "padding to int8": Measured.of(builtin(one), 12.5)}
    policy = empty()
    policy.put(one, Point(12.5, found))
    save(policy, tmp_path / "map.json")
    return tmp_path / "map.json"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a model, where torch sees a GPU."""
    save_tiny("llama", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return str(tmp_path)


def test_explains_a_shape(measured: Path, run: Any) -> None:
    words = ("explain", "4096,14336", "--scheme", "w3a3", "-m", "64", "--policy", str(measured))
    code, out, _ = run(*words)
    dispatching.use()
    assert code == 0
    assert "runs       padding to int8: sm90_packed_gemm(" in out
    assert "12.50 us" in out
    assert "runner-up  bitwise, 15.00 us (20% slower)" in out
    assert "driver 575.1" in out
    assert "not        split: 4-bit integer products are emulated" in out
    code, out, _ = run(*("explain", "64,64", "-s", "w4a16g64", "-m", "4"))
    lines = [line for line in out.splitlines() if line.startswith("  not ")]
    assert len(lines) == len(set(lines))
    code, out, _ = run(*words, "-m", "1", "--json")
    dispatching.use()
    first, second = json.loads(out)["products"]
    assert (first["us"], first["strategy"], second["us"]) == (12.5, "padding to int8", None)
    assert second["why"].startswith("its expected time is the least, by the times of w")


def test_explains_every_layer_of_a_model(tmp_path, run) -> None:
    code, out, _ = run("explain", str(save_tiny("llama", tmp_path)), "-s", "w4a16g128", "-m", "3")
    assert code == 0
    shapes = {"128 x 64", "64 x 64", "192 x 64", "64 x 96", "32 x 64", "96 x 64"}  # joined, and one by one
    assert {
        line.split(" x ", 1)[1].split(" on ")[0] for line in out.splitlines() if " on NVIDIA H200" in line
    } == shapes


@pytest.mark.parametrize(
    ("ranks", "qkv", "o", "gate_up", "down"),
    [
        (2, "w4a16g128 1 x 256 x 256", "w4a16g128 1 x 256 x 128", "w4a16g128 1 x 512 x 256", "w4a16g128 1 x 256 x 256"),
        (4, "w4a16g128 1 x 192 x 256", "w4a16g64 1 x 256 x 64", "w4a16g128 1 x 256 x 256", "w4a16g128 1 x 256 x 128"),
    ],
)
def test_explains_the_parts_of_tensor_parallel_ranks(run, ranks, qkv, o, gate_up, down, tmp_path) -> None:
    """Each of four ranks has one of two KV heads; o's groups are split in two."""
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    words = "explain", str(tmp_path), "-s", "w4a16g128", "-m", "1", "--tensor-parallel"
    code, out, _ = run(*words, str(ranks))
    said = {line.split(" on ")[0] for line in out.splitlines() if " on NVIDIA H200" in line}
    assert code == 0 and {qkv, o, gate_up, down} <= said
    code, _, err = run(*words, "3")
    assert code == 1 and "--tensor-parallel 3: so many ranks cannot share the 256 outputs of model.layers.0" in err


def test_explains_each_layer_in_its_own_scheme(tmp_path, run, monkeypatch) -> None:
    """For a recipe, and for a GGUF file, whose blocks are not read."""
    overrides = {"*.v_proj": "w6a16g64", "lm_head": "w8a16"}
    quantize_folder(save_tiny("llama", tmp_path / "source"), tmp_path / "recipe", "w4a16g32", overrides=overrides)
    code, out, _ = run("explain", str(tmp_path / "recipe"), "-m", "1")
    said = [line.split(" on ")[0].split(" 1 x ") for line in out.splitlines() if " on NVIDIA" in line]
    of_scheme = {scheme: [shape for one, shape in said if one == scheme] for scheme, _ in said}
    assert code == 0 and of_scheme["w6a16g64"] == ["32 x 64"] and len(of_scheme["w8a16"]) == 1
    assert "96 x 64" in of_scheme["w4a16g32"]  # q_proj and k_proj, which are still one product
    monkeypatch.setattr(source, "dequantize_gguf", None)
    file = save_gguf(tmp_path / "model.gguf", 256, 2, MIXED)
    code, out, _ = run("explain", str(file), "-m", "1")
    assert code == 0 and "w6a16g16 1 x 128 x 256 on" in out and "w3a16g16 1 x 256 x 512 on" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explain", "4096,4096"), "the shape 4096,4096 needs a scheme"),
        (("explain", "4096,4096", "-s", "w9a8"), "w9a8"),
        (("explain", "64,64", "-s", "w4a8", "--tensor-parallel", "2"), "name a model, or the shape of a part"),
        (("explain", "nothing here", "-s", "w4a8"), "neither a folder"),
        (("explain", "64,64", "-s", "w4a8fps24"), "2:4 sparse weights are multiplied by integers"),
        (("explain", "64,64", "-s", "w4a8g32-xasym"), "sm90_bitplane_gemm: bit planes need one scale a row"),
        (("explain", "64,64", "-s", "w4a1g32"), "the reference does, slowly, after anybit.ops.allow_fallback()"),
    ],
)
def test_says_what_is_wrong(words, said, run) -> None:
    code, _, err = run(*words)
    assert code == 1
    assert said in err


def test_tuning_overwrites_no_file_that_is_no_map(tmp_path, measured, run, monkeypatch) -> None:
    (tmp_path / "notes.json").write_text("[1, 2]")
    for file, gpu, said in (
        (tmp_path / "notes.json", True, "notes.json is not a valid policy map: its format is not"),
        (Path("/proc/none/map.json"), True, "/proc/none/map.json cannot be written: No such file or directory"),
        (measured, False, "anybit tune measures on an NVIDIA GPU"),
        (tmp_path / "new" / "map.json", False, "anybit tune measures on an NVIDIA GPU"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        code, _, err = run("tune", "model", "-s", "w4a8", "-o", str(file))
        assert code == 1
        assert said in err
    assert (tmp_path / "notes.json").read_text() == "[1, 2]"
    assert not (tmp_path / "new").exists(), "nothing is created if nothing is measured"


def test_tuning_takes_coarse_counts_first_and_ends_in_time(model, tmp_path, run, monkeypatch) -> None:
    parts: list[tuple[set[int], float]] = []

    def search(products: Sequence[LinearProblem], path: object, options: Options, **_: object) -> Policy:
        parts.append(({product.m for product in products}, options.seconds))
        return empty()

    monkeypatch.setattr("anybit.tune.search.search", search)
    words = ("tune", model, "-o", str(tmp_path / "map.json"), "--most-tokens", "128")
    assert run(*words, "-s", "w4a8")[0] == 0
    (coarse, most), (fine, rest) = parts
    assert coarse == {m for m in GRID if m <= 128} and fine == {m for m in STEPS if m <= 128} - coarse
    assert 260 < rest <= most <= 270
    code, _, err = run(*words, "-s", "w4a8", "--seconds", "0")
    assert code == 0 and "0 s were up: run the same command again to measure the rest" in err
    assert run(*words, "-s", "w4a8", "--exhaustive")[0] == 0
    assert parts[-1][1] == float("inf")
    run(*words, "-s", "w4a16g32")
    assert min(parts[-2][0]) == 1


def test_interrupted_tuning_says_how_to_go_on(model, tmp_path, run, monkeypatch) -> None:
    def search(*_: object, **__: object) -> Policy:
        raise KeyboardInterrupt

    monkeypatch.setattr("anybit.tune.search.search", search)
    code, _, err = run("tune", model, "-s", "w4a8", "-o", str(tmp_path / "map.json"))
    assert code == 130 and "what was measured is kept, and the same command goes on" in err


@pytest.mark.parametrize(
    ("stored", "runs"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")]
)
def test_tuning_measures_in_the_dtype_that_the_model_runs_in(stored, runs, model, tmp_path, run, monkeypatch) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": stored}))
    seen: set[torch.dtype] = set()

    def search(products: Sequence[LinearProblem], *_: object, **__: object) -> Policy:
        seen.update(product.dtype for product in products)
        return empty()

    monkeypatch.setattr("anybit.tune.search.search", search)
    words = ("tune", model, "-o", str(tmp_path / "map.json"), "--most-tokens", "16", "-s", "w4a16g32")
    assert run(*words)[0] == 0
    assert seen == {getattr(torch, runs)}
    assert run(*words, "--dtype", "float16")[0] == 0
    assert seen == {getattr(torch, runs), torch.float16}
    code, _, err = run(*words, "--dtype", "float32")
    assert code == 1 and "--dtype must be one of float16, bfloat16, not 'float32'" in err


def test_explains_the_dtype_that_is_asked_for(tmp_path, run) -> None:
    parsed = Scheme.parse("w3a16")
    one = LinearProblem(64, 4096, 14336, parsed.weights, parsed.activations, torch.bfloat16)
    policy = empty()
    policy.put(one, Point(12.5, {"dequantize": Measured.of(builtin(one), 12.5)}))
    save(policy, tmp_path / "map.json")
    words = ("explain", "4096,14336", "-s", "w3a16", "-m", "64", "--policy", str(tmp_path / "map.json"), "--json")
    found = [json.loads(run(*words, *more)[1]) for more in ((), ("--dtype", "bfloat16"))]
    dispatching.use()
    assert [one["products"][0]["us"] for one in found] == [None, 12.5]


def test_tuning_replaces_no_map_of_another_gpu_and_says_in_a_log_where_it_is(
    model, tmp_path, measured, run, monkeypatch
):
    gpu = "NVIDIA H100"

    def search(products: Sequence[LinearProblem], path: Any, options: Options, report: Any, **_: object) -> Policy:
        path(gpu)
        report(str(products[0]), 3, 40, 75.0)
        return empty(gpu)

    monkeypatch.setattr("anybit.tune.search.search", search)
    monkeypatch.setattr("anybit.cli.common._SAY_SECONDS", -1.0)
    words = ("tune", model, "-s", "w4a8", "--most-tokens", "1", "-o")
    before = measured.read_text()
    code, _, err = run(*words, str(measured))
    assert code == 1 and "map.json was measured on NVIDIA H200, and this is NVIDIA H100: choose another file" in err
    assert measured.read_text() == before
    code, _, err = run(*words, str(tmp_path / "another.json"))
    assert code == 0 and "3 of 40: w4a8 1 x 128 x 64, 75 s left" in err
    assert run(*words, str(tmp_path / "another.json"), "--seconds", "-1")[0] == 2
