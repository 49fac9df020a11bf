"""AnyBitCache in transformers: generate gives the same with and without it, for families with special decoding."""

import pytest
import torch
import transformers as hf

from anybit.cache.ledger import CacheError
from anybit.errors import LayerError
from anybit.hf import graph
from anybit.hf.cache import AnyBitCache
from anybit.scheme import KVFormat
from cases_cache import COMMON, GATED, MODELS, model_of
from cases_matrix import MATRIX


def logits_of(model, ids, cache, mask=None, steps=3):
    """Logits of the last position after the prompt, and after each of a few more given tokens."""
    found = []
    with torch.no_grad():
        out = model(
            input_ids=ids[:, :-steps], attention_mask=None if mask is None else mask[:, :-steps], past_key_values=cache
        )
        found.append(out.logits[:, -1])
        for i in range(ids.shape[1] - steps, ids.shape[1]):
            part = None if mask is None else mask[:, : i + 1]
            found.append(model(input_ids=ids[:, i : i + 1], attention_mask=part, past_key_values=cache).logits[:, -1])
    return torch.stack(found)


@pytest.mark.parametrize("name", MODELS)
def test_cache_of_sixteen_bits_is_the_plain_one(name):
    """Padding, which is at the left of one row, does not reach it."""
    model = model_of(name)
    ids, mask = torch.randint(0, 97, (2, 150)), torch.ones(2, 150, dtype=torch.long)
    mask[1, :20] = 0
    want = logits_of(model, ids, hf.DynamicCache(config=model.config), mask)
    if name != "bloom":  # it bypasses transformers' attention interface, and gets dequantized keys and values
        model.set_attn_implementation("anybit")
    cache = AnyBitCache("kv16", config=model.config)
    torch.testing.assert_close(logits_of(model, ids, cache, mask), want, rtol=2e-2, atol=2e-2)
    assert cache.packed_attention == (name != "bloom")
    assert [cache.store.length(row) for row in cache.rows] == [150, 130 if name != "bloom" else 150]


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
@pytest.mark.parametrize("format", ["kv4", "kv2g32t", "w4a16-kv4rot"])
def test_packed_attention_and_dequantized_keys_agree(name, format):
    model = model_of(name)
    ids = torch.randint(0, 97, (1, 200))
    want = logits_of(model, ids, AnyBitCache(format))
    model.set_attn_implementation("anybit")
    got = logits_of(model, ids, AnyBitCache(format, config=model.config))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5 (text)", "Falcon-H1", "LFM 2", "Nemotron-H", "Granite 4"])
def test_a_model_that_keeps_a_state_is_refused(name):
    config = MATRIX[name]()
    cache = AnyBitCache("kv16", config=config)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    for attention in ("sdpa", "anybit"):
        model.set_attn_implementation(attention)
        with pytest.raises(LayerError, match=r"keeps more than keys and values in its cache .* use transformers' own"):
            model.generate(torch.arange(3, 20)[None], past_key_values=cache, max_new_tokens=2)
        assert cache.get_seq_length() == 0


def test_a_state_outside_the_cache_is_refused():
    sizes = {**COMMON, "intermediate_size": 96, "block_types": ["recurrent", "recurrent", "attention"]}
    model = hf.RecurrentGemmaForCausalLM(hf.RecurrentGemmaConfig(**sizes, attention_window_size=32)).eval()
    with torch.no_grad(), pytest.raises(LayerError, match="use transformers' own cache"):
        model(torch.arange(9)[None], past_key_values=AnyBitCache("kv16"))


