"""Machine code of the router: nothing spills, logits on tensor cores."""

from dataclasses import replace

import pytest

from anybit.device import Device
from anybit.kernels.experts.router import router
from machine_code import check

SHAPES = [
    (1, 2048, 128, 8),
    (64, 2048, 128, 8),
    (64, 4096, 8, 2),
    (64, 7168, 256, 8),
    (64, 2048, 512, 10),
    (1, 4096, 512, 10),
]


@pytest.mark.parametrize(("tokens", "hidden", "experts", "top"), SHAPES)
@pytest.mark.parametrize("norm", [True, False])
def test_nothing_spills(tokens: int, hidden: int, experts: int, top: int, norm: bool) -> None:
    problem = router.Problem(tokens, hidden, experts, top, norm)
    check(router.kernel(router.config_of(problem)), "sm_90a", has="HMMA")


@pytest.mark.parametrize("device", [replace(Device.named("sm_90a"), sms=78), Device.named("sm_120a")], ids=str)
def test_clusters_are_of_eight_where_sixteen_may_not_fit(device: Device) -> None:
    config = router.config_of(router.Problem(1, 2880, 128, 4, True, device=device))
    assert config.cluster == 8
    check(router.kernel(config), "sm_90a", has="HMMA")


@pytest.mark.parametrize("experts", [8, 128, 512])
def test_choosing_by_logits_calls_nothing(experts: int) -> None:
    problem = router.Problem(4096, 2048, experts, 8)
    check(router.launch_largest(problem, 0, 0, 0).kernel, "sm_90a", has="REDUX")
