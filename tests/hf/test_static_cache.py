"""generate over AnyBitCaches that models create themselves: static ones, and those of schemes with a KV format."""

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM

import anybit
from anybit import AnyBitCache, QuantLinear
from anybit.errors import LayerError
from anybit.hf import graph
from anybit.scheme import KVFormat
from cases_cache import DEVICE, GREEDY, SIZES, Streamer, folder_of, prompt, quantized


def agree(a, b, exact=DEVICE == "cpu"):
    """Tokens match, except at near-ties that other kernels' rounding may flip on a GPU."""
    assert a.shape == b.shape
    if exact:
        assert torch.equal(a, b)
    same = (a == b).all(0).long().cumprod(0).sum()
    assert same >= a.shape[1] - 12, f"only the first {same} of {a.shape[1]} tokens are the same"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return folder_of(hf.LlamaConfig(**SIZES), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("config_class", [hf.LlamaConfig, hf.Qwen3Config])
def test_static_caches_and_graphs_say_the_same(config_class, tmp_path):
    model = quantized(folder_of(config_class(**SIZES), tmp_path), "w4a16g32")
    ids = prompt()
    padding = torch.ones_like(ids)
    padding[1, :7] = 0
    calls = [{}, {"attention_mask": padding}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}]
    plain = []
    for call in calls:
        torch.manual_seed(3)
        plain.append(model.generate(ids, **{**GREEDY, **call}))
    anybit.fuse(model)
    for call, wanted in zip(calls, plain, strict=True):
        for _ in range(2):  # the second time with the graph of the first
            torch.manual_seed(3)
            agree(model.generate(ids, **{**GREEDY, **call}, cache_implementation="static"), wanted)
    if DEVICE == "cuda":
        assert all(graph.graph is not None for graph in model._anybit_decoder.graphs.values())
    again = copy.deepcopy(model)
    agree(again.generate(ids, **GREEDY, cache_implementation="static"), plain[0])
    assert again._anybit_decoder.model is again
    anybit.unfuse(model)
    assert "forward" not in model.__dict__
    agree(model.generate(ids, **GREEDY), plain[0])


@pytest.mark.parametrize("rows", [1, 2])
def test_greedy_answers_end_where_transformers_end_them(llama, rows, monkeypatch):
    model = quantized(llama, "w4a16g32")
    ids = prompt(rows)
    answer = model.generate(ids, **GREEDY)[:, ids.shape[1] :]
    call = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 20, "eos_token_id": int(answer[0, 11])}
    wanted = model.generate(ids, **call)
    assert anybit.accelerate(model)
    monkeypatch.setattr(type(model), "_sample", None)  # the usual loop is not called
    streamer = Streamer() if rows == 1 else None
    got = model.generate(ids, **call, cache_implementation="static", streamer=streamer)
    agree(got, wanted) if DEVICE == "cpu" else None
    assert streamer is None or streamer.told == [*got[0].tolist(), "end"]
    monkeypatch.undo()
    usual = model.generate(ids, **call, cache_implementation="static", repetition_penalty=1.3)  # with the usual loop
    assert usual.shape[0] == rows


def test_a_model_that_is_not_quantized(llama):
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float16 if DEVICE == "cuda" else None).to(DEVICE)
    wanted = model.generate(prompt(), **GREEDY)
    assert anybit.accelerate(model)
    agree(model.generate(prompt(), **GREEDY, cache_implementation="static"), wanted)
    assert isinstance(next(iter(model._anybit_decoder.caches.values())), AnyBitCache)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scheme_with_a_kv_format_makes_the_cache(llama, fused):
    model = quantized(llama, "w4a16g32-kv4")
    ids = prompt()
    model.set_attn_implementation("anybit")
    given = model.generate(ids, **GREEDY, past_key_values=AnyBitCache("kv4", config=model.config))
    model.set_attn_implementation("sdpa")
    if fused:
        anybit.fuse(model)
    result = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    assert isinstance(result.past_key_values, AnyBitCache) and str(result.past_key_values.format) == "kv4"
    exact = DEVICE == "cpu" and not fused  # stacked products round differently, which flips codes of the cache
    agree(result.sequences, given, exact)
    agree(model.generate(ids, **GREEDY, cache_implementation="static"), given, exact)
    assert model.config._attn_implementation == "sdpa"
    plain = model.generate(ids, **GREEDY, past_key_values=hf.DynamicCache(config=model.config))
    assert plain.shape == given.shape  # the caller's argument is used


