"""Every function of ptx.cuh on hardware against the emulation: what emulator tests prove holds on hardware."""

import pytest
import torch

import emulate
from anybit import jit
from emulator.instructions import CASES, Case, Params


@pytest.mark.parametrize("case", CASES, ids=str)
def test_hardware_agrees_with_the_emulation(case: Case) -> None:
    host, device = case.inputs(), case.inputs()
    emulate.run(case.kernel, host, (case.cluster, 1, 1))
    on_gpu = Params(*(t.cuda() for t in (device.x, device.y, device.z)))
    jit.launch(case.kernel, on_gpu, (case.cluster, 1, 1))
    for name in ("y", "z"):
        emulated, measured = getattr(host, name), getattr(on_gpu, name).cpu()
        if case.tolerance:
            a, b = emulated.view(torch.float32).double(), measured.view(torch.float32).double()
            per_result = (a - b).view(-1, case.threads) if name == "y" else a - b
            scale = a.view(-1, case.threads).abs().amax(-1, keepdim=True) if name == "y" else 1
            assert ((per_result.abs() / scale) <= case.tolerance).all(), (name, (per_result.abs() / scale).max())
        else:
            wrong = (emulated != measured).nonzero()
            results = sorted({int(i[-1]) // case.threads for i in wrong})
            assert not len(wrong), f"{name}: {len(wrong)} words differ, in results {results[:20]}"
