"""Damaged folders through every loader: each is refused with a message, loads unchanged, or is valid.

156 a run, and 44 in test_damage_doors.py; DAMAGE_ROUNDS=40 makes forty times as many of each (``make fuzz``).

Fails on a silently changed model, an exception without a clear message, more than 4 s, and 1 GB of memory.
"""

import collections
import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases_damage import MUTATIONS, UNREADABLE, VALID, Damage, copy, damage_gguf, damaged, save_gguf
from tests.cases_models import logits_of, save_byte_tokenizer
from tests.checkpoints.test_formats import whole_model
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging as transformers_logging

from anybit import AnyBitConfig
from anybit.errors import AnyBitError
from anybit.hf.loading import load_model
from anybit.quantization.methods.registry import quantize_folder

ROUNDS = int(os.environ.get("DAMAGE_ROUNDS", "1"))
OTHERS = ("gptq-4-asym", "awq-gemm-asym", "auto-round-gptq", "ct-w4g32-asym", "hqq-3", "bnb-nf4-nested", "fp8-blocks")
SECONDS = 4.0
BYTES = 1 << 30
SEED = int(os.environ.get("DAMAGE_SEED", "24"))
SCHEMES = {"packed": "w4a16g32", "sharded": "w3a16g32asym", "sparse": "w4a16g32s24", "plain": None}
Run = Callable[..., Any]


class _TooSlow(BaseException):
    """A load that takes too long; a BaseException, so that no error handler catches it."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Good folders: in compressed-tensors' format, sharded, in anybit's own format, and unquantized."""
    root = tmp_path_factory.mktemp("good")
    (root / "plain").mkdir()
    words = save_byte_tokenizer(root / "plain")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=words, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "plain")
    for name, scheme in SCHEMES.items():
        if scheme is not None:
            quantize_folder(root / "plain", root / name, scheme, shard_bytes=20_000 if name == "sharded" else 1 << 30)
    return {name: root / name for name in SCHEMES}


def by_load_model(folder: Path) -> Any:
    """Logits, and token ids of a text."""
    loaded = load_model(folder, device="cpu", scheme="w4a16g32" if is_plain(folder) else None)
    return logits_of(loaded.model), loaded.tokenizer("It is so.").input_ids


def by_from_pretrained(folder: Path) -> Any:
    """Load as a program that uses transformers does."""
    options = {"quantization_config": AnyBitConfig("w4a16g32")} if is_plain(folder) else {}
    return logits_of(AutoModelForCausalLM.from_pretrained(folder, **options)), None


def is_plain(folder: Path) -> bool:
    return folder.name.startswith("plain")


def outcome(load: Callable[[], Any], good: Any) -> tuple[str, str]:
    """(result, details): refused, theirs, same, other, raw, slow or memory."""
    peak, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    signal.setitimer(signal.ITIMER_PROF, 4 * SECONDS)
    try:
        result, detail = _compared(load, good)
    except _TooSlow:
        result, detail = "slow", "it did not end"
    except MemoryError as error:
        result, detail = "memory", str(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if time.process_time() - began > SECONDS:
        return "slow", f"{time.process_time() - began:.1f} s; {result} {detail}"
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
    return ("memory", f"{grown / 1e9:.1f} GB") if grown > BYTES else (result, detail)


def _compared(load: Callable[[], Any], good: Any) -> tuple[str, str]:
    try:
        found = load()
    except AnyBitError as error:
        text = str(error)
        return ("refused", text) if text.isprintable() and len(text) < 3000 else ("raw", f"unprintable: {text!r}")
    except Exception as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        ours = [name for name in frames if "/anybit/" in name and "/tests/" not in name]
        # What transformers refuses before asking anybit has its own wording.
        return ("raw" if ours else "theirs"), f"{type(error).__name__}: {error}"
    same = all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(found, good, strict=True))
    return ("same" if same else "other"), ""