def test_a_static_cache_that_is_kept_is_not_used_again(llama):
    model = anybit.fuse(quantized(llama, "w4a16g32"))
    call = {**GREEDY, "cache_implementation": "static", "return_dict_in_generate": True}
    first, second = (model.generate(prompt(), **call).past_key_values for _ in range(2))
    assert first is not second and first.seen == second.seen == 138


@pytest.mark.parametrize("scheme", ["w4a16g32", "w4a16g32-kv4"])
def test_threads_share_a_model(llama, scheme):
    """A reused cache serves one call at a time, and no pass sees another's attention."""
    model = quantized(llama, scheme)
    assert anybit.accelerate(model)
    calls = [{"cache_implementation": "static"}, {}] * 3
    prompts = [prompt(1, 5 + i) for i in range(len(calls))]

    def answer(i):
        return model.generate(prompts[i], **GREEDY, **calls[i])

    expected = [answer(i) for i in range(len(calls))]
    for _ in range(2):
        with ThreadPoolExecutor(len(calls)) as pool:
            for found, wanted in zip(pool.map(answer, range(len(calls))), expected, strict=True):
                assert torch.equal(found, wanted)


@pytest.mark.parametrize("scheme", ["w4a16g32", "w4a16g32-kv4"])
def test_graphs_of_torch_compile_may_break_in_a_shared_model(llama, scheme):
    """Dynamo cannot resume inside a lock: a first call prepares its layers outside of the graph."""
    model = anybit.accelerate(wanted := quantized(llama, scheme)) and wanted
    ids = prompt(1, 9)
    with torch.no_grad():
        expected = model(ids).logits
        for module in model.modules():
            if isinstance(module, QuantLinear):
                module.unprepare()
        found = torch.compile(model, backend="eager")(ids).logits
    assert torch.allclose(found, expected, atol=1e-3)


