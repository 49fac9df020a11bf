"""The map after a change of kernels: points whose kernels have the same machine code still hold (benchmarks)."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anybit.device import Device
from anybit.scheme import Scheme
from anybit.tune import policy as policies
from anybit.tune.policy import Measured, Origin, Point, Policy, read
from anybit.tune.registry import LinearProblem
from anybit.tune.space import builtin, space

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def refresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("dispatch_refresh")


def older_map() -> tuple[Policy, LinearProblem, LinearProblem]:
    """Two points, of sm90_packed_skinny and of sm90_packed_gemm, measured with other sources than these."""
    scheme, device = Scheme.parse("w4a8"), Device.named("sm_90a")
    one, many = (LinearProblem(m, 4096, 4096, scheme.weights, scheme.activations, device=device) for m in (1, 64))
    found = Policy(
        replace(Origin.here("NVIDIA H200", "sm_90a"), kernels={"sm90_packed_skinny": 0, "sm90_packed_gemm": 0})
    )
    for product, kernel in ((one, "sm90_packed_skinny"), (many, "sm90_packed_gemm")):
        chosen = next(c for c in space(product).candidates if c.kernel == kernel)
        measured, own = Measured.of(chosen, product, 5.0), Measured.of(builtin(product), product, 6.0)
        found.put(product, Point(6.0, 1.0, {chosen.strategy: measured}, own))
    return found, one, many


def test_points_of_the_same_machine_code_hold(refresh: Any, tmp_path: Path) -> None:
    older, one, many = older_map()
    assert older.current().points == 0
    now = refresh.codes(older, 1)
    assert all(len(codes) >= 1 for codes in now.values()) and len(now) >= 2
    kept = refresh.still_hold(older, now, now)
    assert kept.points == kept.current().points == 2 and kept.origin.date == older.origin.date
    changed = {name: ["another"] if " sm90_packed_gemm " in name else codes for name, codes in now.items()}
    assert [bool(refresh.still_hold(older, changed, now).exact(p)) for p in (one, many)] == [True, False]
    lacking = replace(older, layers={key: dict(points) for key, points in older.layers.items()})
    point = lacking.exact(many)
    assert point is not None and point.default is not None
    lacking.put(many, replace(point, default=replace(point.default, fields=point.default.fields[:-1])))
    names = refresh.codes(lacking, 1)
    assert refresh.still_hold(lacking, names, names).exact(many) == kept.exact(many), "a field added since"
    illegal = {name: [] for name in now}
    assert refresh.still_hold(older, illegal, illegal).points == 0

    path = tmp_path / "map.json"
    path.write_text(policies.text(older), encoding="utf-8")
    command = [sys.executable, str(ROOT / "benchmarks" / "dispatch_refresh.py")]
    subprocess.run(
        [*command, "keep", "--map", str(path), "--out", str(path), "--since", str(ROOT), "--jobs", "1"], check=True
    )
    assert read(path).current().points == 2


def test_a_config_has_other_kernels_at_other_sizes(refresh: Any) -> None:
    """What codes the tokens is not in a config: by its fields alone 256 of the shipped map's 1269 stood for several."""
    _, _, few = older_map()
    longer = replace(few, k=14336)
    measured = Measured.of(builtin(few), few, 5.0)
    kernels = [set(measured.candidate(one).kernels(one)) for one in (few, longer)]
    assert kernels[0] != kernels[1]
    assert refresh.name_of(few, measured) != refresh.name_of(longer, measured)


def test_what_is_measured_is_asked_for(refresh: Any, tmp_path: Path) -> None:
    assert {scheme for scheme, _ in refresh.ORDER} >= {"w4a16g128", "w4a8", "w2a4", "w4a4", "w2a2"}
    assert refresh.claim(tmp_path, "one") and not refresh.claim(tmp_path, "one")
    command = [sys.executable, str(ROOT / "benchmarks" / "dispatch_refresh.py"), "measure", "--work", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "--out" in done.stderr
    assert json.dumps(sorted(refresh.RANKS)) == '["halves", "powers", "quarters"]'


def test_a_check_that_was_broken_off_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    check = importlib.import_module("dispatch_check")
    marks, path = {"gpu": "one", "commit": "a"}, tmp_path / "rows.json"
    assert check._rows_of(path, 1, marks) == []
    row = {"seed": 1, **marks}
    path.write_text(json.dumps([row, row | {"seed": 2}, row | {"commit": "b"}]))
    assert check._rows_of(path, 1, marks) == [row]
