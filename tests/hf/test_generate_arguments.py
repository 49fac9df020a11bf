"""Every argument of ``generate`` does the same on each path as on a model that anybit does not change.

The arguments are transformers' own: one that a new version adds has no value here, and fails a test. The two paths of
static caches share them out, as do the two others; each takes all with ANYBIT_EXHAUSTIVE=1 in the environment.
"""

import inspect

import numpy as np
import pytest
import torch
import transformers as hf
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

import anybit
from cases import EXHAUSTIVE
from cases_cache import GATED, Streamer, folder_of, quantized
from cases_models import save_byte_tokenizer

PATHS = {  # scheme, whether accelerated, arguments
    "accelerated": ("w4a16g32", True, {}),
    "static": ("w4a16g32", True, {"cache_implementation": "static"}),
    "kv": ("w4a16g32-kv16", False, {}),
    "kv static": ("w4a16g32-kv16", True, {"cache_implementation": "static"}),
}
PROMPT = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(2))  # printable ASCII
BEAMS, SAMPLE, LOOKUP = {"num_beams": 2}, {"do_sample": True}, {"prompt_lookup_num_tokens": 3}
RECORDS = ("output_attentions", "output_hidden_states")  # of layers: a fused model refuses them by name


class Bans(LogitsProcessor):
    """Bans a token."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores):
        scores[:, self.token] = -torch.inf
        return scores


class Stops(StoppingCriteria):
    """Stops after three tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= PROMPT.shape[1] + 3)


def settings(first, tokenizer):
    """For each field of GenerationConfig, one or more calls. first: tokens of the plain answer."""
    alone = {
        "assistant_early_exit": 1, "bad_words_ids": [[first[1]]], "begin_suppress_tokens": [first[0]],
        "bos_token_id": 1,
        "cache_config": {"nbits": 4}, "compile_config": hf.CompileConfig(),
        "continuous_batching_config": hf.ContinuousBatchingConfig(), "decoder_start_token_id": 1,
        "disable_compile": True, "dola_layers": "low", "encoder_no_repeat_ngram_size": 1,
        "encoder_repetition_penalty": 2.0, "forced_bos_token_id": 4, "forced_eos_token_id": 4, "guidance_scale": 1.5,
        "is_assistant": False, "low_memory": True, "max_cache_len": 64, "max_time": 100.0, "no_repeat_ngram_size": 1,
        "output_attentions": True, "output_hidden_states": True, "prefill_chunk_size": 6,
        "remove_invalid_values": True, "renormalize_logits": True, "repetition_penalty": 2.0,
        "return_dict_in_generate": True, "sequence_bias": [[[first[1]], -100.0]], "speculation_type": "dflash",
        "suppress_tokens": [first[0], first[4]], "use_cache": False, "use_mtp": True,
        "watermarking_config": {"bias": 9.0}, "do_sample": True, "num_beams": 2, "prompt_lookup_num_tokens": 3,
    }  # fmt: skip
    beside = (
        (BEAMS, {"constraints": [1], "early_stopping": True, "force_words_ids": [[3]], "length_penalty": 2.0}),
        (BEAMS, {"num_beam_groups": 2}),
        ({**BEAMS, "num_beam_groups": 2}, {"diversity_penalty": 0.5}),
        (SAMPLE, {"epsilon_cutoff": 0.02, "eta_cutoff": 0.02, "min_p": 0.1, "temperature": 2.0, "top_h": 0.5}),
        (SAMPLE, {"top_k": 3, "top_p": 0.5, "typical_p": 0.5}),
        (LOOKUP, {"assistant_confidence_threshold": 0.3, "assistant_ensemble_weight": 0.5, "assistant_lookbehind": 5}),
        (LOOKUP, {"max_matching_ngram_size": 2, "num_assistant_tokens": 2, "target_lookbehind": 5}),
        (LOOKUP, {"num_assistant_tokens_schedule": "heuristic"}),
        ({"eos_token_id": 5}, {"exponential_decay_length_penalty": (2, 9.0)}),
        ({"eos_token_id": first[2]}, {"min_length": 25, "min_new_tokens": 5, "pad_token_id": 3}),
        ({"return_dict_in_generate": True}, {"output_logits": True, "output_scores": True}),
        ({"top_k": 4}, {"penalty_alpha": 0.5}),
        ({"max_new_tokens": None}, {"max_length": 24}),
    )
    said = tokenizer.decode(first[2:4])
    several = {
        "cache_implementation": [{"cache_implementation": kind} for kind in (None, "dynamic", "nosuch")],
        "eos_token_id": [{"eos_token_id": first[2]}, {"eos_token_id": [first[3], first[1]]}],
        "max_new_tokens": [{"max_new_tokens": n} for n in (1, 2, 0, np.int64(4))],
        "num_return_sequences": [{"num_return_sequences": 2, **BEAMS}, {"num_return_sequences": 2, **SAMPLE}],
        "stop_strings": [{"stop_strings": [said]}, {"stop_strings": ["nosuch"], "tokenizer": None}],
        "token_healing": [{"token_healing": True}, {"token_healing": True, "tokenizer": None}],
    }
    found = {name: {name: value} for name, value in alone.items()} | several
    return found | {name: {**with_it, name: value} for with_it, some in beside for name, value in some.items()}


