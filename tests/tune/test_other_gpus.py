"""What runs on GPUs that no map knows, by their figures: legal, by kernels of the architecture; and their roofline."""

import functools
from types import SimpleNamespace

import pytest
import torch

from anybit.choose.builtin import builtin
from anybit.choose.dispatch import Dispatcher
from anybit.choose.families import FAMILIES
from anybit.choose.policy import SHIPPED, read
from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme
from anybit.tune.roofline import floor_us

FIGURES = {
    # capability, SMs, most shared memory of a block, memory clock in kHz, bus in bits; the data sheet's TB/s
    "NVIDIA A100-SXM4-40GB": (80, 108, 166912, 1215000, 5120, 1.555),
    "NVIDIA A100-SXM4-80GB": (80, 108, 166912, 1593000, 5120, 2.039),
    "NVIDIA L40S": (89, 142, 101376, 9001000, 384, 0.864),
    "NVIDIA GeForce RTX 4090": (89, 128, 101376, 10501000, 384, 1.008),
    "NVIDIA GeForce RTX 5090": (120, 170, 101376, 14001000, 512, 1.792),
    "NVIDIA H100 PCIe": (90, 114, 232448, 1593000, 5120, 2.039),
    "NVIDIA B200": (100, 148, 232448, 3996000, 8192, 8.0),
}
LAYERS = ((5120, 25600), (1000, 1032))
TOKENS = (1, 16, 2048)
SCHEMES = ("w2a16g128", "w4a16g32e2m1", "w8a16e4m3", "w4a8", "w2a2")
WGMMA = ("sm90_packed_gemm", *(name for name in FAMILIES if name.startswith("sm90_bitplane")))


@functools.cache
def dispatcher(name: str) -> Dispatcher:
    """The shipped map, as a GPU without one reads it."""
    return Dispatcher(name, [read(SHIPPED / "nvidia-h200.json")])


@pytest.fixture(params=FIGURES)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A GPU as the driver describes it."""
    capability, sms, shared, clock, bus, _ = FIGURES[request.param]
    found = SimpleNamespace(
        name=request.param, major=capability // 10, minor=capability % 10, multi_processor_count=sms,
        shared_memory_per_block_optin=shared, memory_clock_rate=clock, memory_bus_width=bus,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    return Device.at.__wrapped__(0)


def problems(gpu: Device, scheme: str) -> list[LinearProblem]:
    parsed = Scheme.parse(scheme)
    return [LinearProblem(m, n, k, parsed.weights, parsed.activations, device=gpu) for n, k in LAYERS for m in TOKENS]


def test_figures_are_those_of_the_gpu(gpu: Device) -> None:
    capability, sms, shared, *_, promised = FIGURES[gpu.name]
    assert (gpu.capability, gpu.sms, gpu.shared_bytes) == (capability, sms, shared)
    assert 0.9 < gpu.bandwidth / promised * 1e-12 < 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_choices_are_legal_and_fit(gpu: Device, scheme: str) -> None:
    by = dispatcher(gpu.name)
    for p in problems(gpu, scheme)[gpu.sms // 2 % 2 :: 2]:
        for one in (builtin(p), by.choose(p).candidate):
            lacks = gpu.capability < int(one.kernel[2:4]) or (gpu.arch != "sm_90a" and one.kernel in WGMMA)
            lacks |= gpu.capability >= 100 and "bitplane" in one.kernel
            assert not lacks, f"{gpu.arch} has no instructions for {one.kernel}, which runs {p}"
            assert one.why_not(p) is None and one.shared_bytes <= gpu.shared_bytes
            if one.kernel == "sm80_packed_gemm":  # its blocks wait for each other
                assert FAMILIES[one.kernel].module.grid(p, one.config)[0] <= gpu.sms


def test_floors_follow_the_figures(gpu: Device) -> None:
    """No product is faster than reading its weights, or than the tensor cores; many tokens take longer than few."""
    for p in problems(gpu, "w4a16g128"):
        weights = p.n * p.k * 4.125 / 8
        reading = weights / gpu.bandwidth * 1e6
        assert floor_us(p) > (0.8 if weights < 20e6 else 0.99) * reading, "small reads overlap the kernel before"
    n, k = LAYERS[0]
    few, many = (floor_us(p) for p in problems(gpu, "w4a16g128") if (p.n, p.k) == (n, k) and p.m in (1, 2048))
    assert many > 5 * few
    promised = {80: 312, 89: 366, 90: 990, 100: 2300, 120: 420}[gpu.capability]  # dense fp16, TFLOPS
    assert 0.95 < many / (2 * 2048 * n * k / promised * 1e-6) < 1.4
