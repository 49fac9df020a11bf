"""First prompts padded to a graph's length: the padding changes no token, and nothing of it stays in the cache."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

import anybit
from anybit import AnyBitCache
from anybit.cache import attention
from anybit.errors import LayerError
from anybit.hf import graph, step_graph
from cases_cache import SIZES, folder_of
from cases_cache import prompt as on_device


class OnGPU(torch.Tensor):
    """Tokens that say they are on a GPU; what is made of them does not."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


def prompt(rows, tokens):
    return on_device(rows, tokens).cpu()


def quantized(folder, scheme):
    config = anybit.AnyBitConfig(scheme)
    return hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(hf.LlamaConfig(**{**SIZES, "max_position_embeddings": 1024}), tmp_path_factory.mktemp("llama"))


FIRST_STEPS = graph.StepGraph._first_steps


@pytest.fixture
def model(folder, request, monkeypatch):
    """A fused model on the CPU, whose prompts and steps run as their graphs would, without capture."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graph.StepGraph, "_first_steps", lambda self: setattr(self, "logits", self._run()))
    monkeypatch.setattr(attention, "attend_prompts", attend_exactly)
    made = anybit.fuse(quantized(folder, getattr(request, "param", "w4a16g32")))
    made.set_attn_implementation("anybit")
    return made


def attend_exactly(q, k, v, masks):
    """``attention.attend_prompts`` in float64: torch's rounds rows otherwise if there are more behind them."""
    wide = [x.double() for x in (q, k, v)]
    return torch.stack(
        [attention.attend(a, b.transpose(0, 1), c.transpose(0, 1), masks)[0] for a, b, c in zip(*wide, strict=True)]
    ).to(q.dtype)


def cache_of(model, kv="kv16", rows=1, **options):
    """A static cache that held other tokens before."""
    cache = AnyBitCache(kv, config=model.config, capacity=1024, static=True, **options)
    with torch.no_grad():
        model(torch.full((rows, 300), 5), past_key_values=cache)
    cache.reset()
    return cache


@torch.inference_mode()
def logits_of(model, cache, ids, steps=0, **call):
    """Logits after a prompt, and of greedy steps behind it: [rows, 1 + steps, vocabulary]."""
    made = [model(input_ids=ids, past_key_values=cache, logits_to_keep=1, **call).logits]
    for _ in range(steps):
        made.append(model(made[-1][:, -1:].argmax(-1), past_key_values=cache).logits)
    return torch.cat(made, 1)


@pytest.mark.parametrize("kv", ["kv16", "kv4", "k4v2g32"])
@pytest.mark.parametrize("model", ["w4a16g32", "w4a8", "w2a2"], indirect=True)
def test_padding_changes_nothing(model, kv):
    exact, padded = cache_of(model, kv), cache_of(model, kv)
    for tokens in (1, 31, 32, 119, 127, 128, 129, 603):
        ids = prompt(1, tokens)
        wanted = logits_of(model, exact, ids, steps=12)
        found = logits_of(model, padded, ids.as_subclass(OnGPU), steps=12, attention_mask=torch.ones_like(ids))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))
        assert padded.seen == exact.seen == tokens + 12
        for one, other in zip(padded.store.ledger.entries, exact.store.ledger.entries, strict=True):
            assert (one.length, len(one.pages)) == (other.length, len(other.pages)) and one.oldest <= other.oldest
        assert torch.equal(padded.store.lengths, exact.store.lengths)
        assert torch.equal(padded.store.table < 0, exact.store.table < 0)
        padded.reset()
        exact.reset()
    assert set(model._anybit_decoder.prompts[padded]) == {0, 32, 128, 160}
    assert exact not in model._anybit_decoder.prompts


def test_rows_of_one_length(model):
    exact, padded, ids = cache_of(model, rows=3), cache_of(model, rows=3), prompt(3, 119)
    wanted = logits_of(model, exact, ids, steps=12)
    found = logits_of(model, padded, ids.as_subclass(OnGPU), steps=12, position_ids=torch.arange(119)[None])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert 128 in model._anybit_decoder.prompts[padded]


def test_padding_says_nothing_of_earlier_prompts(model):
    """Attention multiplies what is masked by zero, which leaves NaN as it is."""
    cache, ids = cache_of(model), prompt(1, 20).clamp(max=120)
    bad = prompt(1, 31).clamp(max=120)
    bad[0, -1] = 127
    model.model.embed_tokens.weight.data[127] = torch.nan
    for asked in (ids, bad, ids):
        answer = logits_of(model, cache, asked.as_subclass(OnGPU), position_ids=torch.arange(asked.shape[1])[None])
        assert bool(answer.isfinite().all()) is (asked is ids)
        cache.reset()
    (graph,) = model._anybit_decoder.prompts[cache].values()
    assert torch.equal(graph.ids[0], torch.cat((ids[0], ids[0, -1:].expand(12))))
    assert torch.equal(graph.positions[0], torch.arange(32).clamp(max=19))


