"""Bit-widths chosen from text: the choice itself, size budgets, and refusals."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases_folders import Sources
from tests.cases_models import layers_of, tiny_model
from transformers import AutoModelForCausalLM

import anybit
from anybit.codes.rtn import quantize_weight
from anybit.errors import LayerError, OptionError, TextError
from anybit.quantization.methods.registry import quantize_folder
from anybit.quantization.pipeline.allocate import Choice, choose, few_kinds, loss_of, sample
from anybit.quantization.pipeline.lazy import LazyModel
from anybit.scheme import Scheme

TEXT: dict[str, Any] = {"sequences": [[i * k % 95 for i in range(64)] for k in range(1, 9)]}


def test_the_choice_is_near_the_best_there_is() -> None:
    dice = random.Random(3)
    units = [
        [Choice({"": width}, width * size, dice.random() * 4.0**-width) for width in (2, 3, 4, 6)]
        for size in (1, 2, 3, 2, 1)
    ]
    for budget in (18, 23, 31, 40, 54):
        every = itertools.product(*units)
        best = min(sum(c.loss for c in some) for some in every if sum(c.bits for c in some) <= budget)
        chosen, _ = choose(units, budget)
        assert sum(choice.bits for choice in chosen) <= budget
        assert best <= sum(choice.loss for choice in chosen) <= 1.5 * best + 1e-12


@pytest.mark.parametrize("mean", [2.4, 3.1, 4.5, 7.9])
def test_experts_of_a_layer_are_of_few_kinds(mean: float) -> None:
    """Within the budget, and not far from a choice without limit; those that lose most are of the wider kind."""
    dice, units, size = random.Random(int(mean)), [], 0
    for layer, expert, parts in itertools.product("ab", range(12), (("gate", "up"), ("down",))):
        felt = dice.random() * (40 if expert == 5 else 1) * (4 if parts == ("down",) else 1)
        names = [f"{layer}.experts.{expert}.{part}" for part in parts]
        units.append([Choice(dict.fromkeys(names, w), w * len(names), felt * 4.0**-w) for w in (2, 3, 4, 6, 8)])
        size += len(names)
    units.append([Choice({"head": w}, 5 * w, 4.0**-w) for w in (2, 4, 8)])
    budget = mean * (size + 5)
    few, _ = choose(few_kinds(units, budget, ["a.experts", "b.experts", "c.experts"]), budget)
    assert sum(choice.bits for choice in few) <= budget
    widths = {name: width for choice in few for name, width in choice.widths.items()}
    assert len(widths) == size + 1
    for layer in "ab":
        kinds = [tuple(widths[f"{layer}.experts.{i}.{part}"] for part in ("gate", "up", "down")) for i in range(12)]
        assert len(set(kinds)) <= 2 and sum(kinds[5]) == max(map(sum, kinds))
    free, most = choose(units, budget)[0], sum(unit[0].loss for unit in units)
    gained = [most - sum(choice.loss for choice in some) for some in (few, free)]
    assert gained[0] > 0.7 * gained[1]


def test_the_loss_is_the_divergence_that_is_measured() -> None:
    """To second order, one layer at a time: within a factor of two of the KL divergence itself."""
    model = tiny_model("llama")
    sequences = [torch.tensor(row) for row in TEXT["sequences"]]
    names = ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"]
    samples = sample(LazyModel(model), [row[None] for row in sequences], names)
    ids = torch.stack(sequences)
    with torch.inference_mode():
        plain = model(ids).logits.log_softmax(-1)
    for unit, x in zip(samples.units, samples.inputs, strict=True):
        (name,) = unit
        layer = model.get_submodule(name)
        weight = layer.weight.data
        found = loss_of(weight, Scheme.parse("w6a16g32").weights, x, samples.gradients[name])
        layer.weight.data = quantize_weight(weight, Scheme.parse("w6a16g32").weights).dequantize()
        with torch.inference_mode():
            changed = model(ids).logits.log_softmax(-1)
        layer.weight.data = weight
        measured = float((plain.exp() * (plain - changed)).sum(-1).mean())
        assert 0.5 * measured < found < 2 * measured, name


def test_layers_of_one_input_get_one_width() -> None:
    names = [f"model.layers.0.self_attn.{kind}_proj" for kind in "qkvo"]
    samples = sample(LazyModel(tiny_model("llama")), [torch.tensor(TEXT["sequences"])], names)
    assert samples.units == [tuple(names[:3]), (names[3],)]


@pytest.mark.parametrize("method", ["rtn", "gptq", "distill"])
def test_an_average_is_met_and_the_result_loads(method: str, llama: Path, tmp_path: Path) -> None:
    options = {**TEXT, "passes": 0} if method == "gptq" else TEXT
    if method == "distill":  # on what the model writes
        options = {"learn_tokens": 1024, "length": 32, "tokens": 512}
    saved = quantize_folder(llama, tmp_path / "out", "w4a16g64", method, bits=5.0, options=options)
    assert 4.0 < saved.bits_per_weight <= 5.0 and saved.overrides
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    widths = {name: layer.scheme.weights.bits for name, layer in layers_of(model).items()}
    assert len({*widths.values()}) > 1
    for i in range(2):
        assert len({widths[f"model.layers.{i}.self_attn.{kind}_proj"] for kind in "qkv"}) == 1
    anybit.fuse(model)


@pytest.mark.parametrize(("scheme", "context", "bits"), [("w4a16g64", 140, 16), ("w4a16g64-kv4", 500, 4.5625)])
def test_a_size_in_memory_holds_a_cache_too(scheme: str, context: int, bits: float, sources: Sources, tmp_path) -> None:
    cache = context * 2 * 2 * 2 * 64 * bits / 8  # 2 layers with 2 heads of 64 channels
    saved = quantize_folder(
        sources["llama-wide"], tmp_path / "out", scheme, memory=300_000, context=context, options=TEXT
    )
    assert 280_000 < saved.bytes_after + cache <= 300_000


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"bits": 4.0, "context": 8, "options": TEXT}, OptionError, "needs option memory, not 8"),
        ({"memory": 1000, "context": 8, "options": TEXT}, OptionError, r"bytes, 2048 of them its KV cache"),
        ({"bits": 1.5, "options": TEXT}, OptionError, r"1.5 bits a weight cannot be met: .* the average is 2\."),
        ({"memory": 1000, "options": TEXT}, OptionError, r"the model takes \d{5} bytes"),
        ({"memory": 1234.5678, "options": TEXT}, OptionError, "^1235 bytes cannot be met"),
        ({"bits": 4.0, "memory": 1e6, "options": TEXT}, OptionError, "give either bits .* or memory .*, not both"),
        ({"context": 5, "options": TEXT}, OptionError, "context .* needs option memory, not 5"),
        ({"bits": float("nan"), "options": TEXT}, OptionError, "bits must be a number, not nan"),
        ({"memory": float("nan"), "options": TEXT}, OptionError, "memory must be a number, not nan"),
        ({"bits": 4.0}, TextError, "name a file with --text"),
        ({"bits": 4.0, "method": "smooth"}, OptionError, "a search for widths works with rtn, gptq, distill"),
        ({"bits": 4.0, "options": TEXT, "scheme": "w4a16g32nf4"}, LayerError, "quantize to sym, asym"),
        ({"bits": 9.0, "options": TEXT, "overrides": {"*": "w4a16"}}, OptionError, "every layer has an override"),
    ],
)
def test_what_cannot_be_met_is_refused(more, error, message, llama, tmp_path) -> None:
    with pytest.raises(error, match=message):
        quantize_folder(llama, tmp_path / "out", **{"scheme": "w4a16g64", **more})
    assert not (tmp_path / "out").exists()