def test_a_cache_without_packed_attention_is_never_captured(tmp_path, monkeypatch):
    """Its shapes change from step to step: one step's graph would be wrong for the next."""
    config = hf.BloomConfig(vocab_size=128, hidden_size=128, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
    model = quantized(folder_of(config, tmp_path), "w4a16g32-kv8")
    monkeypatch.setattr(graph, "GreedyGraph", None)
    made = model._anybit_decoder.cache(1, 100, static=True, keep=False)

    class OnGPU(torch.Tensor):
        is_cuda = True

    ids = prompt(1, 9)
    with torch.no_grad():
        first = model(ids, past_key_values=made).logits[:, -1].argmax(-1, keepdim=True)
    tokens = model._anybit_decoder.tokens(made, first.as_subclass(OnGPU), torch.full_like(first, 9))
    assert next(tokens).shape == (1, 1)


@pytest.mark.parametrize("named", ["sampling", "beams"])
def test_what_the_model_asks_for_holds_where_a_configuration_leaves_it_open(named, llama):
    model = quantized(llama, "w4a16g32")
    own = model.generation_config
    if named == "sampling":
        own.do_sample, own.temperature, own.top_k, own.top_p = True, 3.0, 0, 1.0
    else:
        own.num_beams = 3
    config = hf.GenerationConfig(max_new_tokens=20, pad_token_id=0)
    torch.manual_seed(0)
    wanted = model.generate(prompt(), generation_config=config)
    assert anybit.accelerate(model)
    config.cache_implementation = "static"
    own.temperature = None if named == "beams" else 1.0
    answers = [model.generate(prompt(), generation_config=config) for _ in range(2)]
    assert answers[0].shape == wanted.shape
    if named == "sampling":
        assert not torch.equal(*answers)
    else:
        agree(answers[0], wanted, exact=False)


def test_graphs_are_forgotten_with_the_weights_that_they_read(llama):
    model = anybit.fuse(quantized(llama, "w4a16g32"))
    call = {**GREEDY, "cache_implementation": "static"}
    wanted, first = model.generate(prompt(), **call), next(iter(model._anybit_decoder.caches.values()))
    model.generate(prompt(), **call)
    assert next(iter(model._anybit_decoder.caches.values())) is first
    for _ in range(3):  # freed memory may be reused by the next weights
        anybit.use_backend(model, None)
        agree(model.generate(prompt(), **call), wanted, exact=False)
        last, first = first, next(iter(model._anybit_decoder.caches.values()))
        assert first is not last


def test_graphs_are_forgotten_with_the_layers_that_they_ran(llama):
    """With a replaced head or an adapter around a layer, an old graph would go on without it."""
    model = quantized(llama, "w4a16g32-kv4")
    decoder, attention = model._anybit_decoder, model.model.layers[0].self_attn

    def cache():
        return decoder.cache(1, 50, static=True, keep=False)

    first = cache()
    assert cache() is first
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone(), requires_grad=False)
    second = cache()
    assert second is not first and cache() is second
    attention.q_proj = torch.nn.Sequential(attention.q_proj, torch.nn.Linear(256, 256, bias=False).to(DEVICE))
    assert cache() is not second


def test_graphs_are_freed_with_their_caches(llama, monkeypatch):
    """Each copy of a static cache has a graph of its own."""
    model = quantized(llama, "w4a16g32-kv4")
    decoder, call = model._anybit_decoder, {**GREEDY, "cache_implementation": "static"}
    cache = model.generate(prompt(), **call, return_dict_in_generate=True).past_key_values
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    decoder.graphs[cache] = graph.StepGraph(model, decoder.forward, cache)
    decoder.greedy[cache] = graph.GreedyGraph(model, decoder.forward, cache)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    decoder.prompts[cache] = {32: graph.PromptGraph(model, decoder.forward, cache, 32, {})}
    del cache
    gc.collect()
    assert not decoder.graphs and not decoder.greedy and not decoder.prompts


def test_pickling_a_fused_model_says_what_to_do(llama):
    model = quantized(llama, "w4a16g32")
    assert torch.equal(pickle.loads(pickle.dumps(model))(prompt()).logits, model(prompt()).logits)
    for other in (anybit.fuse(model), quantized(llama, "w4a16g32-kv4")):
        with pytest.raises(LayerError, match=r"cannot be pickled: .*save_pretrained"):
            pickle.dumps(other)


OPT = {"ffn_dim": 128, "word_embed_proj_dim": 128, "num_attention_heads": 2}
UNFUSED = {
    "gemma3": lambda: hf.Gemma3TextConfig(**{**SIZES, "sliding_window": 64}),
    "opt": lambda: hf.OPTConfig(**{k: v for k, v in SIZES.items() if k not in ("intermediate_size", "head_dim")} | OPT),
}


@pytest.mark.parametrize("name", UNFUSED)
def test_layers_that_are_not_fused_take_static_caches_too(name, tmp_path):
    model = quantized(folder_of(UNFUSED[name](), tmp_path), "w4a16g32")
    ids = prompt()
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    for call in ({}, {"attention_mask": padding}):
        wanted = model.generate(ids, **GREEDY, **call)
        assert anybit.accelerate(model)
        agree(model.generate(ids, **GREEDY, **call, cache_implementation="static"), wanted, exact=False)
    assert isinstance(next(iter(model._anybit_decoder.caches.values())), AnyBitCache)


