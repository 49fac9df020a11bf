"""Prompts captured as CUDA graphs: the same tokens as from the passes that they replay, whatever ran in between."""

from pathlib import Path

import pytest
import torch
import transformers as hf

import anybit
from cases_cache import GREEDY, SIZES, folder_of, prompt, quantized


@pytest.mark.parametrize("scheme", ["w4a16g32", "w4a8", "w2a2", "w4a16g32-kv4"])
@pytest.mark.parametrize("rows", [1, 3])
def test_replayed_prompts_answer_as_eager_ones(tmp_path: Path, scheme: str, rows: int) -> None:
    sizes = {**SIZES, "max_position_embeddings": 1024}
    model = anybit.fuse(quantized(folder_of(hf.LlamaConfig(**sizes), tmp_path), scheme))
    decoder, call = model._anybit_decoder, {**GREEDY, "cache_implementation": "static"}
    lengths = 9, 119, 128, 33, 111, 160
    first = {}
    for turn in range(4):  # on a fresh cache all is eager; then padded; captured; replayed
        for tokens in lengths:
            ids = prompt(rows, tokens)
            if turn == 0:
                decoder.forget()
            found = model.generate(ids, **call)
            if turn < 2:
                first[turn, tokens] = found
            else:
                assert torch.equal(found, first[1, tokens])
    (graphs,) = decoder.prompts.values()
    assert set(graphs) == {32, 64, 128, 160} and all(graph.graph is not None for graph in graphs.values())
    if "a16" in scheme:  # other kernels round otherwise, which may part near-ties later on, and turns codes
        assert all(torch.equal(first[0, tokens][:, tokens], first[1, tokens][:, tokens]) for tokens in lengths)
    _, padded, again = [model.generate(prompt(rows, 601), **call) for _ in range(3)]  # not captured
    assert torch.equal(padded, again)
    ((long, graph),) = [one for graphs in decoder.prompts.values() for one in graphs.items()]
    assert long == 0 and graph.ids.shape == (rows, 608) and graph.graph is None