def arguments(first, model):
    """The same for the parameters of ``generate`` itself, and for some that it hands to the model."""
    mask = torch.ones_like(PROMPT)
    mask[:, :4] = 0
    own = model.get_input_embeddings()
    return {
        "inputs": {"inputs": PROMPT[:, :9]},
        "generation_config": {"generation_config": GenerationConfig(repetition_penalty=2.0)},
        "logits_processor": {"logits_processor": [Bans(first[1])]},
        "stopping_criteria": {"stopping_criteria": [Stops()]},
        "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda _, ids: [5, 6, 9]},
        "synced_gpus": [{"synced_gpus": False}, {"synced_gpus": True}],
        "assistant_model": {"assistant_model": model},
        "streamer": [{"streamer": True}, {"streamer": True, "repetition_penalty": 2.0}, {"streamer": True, **BEAMS}],
        "negative_prompt_ids": {"negative_prompt_ids": PROMPT[:, :5], "guidance_scale": 1.5},
        "negative_prompt_attention_mask": {
            "negative_prompt_ids": PROMPT[:, :5], "negative_prompt_attention_mask": mask[:, :5], "guidance_scale": 1.5
        },
        "custom_generate": [{"custom_generate": lambda model, ids, **_: ids[:, :2]}, {"custom_generate": "no/such"}],
        "kwargs": [
            {"attention_mask": mask},
            {"position_ids": torch.arange(20)[None] + 3},
            {"inputs": None, "inputs_embeds": own(PROMPT).detach()},
            {"inputs": None, "input_ids": PROMPT},
            {"logits_to_keep": 3},
            {"tokenizer": None},
            {"assistant_tokenizer": 1},
            {"trust_remote_code": True},
            {"past_key_values": hf.DynamicCache},
            {"nosuch": 1},
        ],
    }  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and a tokenizer."""
    folder = tmp_path_factory.mktemp("generate")
    save_byte_tokenizer(folder)
    return folder_of(hf.LlamaConfig(**GATED, bos_token_id=None, eos_token_id=None), folder)


def outcome(model, call, tokenizer, more=()):
    """What a call returns, streams or raises."""
    streamer = Streamer()
    more = {} if "past_key_values" in call else dict(more)  # transformers refuses a cache and its kind
    call = {k: streamer if k == "streamer" else v() if v is hf.DynamicCache else v for k, v in call.items()}
    usual = {"inputs": PROMPT, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "tokenizer": tokenizer}
    torch.manual_seed(0)
    try:
        found = model.generate(**usual | more | call)
    except Exception as error:
        return f"{type(error).__name__}: {error}", streamer.told
    return (found if isinstance(found, torch.Tensor) else found.sequences).tolist(), streamer.told


@pytest.fixture(scope="module")
def expected(place):
    """(argument, call, outcome) of the model as transformers runs it."""
    model, tokenizer = quantized(place, "w4a16g32"), hf.AutoTokenizer.from_pretrained(place)
    first = outcome(model, {}, tokenizer)[0][0][PROMPT.shape[1] :]
    cases = settings(first, tokenizer) | arguments(first, model)
    fields = {name for name in vars(GenerationConfig()) if name[0] != "_"} - {"transformers_version"}
    taken = {*inspect.signature(type(model).generate).parameters} - {"self"}
    assert fields | taken <= {*cases}, "give it a value above"
    return [
        (name, call, outcome(model, call, tokenizer))
        for name, calls in cases.items()
        for call in (calls if isinstance(calls, list) else [calls])
    ]


@pytest.mark.parametrize("path", PATHS)
def test_every_argument_does_what_it_does_without_anybit(path, place, expected):
    scheme, fused, more = PATHS[path]
    model, tokenizer = quantized(place, scheme), hf.AutoTokenizer.from_pretrained(place)
    assert not fused or anybit.accelerate(model)
    differ = {}
    for name, call, wanted in expected if EXHAUSTIVE else expected[(len(scheme) + (not more)) % 2 :: 2]:
        found = outcome(model, call, tokenizer, more)
        if fused and name in RECORDS:
            assert "LayerError: a fused model has no" in found[0]
        elif found != wanted and "not supported with Static cache" not in found[0]:  # which older transformers say
            differ[f"{name}: {call}"] = found, wanted
    assert not differ


def test_arguments_by_place_are_seen(place):
    """A streamer by place got no token of a static cache, and a configuration by place made none."""
    model = quantized(place, "w4a16g32")
    names = list(inspect.signature(type(model).generate).parameters)[1:]
    call = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    by_place = {"inputs": PROMPT, "generation_config": GenerationConfig(**call), "streamer": (streamer := Streamer())}
    assert anybit.accelerate(model)
    found = model.generate(*[by_place.get(name) for name in names[: names.index("streamer") + 1]])
    assert streamer.told == [*found[0].tolist(), "end"] and len(model._anybit_decoder.caches) == 1
    with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
        model.generate(PROMPT, inputs=PROMPT, **call)


@pytest.mark.parametrize("path", PATHS)
def test_a_pipeline_stops_at_a_sequence(path, place):
    scheme, fused, more = PATHS[path]
    tokenizer = hf.AutoTokenizer.from_pretrained(place)
    text, call = tokenizer.decode(PROMPT[0]), {"max_new_tokens": 6, "do_sample": False}
    plain = hf.pipeline("text-generation", quantized(place, "w4a16g32"), tokenizer=tokenizer)
    whole = plain(text, **call)[0]["generated_text"]
    stop = whole[len(text) + 2 :][:2]
    wanted = plain(text, **call, stop_sequence=stop)
    model = quantized(place, scheme)
    assert not fused or anybit.accelerate(model)
    found = hf.pipeline("text-generation", model, tokenizer=tokenizer)(text, **call, **more, stop_sequence=stop)
    assert found == wanted and len(found[0]["generated_text"]) < len(whole)


@pytest.mark.parametrize("path", ["accelerated", "kv static"])
def test_continuous_batching_answers(path, place, caplog):
    scheme, fused, _ = PATHS[path]
    model = quantized(place, scheme)
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    prompts = [PROMPT[0, :n].tolist() for n in (20, 13)]
    wanted = [model.generate(torch.tensor([ids]), settings)[0, len(ids) :].tolist() for ids in prompts]
    assert not fused or anybit.accelerate(model)
    hf.utils.logging.warning_once.cache_clear()
    small = hf.ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64)
    found = model.generate_batch(prompts, settings, continuous_batching_config=small)
    assert [(answer.generated_tokens, answer.error) for answer in found.values()] == [(ids, None) for ids in wanted]
    assert ("PagedAttentionCache keeps keys and values, not in the scheme's kv16" in caplog.text) == ("kv" in path)
