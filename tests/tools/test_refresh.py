"""The map after a family's revision was raised: points whose kernels have unchanged machine code still hold."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anybit.choose.builtin import builtin
from anybit.choose.policy import Measured, Origin, Point, Policy
from anybit.choose.space import space
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def refresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "tuning"))
    return importlib.import_module("refresh_policy")


def older_map() -> tuple[Policy, LinearProblem, LinearProblem]:
    """Two points, of sm90_packed_skinny and of sm90_packed_gemm, of older kernels."""
    scheme, device = Scheme.parse("w4a8"), Device.named("sm_90a")
    one, many = (LinearProblem(m, 4096, 4096, scheme.weights, scheme.activations, device=device) for m in (1, 64))
    changed = {"sm90_packed_skinny": 0, "sm90_packed_gemm": 0}
    found = Policy(replace(Origin.here("NVIDIA H200", "sm_90a"), kernels=changed))
    for product, kernel in ((one, "sm90_packed_skinny"), (many, "sm90_packed_gemm")):
        chosen = next(c for c in space(product).candidates if c.kernel == kernel)
        found.put(product, Point(6.0, {chosen.strategy: Measured.of(chosen, 5.0)}))
    return found, one, many


def test_points_of_the_same_machine_code_hold(refresh: Any) -> None:
    older, one, many = older_map()
    assert older.current().points == 0
    now = refresh.codes(older, 1)
    assert all(len(codes) >= 1 for codes in now.values()) and len(now) >= 2
    kept = refresh.still_hold(older, now, now)
    assert kept.points == kept.current().points == 2 and kept.origin.date == older.origin.date
    changed = {name: ["another"] if " sm90_packed_gemm " in name else codes for name, codes in now.items()}
    assert [bool(refresh.still_hold(older, changed, now).exact(p)) for p in (one, many)] == [True, False]
    illegal = {name: [] for name in now}
    assert refresh.still_hold(older, illegal, illegal).points == 0


def test_a_config_has_other_kernels_at_other_sizes(refresh: Any) -> None:
    """A config does not say what quantizes the tokens: equal fields can mean different kernels."""
    _, _, few = older_map()
    longer = replace(few, k=14336)
    measured = Measured.of(builtin(few), 5.0)
    kernels = [set(measured.candidate(one).kernels(one)) for one in (few, longer)]
    assert kernels[0] != kernels[1]
    assert refresh.name_of(few, measured) != refresh.name_of(longer, measured)
