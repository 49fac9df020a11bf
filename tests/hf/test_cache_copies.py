"""Copies of KV caches: transformers' recipe for a shared prompt fills one cache and copies it for each question."""

import copy
import os
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import transformers as hf

import anybit
from anybit import AnyBitCache
from anybit.cache.attention import decode
from anybit.cache.kvcache import KVCache
from cases_cache import GATED, GREEDY, folder_of, model_of, prompt, quantized


def saved(cache, folder):
    torch.save(cache, folder / "cache.pt")
    return torch.load(folder / "cache.pt", weights_only=False)


HOW = {
    "deepcopy": lambda cache, _: copy.deepcopy(cache),
    "copy": lambda cache, _: copy.copy(cache),
    "pickle": lambda cache, _: pickle.loads(pickle.dumps(cache)),
    "save": saved,
}


def answer(model, cache, question):
    """Logits after a question and four more tokens."""
    logits = [model(question, past_key_values=cache).logits[:, -1]]
    for _ in range(4):
        logits.append(model(logits[-1].argmax(-1, keepdim=True), past_key_values=cache).logits[:, -1])
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("name", "format", "attention", "static", "how"),
    [
        *(("llama", "kv8", "anybit", False, how) for how in HOW),
        *(("llama", "kv4", "anybit", True, how) for how in HOW),
        ("gemma3", "kv4", "anybit", True, "deepcopy"),  # sliding windows
        ("gpt_oss", "kv2g32", "anybit", False, "copy"),  # sinks
        ("opt", "kv4rot", "anybit", True, "save"),
        ("qwen3", "k4v2g32", "sdpa", False, "pickle"),
    ],
)
@torch.no_grad()
def test_a_copy_is_an_independent_cache(name, format, attention, static, how, tmp_path):
    model = model_of(name, attention, spread=0.2)
    ids, *asked = (torch.randint(1, 97, (2, n)) for n in (120, 3, 9))

    def filled():
        cache = AnyBitCache(format, config=model.config, capacity=256, static=static)
        model(ids, past_key_values=cache)
        return cache

    expected = [answer(model, filled(), question) for question in asked]
    first = filled()
    copies = [HOW[how](first, tmp_path) for _ in asked]
    found = [answer(model, cache, question) for cache, question in zip(copies, asked, strict=True)]
    assert first.get_seq_length() == 120
    assert torch.equal(answer(model, first, asked[0]), expected[0])
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one, wanted)
    again = HOW[how](copies[1], tmp_path)
    wanted = answer(model, copies[1], asked[0])
    del first, copies  # the look-up of a lost cache raised LayerError
    assert torch.equal(answer(model, again, asked[0]), wanted)


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_each_question_about_a_shared_prompt(how, tmp_path):
    """By generate, of an accelerated model whose scheme names the KV format."""
    model = quantized(
        folder_of(hf.LlamaConfig(**GATED, bos_token_id=None, eos_token_id=None), tmp_path), "w4a16g32-kv4"
    )
    assert anybit.accelerate(model)
    ids = prompt(1) % 97
    questions = [torch.cat((ids, torch.full((1, n), n, device=ids.device)), 1) for n in (2, 5)]

    def filled(static):
        call = {"cache_implementation": "static"} if static else {}
        return model.generate(ids, **GREEDY | {"max_new_tokens": 1, "min_new_tokens": 1}, **call,
                              return_dict_in_generate=True).past_key_values  # fmt: skip

    for static in (False, True):
        expected = [model.generate(question, **GREEDY, past_key_values=filled(static)) for question in questions]
        cache = filled(static)
        for question, wanted in zip(questions * 2, expected * 2, strict=True):
            assert torch.equal(model.generate(question, **GREEDY, past_key_values=HOW[how](cache, tmp_path)), wanted)
        assert cache.get_seq_length() == ids.shape[1]
    assert model.config._attn_implementation == "sdpa"