def test_layers_that_share_keys_and_values_get_dequantized_ones():
    sizes = {**GATED, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 24, "laurel_rank": 8}
    sizes |= {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16, "pad_token_id": 0}
    torch.manual_seed(0)
    config = hf.Gemma3nTextConfig(**sizes, layer_types=["sliding_attention", "full_attention"] * 2)
    model = hf.Gemma3nForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    ids, padding = torch.randint(1, 97, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    padding[0, :30] = 0
    call = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "attention_mask": padding}
    wanted = model.generate(ids, **call)
    model.set_attn_implementation("anybit")
    with pytest.raises(LayerError, match="this layer shares another's keys and values"):
        model.generate(ids, **call, past_key_values=AnyBitCache("kv16", config=config))
    model.set_attn_implementation("sdpa")
    graph.install(model, KVFormat.parse("kv16"))
    for more in ({}, {"cache_implementation": "static"}):
        assert torch.equal(model.generate(ids, **call, **more), wanted)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True}], ids=["beams", "sampling"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_over_a_cache_gives_the_plain_tokens(name, options):
    model = model_of(name)
    ids = torch.randint(1, 97, (2, 140))
    padding = torch.ones_like(ids)
    padding[1, :20] = 0
    call = {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0, "attention_mask": padding, **options}
    torch.manual_seed(1)
    plain = model.generate(ids, **call)
    if name != "bloom":  # it bypasses transformers' attention interface: dequantized keys and values
        model.set_attn_implementation("anybit")
    torch.manual_seed(1)
    cache = AnyBitCache("kv16", config=model.config)
    ours = model.generate(ids, past_key_values=cache, **call)
    assert cache.packed_attention == (name != "bloom")
    assert ours.shape == plain.shape and len(cache.rows) == 2 * options.get("num_beams", 1)
    assert (ours == plain).float().mean() > 0.95  # float16 keys may flip a near-tie


def test_several_tokens_at_once_and_taking_them_back():
    model = model_of("llama", "anybit")
    ids = torch.randint(0, 97, (1, 135))
    cache = AnyBitCache("kv4", config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :120], past_key_values=cache)
        together = model(input_ids=ids[:, 120:135], past_key_values=cache).logits
        cache.store.crop(cache.rows[0], 120)
        cache.seen = 120
        apart = torch.cat(
            [model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(120, 135)], 1
        )
    # One by one, tokens after the 128th see the first 128 packed; in one pass they see them in 16 bits.
    torch.testing.assert_close(apart[:, :9], together[:, :9], rtol=2e-2, atol=2e-2)


def test_cache_refuses_by_name_what_it_cannot_serve():
    model = model_of("llama", "anybit")
    ids = torch.randint(0, 97, (1, 5))
    with pytest.raises(LayerError, match="needs an AnyBitCache"):
        model(input_ids=ids)
    hole = torch.ones(1, 5, dtype=torch.long)
    hole[0, 3] = 0
    with pytest.raises(LayerError, match="supports left padding only"):
        model(input_ids=ids, attention_mask=hole, past_key_values=AnyBitCache("kv4", config=model.config))
    with pytest.raises(LayerError, match="names no KV format"):
        AnyBitCache("w4a16")
    other = model_of("bloom")
    other.config._attn_implementation = "anybit"
    with pytest.raises(LayerError, match="create the AnyBitCache without config"):
        other(input_ids=ids, past_key_values=AnyBitCache("kv4", config=other.config))


@pytest.mark.parametrize("attention", ["anybit", "sdpa"])
def test_a_chat_goes_on_over_the_cache_of_its_past(attention: str) -> None:
    model = model_of("llama", spread=0.2)
    call = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids, more = torch.randint(1, 97, (2, 130)), torch.randint(1, 97, (2, 5))
    turns = []
    for cache in (hf.DynamicCache(config=model.config), AnyBitCache("kv16", config=model.config)):
        first = torch.cat(
            (model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **call), more), 1
        )
        seen = torch.ones_like(first)
        turns.append(model.generate(first, attention_mask=seen, past_key_values=cache, **call))
        assert cache.get_seq_length() == turns[-1].shape[1] - 1
        model.set_attn_implementation(attention)
    assert torch.equal(*turns)


@pytest.mark.parametrize("attention", ["anybit", "sdpa"])
def test_drafts_that_are_wrong_are_taken_back(attention: str) -> None:
    model = model_of("llama", spread=0.2)
    ids = torch.randint(1, 97, (1, 40)).repeat(1, 3)
    call = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    wanted = model.generate(ids, **call)
    model.set_attn_implementation(attention)
    cache = AnyBitCache("kv16", config=model.config)
    assert torch.equal(model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=4, **call), wanted)
    assert cache.get_seq_length() <= wanted.shape[1]


