"""Other tools' files (tests/fixtures/make_formats.py) against the weights that those tools make of them."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anybit.checkpoints.folder import Folder
from anybit.checkpoints.formats import format_of, layers_of

FIXTURES = Path(__file__).parent.parent / "fixtures" / "formats"
STRIDE = 9


@dataclass(frozen=True)
class Case:
    """What a fixture has to be: its format, the schemes of q_proj and down_proj, and how near its tool's weights.

    steps: how far a weight may be, in float16's rounding steps of the group's largest weight; 0 is bit for bit.
    """

    format: str
    q_proj: str
    down_proj: str
    steps: float = 0


CASES = {
    "gptq-4-sym": Case("gptq", "w4a16g32", "w4a16g32"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_what_its_tool_makes_of_it(name: str) -> None:
    case, folder = CASES[name], Folder(FIXTURES / name)
    format = format_of(folder.config)
    assert format is not None and format.NAME == case.format
    expected = load_file(FIXTURES / name / "expected.safetensors")
    layers = layers_of(format, folder, folder.config)
    assert set(layers) == set(expected)
    for layer_name, layer in layers.items():
        assert str(format.scheme(layer)) == getattr(case, layer_name.rpartition(".")[2])
        weight = format.read(layer)
        assert weight.format == format.scheme(layer).weights
        found, theirs = weight.dequantize()[::STRIDE], expected[layer_name].float()
        if theirs.shape and case.steps == 0:
            assert torch.equal(found.to(expected[layer_name].dtype), expected[layer_name])
        else:
            allowed = case.steps * 2**-11 * theirs.abs().amax()
            assert float((found - theirs).abs().max()) <= allowed


def test_every_fixture_is_looked_at() -> None:
    assert set(CASES) == {path.name for path in FIXTURES.iterdir()}
    for path in FIXTURES.iterdir():
        assert " " in json.loads((path / "config.json").read_text())["made_by"], "the tool and its version"
