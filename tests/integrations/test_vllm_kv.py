"""anybit's KV cache inside vLLM: rows through vLLM's real scheduler, and what is refused. No engine runs."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make vllm makes an environment that has it")

from anybit.integrations.vllm.kv_spec import RowManager
from cases_vllm_rows import LIVES, Life, World

SEEDS, STEPS = 3, 10_000
_steps = dict[str, int]()


@pytest.mark.parametrize("life", LIVES, ids=str)
def test_nothing_is_lost_and_nothing_leaks(life: Life):
    done: Counter[str] = Counter()
    for seed in range(SEEDS):
        done.update(World(replace(life, seed=life.seed + 100 * seed)).live_through())
    _steps[str(life)] = done["steps"]
    assert done["aborted"] > 0
    assert (done["hit tokens"] > 0) == life.caching
    assert (done.get("accepted", 0) > 0) == bool(life.drafts)
    assert done["preempted"] > 0 or not life.longer


def test_so_many_steps_were_taken():
    assert len(_steps) < len(LIVES) or sum(_steps.values()) >= STEPS


@pytest.mark.parametrize(
    ("life", "found"),
    [
        (Life(late=True), "published|page"),
        (replace(LIVES[5], slack=0), "ring|wrong tokens"),
    ],
)
def test_faults_of_a_backend_are_found(life: Life, found: str):
    with pytest.raises(AssertionError, match=found):
        World(life).live_through()


@pytest.mark.parametrize("fault", ["shared", "short", "kept", "forgotten"])
def test_faults_of_the_manager_are_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    """Residuals that two requests share, that are too short, that are never freed, that a freed request still has."""
    plain, missing, pop = RowManager.allocate_new_blocks, RowManager._missing, RowManager.pop_blocks_for_free

    def allocate(self: Any, request_id: str, *args: Any, **kw: Any) -> Any:
        new = plain(self, request_id, *args, **kw)
        first = next(iter(self.req_to_blocks))
        if first != request_id and self.fronts.get(first) and self.fronts.get(request_id):
            self.req_to_blocks[request_id][0] = self.req_to_blocks[first][0]
        return new

    def free(self: Any, request_id: str) -> Any:
        blocks = pop(self, request_id)
        return blocks[:-1] if fault == "kept" and blocks else blocks

    if fault == "shared":
        monkeypatch.setattr(RowManager, "allocate_new_blocks", allocate)
    elif fault == "short":
        monkeypatch.setattr(RowManager, "_missing", lambda self, *args: max(missing(self, *args) - 1, 0))
    elif fault == "kept":
        monkeypatch.setattr(RowManager, "pop_blocks_for_free", free)
    else:
        monkeypatch.setattr(
            RowManager, "pop_blocks_for_free", lambda self, r: super(RowManager, self).pop_blocks_for_free(r)
        )
    with pytest.raises((AssertionError, IndexError)):
        World(Life()).live_through()
