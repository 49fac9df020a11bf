"""The maps that come with anybit: whole, and legal wherever they speak."""

from pathlib import Path

import pytest
import torch

from anybit.device import Device
from anybit.scheme import Scheme
from anybit.tune.families import GRID, Product
from anybit.tune.policy import SHIPPED, file_name, read

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
            product = Product(m, n, k, parsed.weights, parsed.activations, getattr(torch, dtype), device)
            assert min(measured.us for measured in point.strategies.values()) <= point.default_us * 1.001
            seen += 1
            for measured in point.strategies.values():
                measured.candidate(product)  # raises where it is not legal
    assert seen == policy.points > 0
