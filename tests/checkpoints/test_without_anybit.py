"""A program that does not import anybit gets the right model from a saved folder, or an error, nothing else."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from tests.cases_folders import Sources, config_of
from tests.cases_models import layers_of, tokens_of
from tests.checkpoints.test_formats import whole_model
from transformers import AutoModel, AutoModelForCausalLM

from anybit import AnyBitConfig
from anybit.checkpoints.verify import TRAP
from anybit.errors import CheckpointError
from anybit.hf.loading import load_model
from anybit.quantization.methods.registry import quantize_folder

HELD = ("quantize w4a16g32", "save w4a16g32", "save w3a16g32asym", "quantize w1a16asym")
"""Ways of saving, and schemes that compressed-tensors can express."""
OTHERS = ("quantize w4a8", "save w4a8", "quantize w1a16", "save w4a16g32s24", "save w4a16-kv4", "quantize w4a16g64")
"""Schemes that it cannot; groups of 64 do not divide a layer of 96 inputs."""

PLAIN = """
import json, sys, torch
from transformers import AutoModelForCausalLM
found = {}
for folder in sys.argv[1:]:
    try:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.inference_mode():
            ids = torch.tensor([[5, 17, 42, 3, 88, 61]])
            ids = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)
        found[folder] = ids[0, 6:].tolist()
    except Exception as error:
        found[folder] = f"{type(error).__name__}: {error}"
assert not any(name.partition(".")[0] == "anybit" for name in sys.modules)
print(json.dumps(found))
"""


def without_anybit(*folders: Path) -> dict[str, Any]:
    """Run transformers alone on each folder, by name: tokens, or an error message."""
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, *map(str, folders)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {Path(folder).name: result for folder, result in json.loads(done.stdout.splitlines()[-1]).items()}


def without_method(folder: Path, target: Path) -> Path:
    """A copy whose config.json no longer says that the model is quantized."""
    shutil.copytree(folder, target)
    config = {name: value for name, value in config_of(folder).items() if name != "quantization_config"}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def folders(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders written by both ways of saving, named by way and scheme."""
    root = tmp_path_factory.mktemp("saved")
    for name in (*HELD, *OTHERS):
        way, scheme = name.split()
        source = sources["llama-wide" if "kv" in scheme else "llama"]
        if way == "quantize":
            quantize_folder(source, root / name, scheme)
        else:
            how = AnyBitConfig(scheme)
            AutoModelForCausalLM.from_pretrained(source, quantization_config=how).save_pretrained(root / name)
    quantize_folder(sources["gpt2"], root / "quantize gpt2", "w4a16")
    return root


@pytest.fixture(scope="module")
def found(folders: Path) -> dict[str, Any]:
    """What transformers alone makes of these folders, and of copies without a configuration."""
    pytest.importorskip("compressed_tensors")
    others = [folders / name for name in (*OTHERS, "quantize gpt2")]
    gone = [without_method(folder, folders / f"gone {folder.name}") for folder in others]
    return without_anybit(*(folders / name for name in HELD), *others, *gone)


def test_saved_folders_without_anybit(folders: Path, found: dict[str, Any]) -> None:
    for folder in (folders / name for name in HELD):
        # Here anybit is present, and takes over the folder.
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert layers_of(model)
        assert found[folder.name] == tokens_of(model), folder.name
    for folder in (folders / name for name in (*OTHERS, "quantize gpt2")):
        assert "ignore_mismatched_sizes" in found[folder.name], (folder.name, found[folder.name])
        assert tokens_of(AutoModelForCausalLM.from_pretrained(folder).eval())
    for folder in folders.glob("gone *"):
        assert "ignore_mismatched_sizes" in found[folder.name], (folder.name, found[folder.name])
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # anybit is present, but not asked
            AutoModelForCausalLM.from_pretrained(folder)


def test_codes_without_a_configuration_are_no_weights(folders: Path, tmp_path: Path) -> None:
    """Without quantization_config, transformers alone initializes weights randomly; with anybit it refuses."""
    gptq = without_method(whole_model("gptq-4-sym", tmp_path / "whole"), tmp_path / "gptq")
    for lost in (*(without_method(folders / name, tmp_path / name) for name in HELD), gptq):
        for kind in (AutoModelForCausalLM, AutoModel):
            with pytest.raises(CheckpointError, match=r"has model\.layers\.0\..*, codes of a quantized layer, but its"):
                kind.from_pretrained(lost)
        with pytest.raises(CheckpointError):
            load_model(lost)


def test_loading_says_nothing_of_the_empty_tensors(folders: Path, capfd: pytest.CaptureFixture[str]) -> None:
    AutoModelForCausalLM.from_pretrained(folders / "save w4a8")
    captured = capfd.readouterr()
    assert "UNEXPECTED" not in captured.out + captured.err
    tensors = safetensors.torch.load_file(folders / "save w4a8" / "model.safetensors")
    traps = [name for name, tensor in tensors.items() if name.endswith(f".{TRAP}") and tensor.numel() == 0]
    assert len(traps) == len([name for name in tensors if name.endswith(".weight_packed")]) > 0


def test_folders_of_earlier_versions_load(folders: Path, tmp_path: Path) -> None:
    """They have only anybit's entries, and no empty tensors."""
    for scheme in ("w4a16g32", "w4a8"):
        source, old = folders / f"quantize {scheme}", tmp_path / scheme
        old.mkdir()
        tensors = safetensors.torch.load_file(source / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        safetensors.torch.save_file(kept, old / "model.safetensors", {"format": "pt"})
        words = {"quant_method": "anybit", "version": "0.1.0", "scheme": scheme, "modules_to_not_convert": ["lm_head"]}
        (old / "config.json").write_text(json.dumps({**config_of(source), "quantization_config": words}))
        ours = AutoModelForCausalLM.from_pretrained(old).eval()
        assert tokens_of(ours) == tokens_of(AutoModelForCausalLM.from_pretrained(source).eval())