ELSEWHERE = """
import sys, torch
from anybit import AnyBitCache
from anybit.cache.kvcache import KVCache
from cases_cache import model_of
from test_cache_copies import answer
other = KVCache("kv4", layers=1, kv_heads=1, head_dim=64, sequences=1, capacity=64)  # takes the first number
model = model_of("llama", "anybit", spread=0.2)
with torch.no_grad():
    cache = torch.load(sys.argv[1], weights_only=False)
    torch.save(answer(model, cache, torch.arange(1, 8)[None]), sys.argv[1])
assert other.lengths.tolist() == [0]
"""


@torch.no_grad()
def test_a_cache_goes_on_in_another_process(tmp_path):
    model = model_of("llama", "anybit", spread=0.2)
    cache = AnyBitCache("kv4", config=model.config)
    model(torch.arange(90)[None], past_key_values=cache)
    torch.save(cache, file := tmp_path / "cache.pt")
    subprocess.run(
        [sys.executable, "-c", ELSEWHERE, file],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])},
    )
    assert torch.equal(torch.load(file), answer(model, cache, torch.arange(1, 8)[None]))


def test_copies_follow_the_attention_of_their_model() -> None:
    model = model_of("llama", "anybit")
    cache = AnyBitCache("kv4", config=model.config)
    both, alone = copy.deepcopy((model, cache)), copy.deepcopy(cache)
    model.set_attn_implementation("sdpa")
    assert not alone.packed_attention and both[1].packed_attention and both[1].config is both[0].config


@torch.no_grad()
def test_what_inference_mode_made_can_be_written_outside_it() -> None:
    """A copy, and a cache that grew."""
    model = model_of("llama", "anybit", spread=0.2)
    asked = torch.arange(1, 8)[None]
    cache, plain = (AnyBitCache("kv4", config=model.config) for _ in range(2))
    with torch.inference_mode():
        model(asked, past_key_values=cache)
        cache.store.grow(3, 4096)
        copied = copy.deepcopy(cache)
    model(asked, past_key_values=plain)
    wanted = answer(model, plain, asked)
    assert torch.equal(answer(model, copied, asked), wanted) and torch.equal(answer(model, cache, asked), wanted)


def test_a_cache_in_shared_memory_becomes_its_own() -> None:
    """As torch.multiprocessing hands it over."""
    cache = KVCache("kv4", layers=1, kv_heads=1, head_dim=64, sequences=1, capacity=256)
    cache.pages.share_memory_()
    assert not copy.deepcopy(cache).pages.is_shared()
    received = ForkingPickler.loads(ForkingPickler.dumps(cache))
    received.pages.fill_(1)
    assert not cache.pages.any()


@pytest.mark.parametrize("how", HOW)
def test_copy_of_a_cache_shares_no_ledger(how, tmp_path) -> None:
    cache = KVCache("kv4", layers=1, kv_heads=1, head_dim=64, sequences=2, capacity=512)
    for length in (200, 100):
        cache.extend([cache.add()], length)
        new = torch.randn(1, length, 1, 64).half()
        cache.write(0, [int(length == 100)], new, new)
    cache.reorder([0, 1], [0, 0])
    other, ledger = HOW[how](cache, tmp_path), HOW[how](cache.ledger, tmp_path)
    q = torch.randn(2, 1, 2, 64).half()
    wanted = decode(q, cache, 0, [0, 1])[0]
    for freed in (other, ledger, HOW[how](cache.ledger.pool, tmp_path)):
        freed.exchange(0, (), [0]) if not hasattr(freed, "free") else freed.free(0)
    assert cache.length(0) == 200 and cache.ledger.pool.references[0] == 2
    assert torch.equal(decode(q, cache, 0, [0, 1])[0], wanted)
    assert torch.equal(decode(q[:1], other, 0, [1])[0], decode(q[:1], cache, 0, [1])[0])
