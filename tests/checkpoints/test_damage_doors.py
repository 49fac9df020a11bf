"""Damaged folders and files by commands that write, measure, explain or resume, judged as in test_damage.

``convert`` to every format, from anybit's folders, other tools' and GGUF files; ``info``, ``explain``, ``eval`` and
``generate`` of the same; calibration resumed from stored blocks.
"""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.cases_calibration import sequences
from tests.cases_damage import MUTATIONS, VALID, Damage, copy, save_gguf
from tests.cases_models import save_tiny
from tests.checkpoints.test_damage import ROUNDS, SEED, Run, bounded, folders, judged, outcome, spoilt
from tests.checkpoints.test_formats import whole_model

from anybit.errors import AnyBitError
from anybit.quantization.methods.registry import quantize_folder

__all__ = ["bounded", "folders"]  # fixtures

COUNTS = {"convert": 24, "ask": 20, "resume": 8}
OTHERS = ("gptq-4-asym", "awq-gemm-asym", "auto-round-gptq", "ct-w4g32-asym", "hqq-3", "bnb-nf4-nested", "ct-nvfp4")
TARGETS = ("anybit", "compressed-tensors", "gptq", "gguf")
NAMES = {*VALID, "config"}
"""Entries unrelated to tensors may be copied from the source's config.json as they are."""


@pytest.fixture
def output_of(run: Any) -> Run:
    """Run a command in this process; returns its output, or raises AnyBitError with its error message."""

    def command(*words: str) -> str:
        code, out, err = run(*words)
        assert "\x1b" not in out + err, err
        if code:
            assert "error:" in err and "Traceback" not in err, err
            raise AnyBitError(err)
        return str(out)

    return command


@pytest.fixture
def sources(folders: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Good models: anybit's, other tools', and a GGUF file."""
    pytest.importorskip("gguf")
    found = {name: folder for name, folder in folders.items() if name != "plain"}
    found |= {name: whole_model(name, tmp_path / name) for name in OTHERS}
    kinds = {"blk.0.ffn_up": "Q4_0", "blk.0.attn_q": "Q4_1", "output": "Q8_0"}
    return {**found, "gguf": save_gguf(tmp_path / "good.gguf", kinds=kinds)}


def written(place: Path) -> Any:
    """The tensors that convert has written, by name."""
    if place.is_file():
        import gguf

        return {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(place).tensors}
    return {
        name: (str(tensor.dtype), tensor.flatten().view(torch.uint8).numpy().tobytes())
        for file in sorted(place.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def test_convert_of_damaged_models(sources: dict[str, Path], tmp_path: Path, bounded: None, output_of: Run) -> None:
    def converted(source: Path, to: str) -> tuple[Any]:
        out = tmp_path / ("out.gguf" if to == "gguf" else "out")
        shutil.rmtree(out, ignore_errors=True)
        out.unlink(missing_ok=True)
        before = sorted(tmp_path.iterdir())
        try:
            output_of("convert", str(source), "--to", to, "-o", str(out))
        except AnyBitError:
            assert sorted(tmp_path.iterdir()) == before, "a refused conversion leaves files"
            raise
        return (written(out),)

    good = {}
    for name, source in sources.items():
        for to in TARGETS:
            try:
                good[name, to] = converted(source, to)
            except AnyBitError:  # a format that cannot hold the model
                good[name, to] = ()
    assert sum(map(bool, good.values())) > 15
    pairs = [*good, *([pair for pair, out in good.items() if out] * 4)]
    rng, results = random.Random(SEED), []
    groups = ("config", "index", "header", "tensors")
    for number in range(ROUNDS * COUNTS["convert"]):
        name, to = rng.choice(pairs)
        source, damage = spoilt(rng, sources[name], tmp_path / "damaged", groups, number)
        found = outcome(lambda source=source, to=to: converted(source, to), good[name, to])
        results.append((damage, f"{name} to {to}", *found))
    judged(results, NAMES)


def test_commands_on_damaged_models(sources, tmp_path, bounded, output_of) -> None:
    text = tmp_path / "text"
    text.write_text("1+2=3;(4*5)/6-7;" * 4)  # other tools' fixtures have 32 words
    commands: dict[str, tuple[str, ...]] = {
        "info": ("--json",),
        "explain": ("--m", "1", "--json"),
        "eval": ("--text", str(text), "--context", "32", "--windows", "1", "--device", "cpu", "--json"),
        "generate": ("--prompt", "1+2", "--raw", "--max-new-tokens", "3", "--device", "cpu", "--json"),
    }
    rng, results = random.Random(SEED), []
    good: dict[tuple[str, str], Any] = {}

    def asked(command: str, source: Path) -> tuple[Any]:
        found = json.loads(output_of(command, str(source), *commands[command]))
        return ({key: value for key, value in found.items() if key != "model" and "second" not in key},)

    for number in range(ROUNDS * COUNTS["ask"]):
        name, command = rng.choice(list(sources)), list(commands)[number % len(commands)]
        if (name, command) not in good:
            good[name, command] = asked(command, sources[name])
        source, damage = spoilt(rng, sources[name], tmp_path / "damaged", tuple(MUTATIONS), number)
        kind, detail = outcome(lambda source=source, command=command: asked(command, source), good[name, command])
        # The output of info and explain must be true of the damaged folder.
        kind = "same" if kind == "other" and command in ("info", "explain") else kind
        results.append((damage, f"{command} {name}", kind, detail))
    judged(results)


def spoil_memory(rng: random.Random, folder: Path) -> Damage:
    """Damage a calibration's stored blocks, in place."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    file, what = rng.choice(files), rng.choice(["byte", "cut", "empty", "swapped", "folder", "pipe", "longer", "gone"])
    data = bytearray(file.read_bytes())
    if what == "byte":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif what == "swapped":
        data = bytearray(rng.choice(files).read_bytes())
    elif what == "longer":
        data += b"\0" * 100
    else:
        data = data[: rng.randrange(len(data))] if what == "cut" else bytearray()
    file.unlink()
    if what == "folder":
        file.mkdir()
    elif what == "pipe":
        os.mkfifo(file)
    elif what != "gone":
        file.write_bytes(data)
    return Damage(f"memory: {what}", file.name)


def test_calibration_resumes_from_damaged_blocks(tmp_path: Path, bounded: None) -> None:
    source, tokens = tmp_path / "source", [(row % 96).tolist() for row in sequences(16)]
    save_tiny("llama-tied", source)

    def calibrated(memory: Path) -> tuple[Any]:
        options = {"sequences": tokens, "tokens": 300, "resume": memory}
        quantize_folder(source, tmp_path / "out", "w4a16g32", "gptq", overwrite=True, options=options)
        return (written(tmp_path / "out"),)

    good = calibrated(tmp_path / "good")
    rng, results = random.Random(SEED), []
    for _ in range(ROUNDS * COUNTS["resume"]):
        memory = copy(tmp_path / "good", tmp_path / "memory")
        damage = spoil_memory(rng, memory)
        results.append((damage, "gptq", *outcome(lambda memory=memory: calibrated(memory), good)))
    judged(results)
    assert sum(result == "same" for _, _, result, _ in results) > ROUNDS * COUNTS["resume"] // 2
