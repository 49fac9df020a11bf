"""What anybit needs to know about a GPU to choose kernels and configs: architecture, SMs, shared memory, bandwidth."""

import os
from dataclasses import dataclass, replace
from functools import cache

import torch

from anybit.errors import KernelError


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU to plan for; it need not be present.

    arch: "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a" or "sm_120a".
    sms: streaming multiprocessors.  shared_bytes: most shared memory a block can use.
    bandwidth: achievable read bandwidth in bytes/s.
    """

    arch: str
    name: str
    sms: int
    shared_bytes: int
    bandwidth: float

    @property
    def capability(self) -> int:
        """The compute capability as one number: 90 for sm_90a."""
        return int(self.arch.removeprefix("sm_").rstrip("af"))

    def why_not_shared(self, needed: int) -> str | None:
        """Why a block cannot use ``needed`` bytes of shared memory, in a sentence; None if it can."""
        if needed <= self.shared_bytes:
            return None
        return f"{needed} bytes of shared memory are more than the {self.shared_bytes} of a block of {self.arch}"

    def clusters(self, blocks: int) -> int:
        """Clusters of 1, 2 or 4 blocks, one per SM, that run at a time: of an H200's 132 SMs 66 of two, 30 of four."""
        return max(1, self.sms // blocks - (self.sms // 40 if blocks == 4 else 0))

    @staticmethod
    def named(arch: str) -> "Device":
        """A typical GPU of an architecture, to plan and compile for. Raises KernelError for an unknown one."""
        if arch not in _TYPICAL:
            raise KernelError(f"architecture {arch!r} is not known; anybit knows {', '.join(_TYPICAL)}")
        return _TYPICAL[arch]

    @staticmethod
    def of(tensor: torch.Tensor) -> "Device":
        """The GPU that a tensor lives on. Raises KernelError for a CPU tensor or an unknown architecture."""
        if not tensor.is_cuda:
            raise KernelError(f"the tensor is on {tensor.device}, and kernels need a CUDA device")
        return Device.at(tensor.device.index if tensor.device.index is not None else torch.cuda.current_device())

    @staticmethod
    @cache
    def at(index: int) -> "Device":
        """A GPU of this machine. Raises KernelError for an unknown architecture."""
        found = torch.cuda.get_device_properties(index)
        arch = f"sm_{found.major}{found.minor}"
        typical = next((device for device in _TYPICAL.values() if device.arch.rstrip("a") == arch), None)
        if typical is None:
            raise KernelError(f"{found.name} is {arch}, and anybit has kernels for {', '.join(_TYPICAL)}")
        shared = int(found.shared_memory_per_block_optin)  # type: ignore[attr-defined]
        transfers = 2e3 * found.memory_clock_rate  # a second: two a clock, which is in kHz
        bandwidth = _REACHED * transfers * found.memory_bus_width / 8
        sms = found.multi_processor_count
        return replace(typical, name=found.name, sms=sms, shared_bytes=shared, bandwidth=bandwidth)


_REACHED = 0.97
"""Share of the data sheet's bandwidth that large reads reach on an H200 (4.67 TB/s); other GPUs were not measured."""
_TYPICAL = {
    device.arch: device
    for device in (
        Device("sm_80", "NVIDIA A100-SXM4-80GB", 108, 166912, 1.8e12),
        Device("sm_86", "NVIDIA GeForce RTX 3090", 82, 101376, 0.84e12),
        Device("sm_89", "NVIDIA GeForce RTX 4090", 128, 101376, 0.91e12),
        Device("sm_90a", "NVIDIA H200", 132, 232448, 4.67e12),
        Device("sm_100a", "NVIDIA B200", 148, 232448, 7.2e12),
        Device("sm_103a", "NVIDIA B300", 148, 232448, 7.2e12),
        Device("sm_120a", "NVIDIA GeForce RTX 5090", 170, 101376, 1.6e12),
    )
}


def memory_of(device: torch.device) -> int:
    """Total memory of a device in bytes, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def checked_device(device: object) -> str:
    """The device's name, or the default one for None. Raises KernelError if it does not exist."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device if isinstance(device, torch.device) else str(device))
    except RuntimeError:
        wanted = torch.device("meta")
    if wanted.type == "meta":  # shapes without values
        raise KernelError(f"device {device!r} is unknown; write cpu, cuda, or cuda:1 for the second GPU")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise KernelError(
            f"device {str(device)!r} does not exist: torch sees {torch.cuda.device_count()} GPUs; cpu always works"
        )
    return str(device)
