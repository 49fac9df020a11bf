"""Launches of layers: a driver without a GPU that records what it gets, and products without a plan."""

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import replace
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
from anybit.jit.tensor_map import Matrix
from anybit.kernels.bitplane.bitplane_layout import PlaneWeight
from anybit.kernels.block import quantize_activations
from anybit.kernels.block.quantize_activations import Packed
from anybit.kernels.multiply import multiply
from anybit.ops import packed, product
from anybit.ops.backend import LinearSpec
from anybit.ops.plans import PLANS, Rows
from anybit.scheme import Scheme
from cases import random_weight

launching = importlib.import_module("anybit.jit.launch")  # not the function of that name


class Launched(NamedTuple):
    """A launch: kernel, grid, stream and PDL, and the fields of its parameters as the driver gets them."""

    kernel: jit.Kernel
    grid: tuple[int, int, int]
    how: tuple[int, bool]
    values: dict[str, Any]


class _Attribute:
    """A launch attribute, or an enumeration: whatever is asked of it."""

    def __getattr__(self, name: str) -> "_Attribute":
        self.__dict__[name] = _Attribute()
        return self.__dict__[name]


class Driver(SimpleNamespace):
    """The part of cuda-bindings' driver that launches use. Records launches, after checking them as CUDA would."""

    CUlaunchConfig, CUlaunchAttribute = SimpleNamespace, _Attribute
    CUlaunchAttributeID = CUstreamCaptureMode = CUfunction_attribute = _Attribute()
    CUstream = CUfunction = int

    def __init__(self, device: Device) -> None:
        self.device = device
        self.launches: list[Launched] = []
        self.kernels: list[jit.Kernel] = []
        self.look: Callable[[dict[str, Any]], None] = lambda values: None
        """Called with each launch's parameters while its tensors are alive; may change what is recorded."""

    def cuLibraryLoadData(self, cubin: jit.Kernel, *_: object) -> tuple[int, int]:
        self.kernels.append(cubin)
        return 0, len(self.kernels) - 1

    def cuLibraryGetKernel(self, library: int, name: bytes) -> tuple[int, int]:
        return 0, library

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuThreadExchangeStreamCaptureMode(self, mode: object) -> tuple[int, object]:
        return 0, mode

    def cuKernelSetAttribute(self, attribute: object, value: int, kernel: int, device: int) -> tuple[int]:
        assert value <= self.device.shared_bytes
        return (0,)

    def cuLaunchKernelEx(self, config: Any, function: int, address: int, extra: int) -> tuple[int]:
        kernel = self.kernels[function]
        layout = layout_of(kernel.params)
        raw = ctypes.string_at(ctypes.c_void_p.from_address(address).value or 0, layout.size)
        values = dict(zip([field.name for field in layout.fields], layout.packer.unpack(raw), strict=True))
        assert config.sharedMemBytes == kernel.shared_bytes <= self.device.shared_bytes
        assert config.blockDimX == kernel.threads and len(config.attrs) - config.numAttrs in (0, 1)
        self.look(values)
        pdl = config.numAttrs > (kernel.cluster > 1)
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        self.launches.append(Launched(kernel, grid, (config.hStream, pdl), values))
        return (0,)

    def take(self) -> list[Launched]:
        """The launches since the last time."""
        launches, self.launches = self.launches, []
        return launches


def encoded(matrix: Matrix, address: int) -> bytes:
    """A tensor map that holds what it is made of; that must be as the driver accepts it."""
    assert address % 16 == matrix.pitch % 16 == 0
    sizes = matrix.element_bytes, matrix.rows, matrix.columns, matrix.pitch, matrix.box_columns, matrix.box_rows
    return b"".join(value.to_bytes(8, "little") for value in (address, *sizes)).ljust(128, b"\0")


def install(monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a") -> Driver:
    """Launch on a recorder instead of a GPU, from now on; tensors are on the CPU, and kernels are compiled already."""
    device = Device.named(arch)
    found = Driver(device)
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: device))
    monkeypatch.setattr(Device, "at", staticmethod(lambda index: device))
    monkeypatch.setattr(launching, "_launchers", {})
    monkeypatch.setattr(launching, "cached", lambda kernel, arch: SimpleNamespace(cubin=kernel, entry=kernel.entry))
    monkeypatch.setattr(launching, "driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(tensor_map.Matrix, "_encoded", encoded)
    PLANS.clear()  # those for other devices; the maps, which take longer to read than most tests, stay
    return found


def prepared(text: str, n: int, k: int, seed: int = 0, ordered: bool = False) -> ops.Prepared:
    """A random weight for the backend that usually runs its scheme. ordered: in an activation order."""
    scheme = Scheme.parse(text)
    name, weight = "packed" if scheme.activations.bits > 4 else "bitwise", random_weight(n, k, scheme.weights, seed)
    if ordered:
        weight = replace(weight, group_index=torch.arange(k, dtype=torch.int32) % scheme.weights.groups(k))
    tensors = ops.backends[name].prepare(weight, scheme.activations)
    return ops.Prepared(tensors, LinearSpec(name, n, k, scheme.weights, scheme.activations))


def multiplied(x: Tensor, layer: ops.Prepared, bias: Tensor | None) -> Tensor:
    """A layer's product of dense rows [m, k] by the kernels that its plan would run, without a plan."""
    spec, (m, k), planes = layer.spec, x.shape, layer.spec.backend == "bitwise"
    asked = product.asked_of(spec, layer.tensors, bias)
    kernel, config = dispatch.chosen(asked.problem(Rows.of(x)), asked.layout, spec.fused)
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