@pytest.fixture
def bounded() -> Iterator[None]:
    """Limit the memory and time that a fault may take."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 6 * BYTES, before[1]))

    def stop(number: int, frame: object) -> None:
        raise _TooSlow

    handler = signal.signal(signal.SIGPROF, stop)
    yield
    signal.signal(signal.SIGPROF, handler)
    resource.setrlimit(resource.RLIMIT_AS, before)
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_progress_bar()


def judged(
    results: list[tuple[Damage, str, str, str]], allowed: Collection[str] = VALID, theirs: Collection[str] | None = ()
) -> None:
    """Fail for forbidden results, by kind; print all results.

    allowed: kinds after which another model may load.  theirs: kinds that transformers may refuse in its own words,
    before it asks anybit; None: any.
    """
    print(collections.Counter(result for _, _, result, _ in results))
    print(collections.Counter(damage.kind for damage, _, result, _ in results if result == "theirs"))
    wrong = [
        f"{result.upper():8} {name}: {damage.kind} ({damage.what}) {detail}"
        for damage, name, result, detail in results
        if result in ("raw", "slow", "memory")
        or (result == "other" and damage.kind not in allowed)
        or (result == "theirs" and theirs is not None and damage.kind not in theirs)
    ]
    assert not wrong, f"{len(wrong)} of {len(results)}, seed {SEED}\n" + "\n".join(wrong[:60])


def spoilt(rng: random.Random, source: Path, place: Path, groups: tuple[str, ...], number: int) -> tuple[Path, Damage]:
    """A damaged copy of a folder or GGUF file, and the mutation."""
    if source.is_file():
        shutil.copy(source, place := place.with_suffix(".gguf"))
        return place, damage_gguf(rng, place)
    return place, damaged(rng, copy(source, place), groups, number)


def fuzzed(
    load: Callable[[Path], Any], sources: dict[str, Path], tmp_path: Path, groups: Collection[str], count: int,
    theirs: Collection[str] | None = (), result: Callable[..., tuple[str, str]] = outcome,
) -> list[str]:  # fmt: skip
    """Load damaged copies of models, and judge the results, which it returns."""
    good = {name: load(source) for name, source in sources.items()}
    rng, results = random.Random(SEED), []
    for number in range(count):
        name = rng.choice(list(sources))
        place, damage = spoilt(rng, sources[name], tmp_path / f"{name}-damaged", tuple(groups), number)
        results.append((damage, name, *result(partial(load, place), good[name])))
    judged(results, theirs=theirs)
    return [found for _, _, found, _ in results]


def test_load_model_of_damaged_folders(folders: dict[str, Path], tmp_path: Path, bounded: None) -> None:
    fuzzed(by_load_model, folders, tmp_path, MUTATIONS, ROUNDS * 60)


def test_from_pretrained_of_damaged_folders(folders: dict[str, Path], tmp_path: Path, bounded: None) -> None:
    fuzzed(by_from_pretrained, folders, tmp_path, [*MUTATIONS][:-1], ROUNDS * 50, UNREADABLE)


def test_loading_damaged_folders_of_other_tools(tmp_path: Path, bounded: None) -> None:
    others = {name: whole_model(name, tmp_path / name) for name in OTHERS}
    fuzzed(by_load_model, others, tmp_path, ("config", "header", "tensors"), ROUNDS * 18)


@pytest.mark.parametrize("kinds", [{}, {"blk.0.ffn_up": "Q4_K", "blk.0.attn_q": "Q6_K", "output": "Q8_0"}])
def test_loading_damaged_gguf_files(tmp_path: Path, bounded: None, kinds: dict[str, str]) -> None:
    pytest.importorskip("gguf")
    file = save_gguf(tmp_path / "good.gguf", hidden=256 if kinds else 32, kinds=kinds)
    fuzzed(by_load_model, {"gguf": file}, tmp_path, (), ROUNDS * 10)