@pytest.mark.parametrize("static", [{}, {"cache_implementation": "static"}])
def test_tokens_of_an_image_see_one_another(static):
    torch.manual_seed(0)
    text = {**SIZES, "sliding_window": 32}
    patches = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.Gemma3Config(text_config=text, vision_config={**patches, "image_size": 16, "patch_size": 8})
    model = hf.Gemma3ForConditionalGeneration(config).eval().to(DEVICE)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    ids = prompt(1, 40)
    image = torch.zeros_like(ids)
    image[0, 5:35] = 1

    def logits(types, **more):
        call = {**GREEDY, "output_logits": True, "return_dict_in_generate": True, **more}
        return torch.stack(model.generate(ids, token_type_ids=types, **call).logits[:4])

    kinds = image, torch.zeros_like(ids)
    wanted = [logits(types) for types in kinds]
    graph.install(model, KVFormat.parse("kv16"))
    for i in (0, 1, 0):
        torch.testing.assert_close(logits(kinds[i], **static), wanted[i], rtol=5e-2, atol=5e-2)


def test_generate_refuses_by_name_what_cannot_be(tmp_path, llama):
    odd = hf.LlamaConfig(**{**SIZES, "head_dim": 16})
    model = quantized(folder_of(odd, tmp_path), "w4a16g32-kv4")
    with pytest.raises(LayerError, match="the KV format kv4 cannot serve this model"):
        model.generate(prompt(), **GREEDY)
    plain = quantized(tmp_path, "w4a16g32")
    assert not anybit.accelerate(plain)
    with pytest.warns(UserWarning, match="uses transformers' own static cache, which is slower: .*head_dim must be"):
        plain.generate(prompt(), **GREEDY, cache_implementation="static")
    with pytest.raises(LayerError, match="capacity of at least 1 token"):
        AnyBitCache("kv4", static=True)
    model = quantized(llama, "w4a16g32")
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 0, "lm_head": 1}
    with pytest.raises(LayerError, match="cannot be fused: it is spread over the devices 0, 1: load it onto one"):
        anybit.fuse(model)
    assert not anybit.accelerate(model)
    anybit.unfuse(model)
    model.hf_device_map = {"": 0}
    model.set_attn_implementation("anybit")
    cache = AnyBitCache("kv4", config=model.config, capacity=128, static=True)
    with pytest.raises(LayerError, match=r"do not fit a static AnyBitCache of 128"):
        model.generate(prompt(), **GREEDY, past_key_values=cache)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("scheme", ["w4a16g32", "w4a8-kv4", "w2a2"])
def test_on_another_gpu_than_the_current_one(llama, scheme):
    torch.cuda.set_device(0)
    answers = []
    for device in ("cuda:0", "cuda:1"):
        config = anybit.AnyBitConfig(scheme)
        model = AutoModelForCausalLM.from_pretrained(
            llama, quantization_config=config, dtype=torch.float16, device_map=device
        )
        ids = prompt().to(device)
        answers.append(model.generate(ids, **GREEDY).cpu())
        assert anybit.accelerate(model)
        for _ in range(2):
            answers.append(model.generate(ids, **GREEDY, cache_implementation="static").cpu())
    assert torch.cuda.current_device() == 0
    here, there = answers[:3], answers[3:]
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    assert torch.equal(here[1], here[2])