def test_prompts_that_are_not_captured_keep_one_buffer(model):
    cache = cache_of(model, rows=2)
    for tokens in (513, 544, 545, 700, 513):
        logits_of(model, cache, prompt(2, tokens).as_subclass(OnGPU))
        assert cache.seen == tokens
        cache.reset()
    (graph,) = model._anybit_decoder.prompts[cache].values()
    assert graph.ids.shape == graph.positions.shape == (2, 544)


def test_a_pass_that_fails_leaves_the_cache_as_it_was(model, monkeypatch):
    cache, ids = cache_of(model, "kv4"), prompt(1, 140)
    wanted = logits_of(model, cache, ids, steps=2)
    cache.reset()
    with monkeypatch.context() as patch:
        patch.setattr(type(model.model.layers[1]), "_head_norms", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits_of(model, cache, ids.as_subclass(OnGPU))
    assert cache.seen == cache.store.length(0) == 0
    found = logits_of(model, cache, ids.as_subclass(OnGPU), steps=2)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    cache.reset()
    with pytest.raises(LayerError, match=r"^1025 tokens do not fit a static AnyBitCache of 1024"):
        logits_of(model, cache, prompt(1, 1025).as_subclass(OnGPU))
    assert cache.seen == 0


def test_graphs_over_a_callers_cache_are_forgotten_with_the_weights_that_they_read(model):
    cache, ids, decoder = cache_of(model), prompt(1, 9).as_subclass(OnGPU), model._anybit_decoder

    def made():
        logits_of(model, cache, ids)
        model(input_ids=ids[:, :1].as_subclass(OnGPU), past_key_values=cache)
        cache.reset()
        return decoder.prompts[cache][32], decoder.graphs[cache]

    with torch.no_grad():
        first = made()
        assert made() == first
        head = model.lm_head
        for weight in (head.weight.data.clone(), head.weight.data):
            head.weight = torch.nn.Parameter(weight, requires_grad=False)
            second = made()
            assert not set(first) & set(second)
            assert made() == second
            first = second


def test_checked_kernels_are_not_captured(model, monkeypatch):
    """They report to the host, which would invalidate a capture."""
    cache, ids = cache_of(model), prompt(1, 9).as_subclass(OnGPU)
    stream = SimpleNamespace(wait_stream=lambda other: None, device=None)
    captures = []
    for name, fake in (("Stream", stream), ("current_stream", stream), ("CUDAGraph", SimpleNamespace(replay=list))):
        monkeypatch.setattr(torch.cuda, name, lambda *_, fake=fake: fake)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(step_graph, "capture", lambda *_: contextlib.nullcontext(captures.append(1)))
    monkeypatch.setattr(graph.StepGraph, "_first_steps", FIRST_STEPS)
    for debug, expected in (("1", 0), ("1", 0), ("0", 1)):
        monkeypatch.setenv("ANYBIT_DEBUG", debug)
        logits_of(model, cache, ids)
        cache.reset()
        assert len(captures) == expected


def test_what_is_no_first_prompt_runs_eagerly(model):
    decoder, ids = model._anybit_decoder, prompt(1, 9).as_subclass(OnGPU)

    def graph_of(cache, ids=ids, **kwargs):
        cache.config._attn_implementation = "anybit"
        with torch.inference_mode():
            return decoder.graph(cache, ids, {"input_ids": ids, "logits_to_keep": 1, **kwargs})

    cache, padding = cache_of(model), torch.ones(1, 9)
    padding[0, 0] = 0
    assert isinstance(graph_of(cache), graph.PromptGraph)
    assert graph_of(cache, attention_mask=padding) is None
    assert graph_of(cache, attention_mask=torch.ones(1, 10)) is None
    assert graph_of(cache, logits_to_keep=0) is graph_of(cache, logits_to_keep=torch.tensor([8])) is None
    assert graph_of(cache, output_attentions=True) is graph_of(cache, inputs_embeds=torch.ones(1, 9, 128)) is None
    assert graph_of(cache, prompt(1, 8193).as_subclass(OnGPU)) is graph_of(cache, prompt(1, 9)) is None
    many = cache_of(model, rows=17)
    assert graph_of(many, prompt(17, 3).as_subclass(OnGPU)) is None  # padding would cost more than it saves
    assert isinstance(graph_of(many, prompt(17, 513).as_subclass(OnGPU)), graph.PromptGraph)
    assert graph_of(cache_of(model, slack=0)) is None
    assert graph_of(AnyBitCache("kv16", config=model.config, capacity=64, static=True)) is None  # not allocated yet
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    assert graph_of(cache) is None
    handle.remove()
    assert isinstance(graph_of(cache), graph.PromptGraph)
    model.config.output_hidden_states = True
    with pytest.raises(LayerError, match="no hidden_states to record"):
        graph_of(cache)
    model.config.output_hidden_states = False
    logits_of(model, cache, prompt(1, 4))
    assert graph_of(cache) is None  # a prompt after others


def test_prompts_of_models_that_are_not_fused_run_eagerly(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    model = quantized(folder, "w4a16g32-kv4")
    model.set_attn_implementation("anybit")
    ids = prompt(1, 9).as_subclass(OnGPU)
    with torch.inference_mode():
        assert model._anybit_decoder.graph(cache_of(model), ids, {"logits_to_keep": 1}) is None
