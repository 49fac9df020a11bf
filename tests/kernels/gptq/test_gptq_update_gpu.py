"""GPTQ on a GPU: the sweep's codes, and layers as good as those of a CPU."""

import pytest
import torch

from anybit.ops.gptq_update import sweep
from anybit.quantization.methods import gptq
from anybit.quantization.methods.grid import Grid
from anybit.scheme import WeightFormat
from cases_calibration import layer_error, sweep_case


@pytest.mark.parametrize("referenced", [False, True])
@pytest.mark.parametrize("channels", [1, 63, 64, 65, 200])
def test_same_codes_as_the_plain_loop(channels, referenced):
    *case, reference = sweep_case(channels, 300)
    origin = reference if referenced else None
    expected = sweep(*case, 7, origin)
    moved = [t.cuda() for t in case]
    moved[1] = moved[1].T.contiguous().T  # like a Cholesky factor
    found = sweep(*moved, 7, None if origin is None else origin.cuda())
    same = (found[0].cpu() == expected[0]).all(0)  # another summation order may round one code of a column differently
    assert float(same.float().mean()) > 0.97
    torch.testing.assert_close(found[1].cpu()[:, same], expected[1][:, same], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("channels", [4, 32, 36, 64, 200])
def test_masks_of_the_plain_loop(channels):
    *case, reference = sweep_case(channels, 300)
    diagonal = torch.rand(channels, generator=torch.Generator().manual_seed(1)) + 0.5
    grid = Grid(3, "asym", None, torch.float32)
    expected = gptq._sparse_sweep(*case, grid, diagonal)
    found = [part.cpu() for part in gptq._sparse_sweep(*(t.cuda() for t in case), grid, diagonal.cuda())]
    same = (found[2] == expected[2]).all(0) & (found[0] == expected[0]).all(0)
    assert float(same.float().mean()) > 0.97
    torch.testing.assert_close(found[1][:, same], expected[1][:, same], rtol=1e-3, atol=1e-3)
    mask = expected[2]
    kept = sweep(*(t.cuda() for t in case), 7, reference.cuda(), mask.cuda())
    plain = sweep(*case, 7, reference, mask)
    assert float((kept[0].cpu() == plain[0]).all(0).float().mean()) > 0.97


@pytest.mark.parametrize("format", [WeightFormat(2, "asym", 64), WeightFormat(4), WeightFormat(4, "asym", 32, True)])
def test_layers_are_as_good_as_on_a_cpu(format):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(600, 200, generator=g) @ torch.randn(200, 200, generator=g)
    weight, hessian = torch.randn(96, 200, generator=g), x.T @ x
    losses = []
    for device in ("cpu", "cuda"):
        found = gptq.quantize(weight.to(device), hessian.to(device), format)
        losses.append(layer_error(weight, found.to("cpu").dequantize(), hessian))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("format", [WeightFormat(3, "asym", 64), WeightFormat(4, "sym", 128), WeightFormat(2)])
def test_recorded_layers_are_the_same_bit_for_bit(format):
    """The first layer of a shape runs eagerly, the second is captured, later ones are replayed."""
    g = torch.Generator().manual_seed(3)
    layers = []
    for _ in range(2):
        x = torch.randn(2000, 320, generator=g) @ torch.randn(320, 320, generator=g)
        layers.append((torch.randn(96, 320, generator=g).cuda(), (x.T @ x / 2000).cuda()))
    found = [gptq.quantize(*layers[i], format) for i in (0, 1, 0, 1, 1)]
    for early, late in ((0, 2), (1, 3), (1, 4)):
        for part in ("words", "scale", "zero"):
            ours, theirs = getattr(found[early], part), getattr(found[late], part)
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)
