"""Launches of layers: a driver without a GPU that records what it gets, and products without a plan."""

import ctypes
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from anybit import jit, ops
from anybit.choose import dispatch
from anybit.device import Device
from anybit.jit import tensor_map
from anybit.jit.params import layout_of
from anybit.kernels.bitplane.bitplane_layout import PlaneWeight
from anybit.kernels.block import quantize_activations
from anybit.kernels.block.quantize_activations import Packed
from anybit.kernels.multiply import multiply
from anybit.ops import packed, product
from anybit.ops.plans import Rows

launching = importlib.import_module("anybit.jit.launch")  # not the function of that name


class Launched(NamedTuple):
    """A launch: kernel, grid, stream and PDL, and the fields of its parameters as the driver gets them."""

    kernel: jit.Kernel
    grid: tuple[int, int, int]
    how: tuple[int, bool]
    values: dict[str, Any]


class Driver:
    """Records launches, after checking them as CUDA would."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.launches: list[Launched] = []
        self.look: Callable[[dict[str, Any]], None] = lambda values: None
        """Called with each launch's parameters while its tensors are alive; may change what is recorded."""

    def cuLaunchKernelEx(self, config: Any, kernel: jit.Kernel, address: int, extra: int) -> tuple[int]:
        layout = layout_of(kernel.params)
        raw = ctypes.string_at(ctypes.c_void_p.from_address(address).value or 0, layout.size)
        values = dict(zip([field.name for field in layout.fields], layout.packer.unpack(raw), strict=True))
        assert kernel.shared_bytes <= self.device.shared_bytes
        self.look(values)
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        self.launches.append(Launched(kernel, grid, config.how, values))
        return (0,)

    def take(self) -> list[Launched]:
        """The launches since the last time."""
        launches, self.launches = self.launches, []
        return launches


def encode_at(address: int, element_bytes: int, rows: int, columns: int, pitch: int, *box: int) -> bytes:
    """A tensor map that holds its arguments; they must be as the driver accepts them."""
    assert address % 16 == pitch % 16 == 0
    values = address, element_bytes, rows, columns, pitch, *box
    return b"".join(value.to_bytes(8, "little") for value in values).ljust(128, b"\0")


def install(monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a") -> Driver:
    """Launch on a recorder instead of a GPU, from now on; tensors are on the CPU."""
    device = Device.named(arch)
    found = Driver(device)
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: device))
    monkeypatch.setattr(launching, "_device", lambda index: device)
    monkeypatch.setattr(launching, "_function", lambda kernel, index: kernel)
    monkeypatch.setattr(launching, "_launchers", {})
    monkeypatch.setattr(launching, "driver", lambda: found)
    monkeypatch.setattr(launching.Launcher, "_config", lambda self, stream: SimpleNamespace(how=(stream, self.pdl)))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(tensor_map, "encode_at", encode_at)
    dispatch.use()  # forgets plans for other devices
    return found


def multiplied(x: Tensor, layer: ops.Prepared, bias: Tensor | None) -> Tensor:
    """A layer's product of dense rows [m, k] by the kernels that its plan would run, without a plan."""
    spec, (m, k), planes = layer.spec, x.shape, layer.spec.backend == "bitwise"
    asked = product.asked_of(spec, layer.tensors, bias)
    kernel, config = asked.choice(asked.problem(Rows.of(x)))
    given: Tensor | Packed = x
    if spec.activations.quantized:
        problem = quantize_activations.problem_of(x, spec.activations, kernel.traits.target)
        given = Packed(m, k, spec.activations, kernel.traits.target, x.device)
        quantize_activations.launch(problem, quantize_activations.default(problem), given, x)
    y, (first, scale, third, zero) = x.new_empty(m, spec.n), layer.tensors[:4]
    shape = (spec.n, spec.k), spec.weights
    if planes:
        weight: Any = PlaneWeight(first, scale, third, zero if zero.numel() else None, *shape)
    else:
        weight = packed._weight(layer.tensors, spec)
    multiply(kernel, given, weight, y, bias.float() if planes and bias is not None else bias, config)
    return y