def test_masks_that_are_not_causal_are_refused() -> None:
    """Chunked, and bidirectional within images; text of the same models is served."""
    chunked = hf.Llama4TextConfig(**GATED, intermediate_size_mlp=96, num_local_experts=2, attention_chunk_size=16)
    torch.manual_seed(0)
    model = hf.Llama4ForCausalLM(chunked).eval()
    model.set_attn_implementation("anybit")
    with torch.no_grad(), pytest.raises(LayerError, match="this model's mask is of another kind"):
        model(torch.randint(0, 97, (1, 50)), past_key_values=AnyBitCache("kv16", config=model.config))
    text = {**GATED, "sliding_window": 32}
    patches = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.Gemma3Config(text_config=text, vision_config={**patches, "image_size": 16, "patch_size": 8})
    seeing = hf.Gemma3ForConditionalGeneration(config).eval()
    ids, image = torch.randint(3, 97, (1, 40)), torch.zeros(1, 40, dtype=torch.long)
    wanted = seeing(ids, token_type_ids=image).logits
    seeing.set_attn_implementation({"text_config": "anybit"})
    new = seeing(ids, token_type_ids=image, past_key_values=AnyBitCache("kv16", config=config.text_config)).logits
    torch.testing.assert_close(new, wanted, rtol=2e-2, atol=2e-2)
    image[0, 5:12] = 1
    cache = AnyBitCache("kv16", config=config.text_config)
    with pytest.raises(LayerError, match="bidirectional within images"):
        seeing(ids, token_type_ids=image, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_cache_holds_values_and_refuses_layers() -> None:
    """Only values are kept of a pass with gradients; per-layer operations of other caches are refused."""
    model = model_of("llama", "anybit")
    cache = AnyBitCache("kv4", config=model.config)
    ids = torch.arange(40)[None]
    model(ids, past_key_values=cache)
    assert repr(cache) == "AnyBitCache(kv4: 3 layers, 1 rows of 40 tokens)"
    assert not cache.store.residual.requires_grad
    cache.crop(1000)
    assert cache.get_seq_length() == 0 and cache.store.length(cache.rows[0]) == 0
    with pytest.raises(LayerError, match="cannot repeat its rows"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(LayerError, match="cannot select rows: use reorder_cache"):
        cache.batch_select_indices(torch.tensor([0]))


@pytest.mark.parametrize("attention", ["anybit", "eager"])
def test_tokens_that_a_static_cache_refuses_are_not_counted(attention: str) -> None:
    model = model_of("llama", attention)
    ids = torch.randint(0, 97, (2, 140))
    fresh, used = (AnyBitCache("kv4", config=model.config, capacity=100, static=True) for _ in range(2))
    with torch.no_grad():
        with pytest.raises(LayerError, match="140 tokens do not fit a static AnyBitCache of 128"):
            model(input_ids=ids, past_key_values=used)
        assert used.get_seq_length() == 0 and used.store is None
        for cache in (fresh, used):
            model(input_ids=ids[:, :120], past_key_values=cache)
        for wrong, said in ((ids[:, 120:130], "130 tokens do not fit"), (ids[:1, 120:121], "the batch has 1 rows")):
            with pytest.raises(LayerError, match=said):
                model(input_ids=wrong, past_key_values=used)
        with pytest.raises(LayerError, match="129 tokens do not fit"):
            used.count(9)
        for wrong in (1.5, True, "1"):
            with pytest.raises(CacheError, match="the tokens of a step must be a whole number"):
                used.count(wrong)
            with pytest.raises(CacheError, match="the tokens to crop must be a whole number"):
                used.crop(wrong)
        assert used.get_seq_length() == 120 and used.store.lengths.tolist() == [120, 120]
        step = ids[:, 120:128]
        answers = [model(input_ids=step, past_key_values=cache).logits for cache in (fresh, used)]
    assert torch.equal(*answers) and used.store.lengths.tolist() == [128, 128]


def test_tokens_that_a_later_layer_refuses_are_taken_back() -> None:
    model = model_of("llama", "anybit")
    two = hf.LlamaConfig(**{**GATED, "num_hidden_layers": 2}, attn_implementation="anybit")
    cache = AnyBitCache("kv4", config=two, capacity=256, static=True)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(LayerError, match="layer 2 is beyond a static AnyBitCache of 2 layers"):
            model(input_ids=torch.randint(0, 97, (1, 140)), past_key_values=cache)
        assert cache.get_seq_length() == 0 and cache.store.lengths.tolist() == [0]


def test_a_cache_goes_on_after_a_mask_that_it_refused() -> None:
    model = model_of("llama", "anybit")
    ids, hole = torch.randint(0, 97, (1, 20)), torch.ones(1, 20, dtype=torch.long)
    hole[0, 7] = 0
    fresh, used = (AnyBitCache("kv4", config=model.config) for _ in range(2))
    with torch.no_grad():
        with pytest.raises(LayerError, match="supports left padding only"):
            model(input_ids=ids, attention_mask=hole, past_key_values=used)
        assert used.get_seq_length() == 0
        answers = [model(input_ids=ids, past_key_values=cache).logits for cache in (fresh, used)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("capacity", [1.5, True, -1, 10**30, "128", None])
def test_cache_refuses_a_capacity_that_is_none(capacity: object) -> None:
    with pytest.raises(LayerError, match="capacity of an AnyBitCache must be a whole number of tokens, not"):
        AnyBitCache("kv4", capacity=capacity)
    with pytest.raises(LayerError, match="a page holds 64, 128 or 256 tokens, not 0"):
        AnyBitCache("kv4", page=0)