def test_torch_compile_sees_one_graph(llama):
    model = anybit.fuse(quantized(llama, "w4a16g32-kv8"))
    model.set_attn_implementation("anybit")
    ids = prompt(2, 127)
    results = []
    for compiled in (False, True):
        cache = AnyBitCache("kv8", config=model.config, capacity=256, static=True)
        with torch.no_grad():
            model._anybit_decoder.forward(input_ids=ids, past_key_values=cache)
            body = model._anybit_decoder.forward
            step = torch.compile(body, backend="aot_eager", fullgraph=True, dynamic=False) if compiled else body
            logits = []
            for i in range(3):  # the second completes a window
                positions = torch.full((2, 1), 127 + i, device=DEVICE)
                cache.count(1)
                cache.packs_later = True
                logits.append(
                    step(input_ids=ids[:, i : i + 1], position_ids=positions, past_key_values=cache).logits.clone()
                )
                cache.counted()
        results.append(torch.cat(logits, 1))
    torch.testing.assert_close(results[1], results[0], rtol=5e-3, atol=5e-3)


def test_compiled_steps_see_their_own_tokens(llama):
    """Attention is an op that reads lengths from the cache, which compiled code must have counted before."""
    torch._dynamo.reset()  # which would compile no more of what other tests have compiled
    model = quantized(llama, "w4a16g32-kv4")
    model.set_attn_implementation("anybit")
    logits, ids = [], prompt(1, 130)
    for run in (model, torch.compile(model, backend="aot_eager")):
        cache = AnyBitCache("kv4", config=model.config)
        with torch.no_grad():
            passes = [run(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 126), (126, 127), (127, 130))]
        logits.append(torch.cat(passes, 1))
        assert cache.seen == 130
    torch.testing.assert_close(logits[1], logits[0], rtol=5e-3, atol=5e-3)


def test_hooks_are_called_at_every_step_of_a_generation(llama):
    model = quantized(llama, "w4a16g32")
    wanted = model.generate(prompt(), **GREEDY)
    anybit.accelerate(model)
    static = {**GREEDY, "cache_implementation": "static"}
    for _ in range(2):  # the second time with the graph of the first
        agree(model.generate(prompt(), **static), wanted)
    for extra in ({}, {"repetition_penalty": 1.0}, {"num_beams": 2}):
        called = []
        hook = model.lm_head.register_forward_hook(lambda *_, called=called: called.append(1))
        model.generate(prompt(), **static, **extra)
        hook.remove()
        assert len(called) == 20
        agree(model.generate(prompt(), **static), wanted)
        assert len(called) == 20


@pytest.mark.parametrize("fused", [True, False])
def test_steps_with_hooks_are_not_replayed(llama, fused, monkeypatch):
    """A replay calls no Python: with hooks the step runs anew, whenever they were registered."""
    model = quantized(llama, "w4a16g32")
    if fused:
        anybit.fuse(model)
    model.to("cpu")
    model.set_attn_implementation("anybit")
    cache = AnyBitCache("kv16", config=model.config, capacity=512, static=True)
    replays, calls, ids = [], [], torch.ones(2, 1, dtype=torch.long)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    with torch.no_grad():
        model(prompt().cpu(), past_key_values=cache)
        step = graph.StepGraph(model, type(model).forward.__get__(model), cache)
        step.graph, step.logits = SimpleNamespace(replay=lambda: replays.append(1)), torch.zeros(2, 1, 128)
        position = iter(range(119, 200))
        assert step(ids, next(position)) is step.logits and len(replays) == 1
        parts = [model.lm_head, model.model.embed_tokens, *(() if fused else (model.model.layers[1].mlp.act_fn,))]
        for part in parts:
            for register in (part.register_forward_hook, part.register_forward_pre_hook):
                handle, count = register(lambda *_: calls.append(1)), len(calls)
                assert step(ids, next(position)) is not step.logits and len(calls) == count + 1
                handle.remove()
                replays.clear()
                assert step(ids, next(position)) is step.logits and len(calls) == count + 1 and replays
            part.forward = lambda x, own=part.forward: calls.append(2) or own(x)
            assert step(ids, next(position)) is not step.logits and calls[-1] == 2
            del part.forward
        if not fused:  # those that transformers installs to record outputs are no reason
            model.set_attn_implementation("sdpa")
            model.model(ids, output_hidden_states=True)
        assert step(ids, next(position)) is step.logits
