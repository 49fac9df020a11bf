"""The models of docs/models.md: each is quantized, saved, reloaded, and generates token for token; the table says so.

``python -m tests.hf.test_model_matrix`` writes the table.
"""

import contextlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.cases_matrix import MATRIX
from tests.cases_models import imitate, layers_of, tokens_of
from transformers.pytorch_utils import Conv1D

import anybit
from anybit.errors import LayerError
from anybit.models.experts import unfuse
from anybit.models.modules import auto_class
from anybit.quantization.methods.registry import quantize_folder

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
MARKED = re.compile(r"(<!-- models -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
HEAD = "| model | quantized in a layer | stays in 16 bits | fused layers |\n| --- | --- | --- | --- |\n"


@dataclass(frozen=True)
class Found:
    """The result for a model; cells: of its table row, which models with equal cells share."""

    cells: str
    streamed: list[int]
    reloaded: list[int]
    expected: list[int]
    fused: list[int] | None
    experts: int
    counted: int
    beside: list[str]


def tried(name: str, folder: Path) -> Found:
    """Quantize a tiny random model, save it, load it, and generate."""
    torch.manual_seed(5)
    config = MATRIX[name]()
    kind = auto_class(config)
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.ndim == 2 or ".experts." in part:
                parameter.mul_(4)
    model.save_pretrained(folder / "source")
    saved = quantize_folder(folder / "source", folder / "out", "w4a16g32")
    streamed = kind.from_pretrained(folder / "out").eval()
    layers = layers_of(streamed)
    assert len(layers) == saved.layers
    # The original with dequantized weights must generate the same.
    unfuse(model)
    imitate(model, streamed)
    streamed.save_pretrained(folder / "again")
    tokens, expected = tokens_of(streamed), tokens_of(model)
    reloaded = tokens_of(kind.from_pretrained(folder / "again").eval())
    kept = {
        part.rpartition(".")[2]
        for part, m in streamed.named_modules()
        if isinstance(m, (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Embedding, Conv1D))
        and not part.startswith(tuple(saved.beside))
    }
    experts = sum(p.numel() for part, p in streamed.named_parameters() if ".experts." in part and p.ndim > 2)
    fused = None
    with contextlib.suppress(LayerError):
        fused = tokens_of(anybit.fuse(streamed))
    quantized = dict.fromkeys(part.rpartition(".")[2] for part in layers)
    stays = [*sorted(kept), *(["experts"] if experts else [])]
    seven = set(quantized) >= SEVEN
    named = [f"`{part}`" for part in quantized if not (seven and part in SEVEN)]
    cells = (
        f"{', '.join(['the seven'] * seven + named)} | {', '.join(f'`{part}`' for part in stays)} | "
        f"{'no' if fused is None else 'yes'}"
    )
    return Found(cells, tokens, reloaded, expected, fused, experts, saved.experts, saved.beside)


def table() -> dict[str, str]:
    """The cells of each model in the page's table."""
    found = MARKED.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    rows = [row.strip("| ").partition(" | ") for row in found[2].strip().splitlines()[2:]]
    return {name: cells for names, _, cells in rows for name in names.split("; ")}


def tried_or_broken(name: str, folder: Path) -> Found | None:
    """The same; None for Llama4ForConditionalGeneration of transformers 5.24, which fails with any weights."""
    try:
        return tried(name, folder)
    except AttributeError as error:
        if name != "Llama 4 (images)" or "image_outputs" not in str(error):
            raise
        return None


@pytest.mark.parametrize("name", MATRIX)
def test_a_model_runs_as_the_table_says(name: str, tmp_path: Path) -> None:
    if name == "InternLM 3" and not hasattr(transformers, "InternLM3Config"):
        pytest.skip("InternLM 3 needs transformers 5.23")
    found = tried_or_broken(name, tmp_path)
    if found is None:
        pytest.skip("Llama4ForConditionalGeneration of this transformers (5.24) fails with any weights")
    assert found.streamed == found.reloaded == found.expected
    assert found.fused in (None, found.streamed)
    assert found.experts == found.counted
    assert bool(found.beside) == name.endswith("(images)")
    assert found.cells == table()[name], "run: python -m tests.hf.test_model_matrix"


def test_the_table_has_no_other_rows() -> None:
    assert sorted(table()) == sorted(MATRIX)


def write() -> None:
    """Write the table into the page."""
    alike: dict[str, list[str]] = {}
    for name in MATRIX:
        with tempfile.TemporaryDirectory() as folder:
            found = tried_or_broken(name, Path(folder))
            alike.setdefault(table()[name] if found is None else found.cells, []).append(name)
    rows = [f"| {'; '.join(names)} | {cells} |" for cells, names in alike.items()]
    text: Any = MARKED.sub(lambda m: m[1] + HEAD + "\n".join(rows) + "\n" + m[3], PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
