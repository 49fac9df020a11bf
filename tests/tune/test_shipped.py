"""The maps shipped with anybit: complete, and legal for all their points."""

from pathlib import Path

import pytest
import torch

from anybit.choose.policy import SHIPPED, Policy, file_name, read
from anybit.choose.registry import GRID
from anybit.choose.space import preserves_pdl_overlap
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme

MAPS = sorted(SHIPPED.glob("*.json"))
_HOLD = 0.75
"""Minimum share of a shipped map's points that must match the current kernels; the rest runs by built-in choices."""


def stale(policy: Policy) -> str | None:
    """What to do about a map with too many points of changed kernels; None if it is fine."""
    if policy.current().points >= _HOLD * policy.points:
        return None
    return (
        f"{policy.path}: {policy.why_hint(policy.origin.gpu)}; nothing uses these any more. Keep those with "
        "unchanged machine code (tools/tuning/refresh_policy.py, no GPU), and remeasure the rest "
        "(tools/tuning/build_policy.py measure, on the map's GPU)"
    )


@pytest.mark.parametrize("path", MAPS, ids=lambda path: path.name)
def test_most_points_are_of_the_kernels_as_they_are(path: Path) -> None:
    reason = stale(read(path))
    if reason is not None:
        pytest.fail(reason)


def test_a_map_that_has_gone_stale_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    older = read(SHIPPED / "nvidia-h200.json")
    monkeypatch.setitem(older.origin.kernels, "sm90_packed_gemm", 0)
    reason = stale(older)
    assert reason is not None
    assert "nvidia-h200.json" in reason and "(sm90_packed_gemm)" in reason and "refresh_policy.py" in reason


@pytest.mark.parametrize("path", MAPS, ids=lambda path: path.name)
def test_every_config_is_legal_where_it_was_measured(path: Path) -> None:
    policy = read(path)
    assert path.name == file_name(policy.origin.gpu)
    device = Device.named(policy.origin.arch)
    assert device.name == policy.origin.gpu
    seen = 0
    for (scheme, dtype, n, k), points in policy.layers.items():
        parsed = Scheme.parse(scheme)
        for m, point in points.items():
            assert m in GRID
            product = LinearProblem(m, n, k, parsed.weights, parsed.activations, getattr(torch, dtype), device)
            seen += 1
            for measured in point.strategies.values():
                assert measured.us < point.default_us
                candidate = measured.candidate(product)  # raises if illegal
                assert preserves_pdl_overlap(product, candidate)
    assert seen == policy.points > 0
