"""Mixtures of experts, from folder to folder: each expert is three linear layers, token for token."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

import anybit
from anybit.cli import app
from anybit.models.experts import unfuse
from anybit.quantization.methods.registry import quantize_folder
from cases import EXHAUSTIVE
from cases_folders import quantization_of
from cases_mixtures import COMMON, MODELS
from cases_models import imitate, layers_of, schemes_of, tokens_of

METHODS = ("rtn", "gptq", "loading")
"""Each family meets one of them; all three with ANYBIT_EXHAUSTIVE=1 in the environment."""
SIZES: dict[str, Any] = {**COMMON, "bos_token_id": 1, "eos_token_id": 2}
FUSED = ("gpt_oss", "granitemoe", "llama4_text")
"""Whose checkpoints store the experts of a layer as one tensor."""


def text(count: int = 24) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(5)
    return {"sequences": torch.randint(3, 96, (count, 128), generator=dice).tolist(), "device": "cpu"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of tiny models, by model_type."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            torch.manual_seed(3)
            config = AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind]})
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(0, 0.2)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return make


def check(source: Path, found: PreTrainedModel, again: Path) -> dict[str, str]:
    """A model writes what the original with dequantized weights does, also saved again; schemes by layer."""
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    unfuse(model)
    imitate(model, found)
    expected = tokens_of(model)
    assert tokens_of(found.eval()) == expected
    found.save_pretrained(again)
    assert tokens_of(AutoModelForCausalLM.from_pretrained(again).eval()) == expected
    return schemes_of(found)


@pytest.mark.parametrize(
    ("kind", "method"),
    [(k, m) for i, k in enumerate(MODELS) for j, m in enumerate(METHODS) if EXHAUSTIVE or i % len(METHODS) == j],
)
def test_a_mixture_writes_what_its_weights_say(sources: Any, tmp_path: Path, kind: str, method: str) -> None:
    out, source = tmp_path / "out", sources(kind)
    if method == "loading":
        how = anybit.AnyBitConfig("w4a16")
        found = AutoModelForCausalLM.from_pretrained(source, quantization_config=how)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "[0-9]+ experts saw fewer than")
            saved = quantize_folder(source, out, "w4a16", method, options=text() if method == "gptq" else None)
        assert saved.experts == 0
        found = AutoModelForCausalLM.from_pretrained(out)
    schemes = check(source, found, tmp_path / "again")
    sparse = 1 if "first_k_dense_replace" in MODELS[kind] else 2
    assert sum(".experts." in name for name in schemes) == sparse * 8 * 3


@pytest.mark.parametrize("kind", ["mixtral", *FUSED])
def test_schemes_and_kept_layers_go_by_expert(sources: Any, tmp_path: Path, kind: str) -> None:
    down = "w2" if kind == "mixtral" else "down_proj"
    overrides = {f"*.experts.*.{down}": "w8a16", "*.experts.3.*": "w2a16"}
    keep = ["lm_head", r".*experts\.1\..*"]
    quantize_folder(sources(kind), tmp_path / "out", "w4a16", modules_to_not_convert=keep, overrides=overrides)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    schemes = check(sources(kind), found, tmp_path / "again")
    own = {name.partition(".experts.")[2]: scheme for name, scheme in schemes.items() if ".experts." in name}
    assert len(own) == 7 * 3 and not any(name.startswith("1.") for name in own)
    assert own[f"0.{down}"] == "w8a16" and own[f"3.{down}"] == "w2a16"
    assert sum(scheme == "w4a16" for scheme in own.values()) == 6 * 2


def test_a_budget_mixes_widths_by_expert(sources: Any, tmp_path: Path) -> None:
    """By how often the router chooses them: here one of eight always, and others of its half of the layer."""
    model, source = AutoModelForCausalLM.from_pretrained(sources("deepseek_v3")), tmp_path / "source"
    model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")[5] = 10
    model.save_pretrained(source)
    saved = quantize_folder(source, tmp_path / "out", "w4a16", "rtn", bits=6, options=text(4))
    assert saved.bits_per_weight <= 6
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    check(source, found, tmp_path / "again")
    experts = found.get_submodule("model.layers.1.mlp.experts")
    widths = [[layer.scheme.weights.bits for layer in expert.values()] for expert in experts]
    assert all(gate == up for gate, up, _ in widths) and len({*map(tuple, widths)}) == 2
    assert widths[:4] == [[2, 2, 2]] * 4 and sum(widths[5]) == max(map(sum, widths)) > 12
    assert len(experts.prepare(together=True)._joined.groups) == 2
    told = CliRunner().invoke(app, ["info", str(tmp_path / "out")]).stdout
    assert "experts            8, of which a token uses 2; projections: 12 in w2a16, " in told


def test_experts_learn_with_all_other_layers(sources: Any, tmp_path: Path) -> None:
    """On the calibration text, which they have to imitate; the router, in 16 bits, sends it to them."""
    source, given = sources("qwen3_moe"), text(16)
    tokens = torch.tensor(given["sequences"])
    wanted = AutoModelForCausalLM.from_pretrained(source).eval()(tokens).logits.detach().log_softmax(-1)
    losses, experts = [], []
    for method, how in (("gptq", {}), ("distill", {"learn_tokens": 12288, "weight_rate": 0.02})):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "[0-9]+ experts saw fewer than")
            quantize_folder(source, tmp_path / method, "w2a16g32asym", method, options={**given, **how})
        found = AutoModelForCausalLM.from_pretrained(tmp_path / method).eval()
        with torch.no_grad():
            ours = found(tokens).logits.log_softmax(-1)
        losses.append(torch.nn.functional.kl_div(ours, wanted, reduction="sum", log_target=True) / tokens.numel())
        experts.append({name: layer.dequantize() for name, layer in layers_of(found).items() if ".experts." in name})
    assert losses[1] < 0.9 * losses[0]
    assert len(experts[0]) == 48 and not any(bool((w == experts[1][n]).all()) for n, w in experts[0].items())


def test_experts_that_see_few_tokens_are_named(sources: Any, tmp_path: Path) -> None:
    """All of them, with 256 tokens of text: they are rounded to nearest."""
    with pytest.warns(UserWarning, match=r"^16 experts saw fewer .*: model\.layers\.0\.mlp\.experts\.0, ") as told:
        quantize_folder(sources("mixtral"), tmp_path / "out", "w4a16", "gptq", options=text(2))
    assert len(told) == 1
    quantize_folder(sources("mixtral"), tmp_path / "rtn", "w4a16")
    one, other = (layers_of(AutoModelForCausalLM.from_pretrained(tmp_path / name)) for name in ("out", "rtn"))
    rounded = [bool((one[name].dequantize() == other[name].dequantize()).all()) for name in one if "experts" in name]
    assert all(rounded) and len(rounded) == 48


UNKNOWN: dict[str, tuple[dict[str, Any], str, int]] = {
    "jetmoe": (
        {**SIZES, "num_local_experts": 2, "intermediate_size": 32, "kv_channels": 8},
        "model.layers.0.mlp.input_linear and of 7 more layers stay in 16 bits: JetMoeParallelExperts has no gate_up",
        2 * 2 * (3 * 32 * 32 + 2 * 16 * 32),
    ),
    "dbrx": (
        {
            "vocab_size": 96, "max_seq_len": 128, "d_model": 32, "n_heads": 4, "n_layers": 2,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2},
        },
        "transformer.blocks.0.ffn.experts.mlp and of 1 more layers stay in 16 bits: DbrxExpertGLU has no gate_up",
        2 * 8 * 3 * 32 * 24,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_experts_are_named(kind: str, tmp_path: Path) -> None:
    sizes, told, weights = UNKNOWN[kind]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(tmp_path / "source")
    for how in ("folder", "loading"):
        with pytest.warns(UserWarning, match=f"experts of {told}"):
            if how == "folder":
                saved = quantize_folder(tmp_path / "source", tmp_path / "out", "w4a16")
                assert saved.experts == weights
                assert quantization_of(tmp_path / "out")["quant_method"] == "anybit", "others would look for experts"
            else:
                loading = anybit.AnyBitConfig("w4a16")
                AutoModelForCausalLM.from_pretrained(tmp_path / "source", quantization_config=loading)
