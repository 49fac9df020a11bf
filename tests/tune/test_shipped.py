"""The maps shipped with anybit: complete, and legal for all their points."""

from pathlib import Path

import pytest
import torch

from anybit.choose.policy import SHIPPED, file_name, read
from anybit.choose.space import GRID
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme

MAPS = sorted(SHIPPED.glob("*.json"))


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
            for name, measured in point.strategies.items():
                assert name == measured.candidate(product).strategy  # raises if illegal
            assert point.strategies
    assert seen == policy.points > 0
