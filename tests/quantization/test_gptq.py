"""GPTQ on small layers: it beats round-to-nearest where it must, for every code, order and odd shape."""

import itertools

import pytest
import torch

from anybit.codes.rtn import quantize_weight
from anybit.errors import CalibrationError, LayerError
from anybit.quantization.methods import gptq
from anybit.quantization.methods.grid import Grid
from anybit.scheme import Scheme, WeightFormat
from cases_calibration import layer_error


def correlated_inputs(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    """Inputs with correlated channels and a few outliers, as in a language model."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=g) / k**0.5 + torch.eye(k) * 0.3
    x = torch.randn(rows, k, generator=g) @ mix
    x[:, :: max(k // 5, 1)] *= 6
    return x


def layer(n: int = 24, k: int = 96, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed + 100)
    x = correlated_inputs(4 * k, k, seed)
    return torch.randn(n, k, generator=g), x.T @ x


def loss(weight, hessian, quantized) -> float:
    return layer_error(weight, quantized.dequantize(), hessian)


@pytest.mark.parametrize("order", ["natural", "grouped", "sorted"])
@pytest.mark.parametrize("code", ["sym", "asym", "bipolar"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_beats_nearest_rounding(bits, code, order):
    weight, hessian = layer()
    format = WeightFormat(bits, code, 32)
    nearest = loss(weight, hessian, quantize_weight(weight, format))
    assert loss(weight, hessian, gptq.quantize(weight, hessian, format, gptq.GPTQ(order))) < nearest


@pytest.mark.parametrize("k", [33, 64, 72, 100])
@pytest.mark.parametrize("order", ["natural", "grouped", "sorted"])
def test_ragged_last_group(k, order):
    weight, hessian = layer(k=k)
    for group in (32, 64, None):
        format = WeightFormat(3, "asym", group)
        quantized = gptq.quantize(weight, hessian, format, gptq.GPTQ(order))
        assert quantized.scale.shape == (24, format.groups(k))
        assert loss(weight, hessian, quantized) < loss(weight, hessian, quantize_weight(weight, format))


def test_only_sorted_order_scatters_groups():
    weight, hessian = layer()
    format = WeightFormat(4, "asym", 32)
    assert gptq.quantize(weight, hessian, format, gptq.GPTQ("grouped")).group_index is None
    index = gptq.quantize(weight, hessian, format, gptq.GPTQ("sorted")).group_index
    assert index is not None and index.bincount().tolist() == [32, 32, 32]
    assert index[hessian.diagonal().argmax()] == 0


def test_refinement_never_hurts():
    weight, hessian = layer()
    format = WeightFormat(2, "asym", 32)
    losses = [loss(weight, hessian, gptq.quantize(weight, hessian, format, gptq.GPTQ(passes=p))) for p in (0, 1, 2, 6)]
    # The refined error includes the damping, the measured one does not.
    assert all(later <= earlier * 1.01 for earlier, later in itertools.pairwise(losses))
    assert losses[-1] < 0.95 * losses[0]


def test_matches_exhaustive_search_on_a_tiny_layer():
    g = torch.Generator().manual_seed(3)
    x = correlated_inputs(50, 6, 3)
    weight, hessian = torch.randn(4, 6, generator=g), x.T @ x
    format = WeightFormat(2, "sym", None)
    quantized = gptq.quantize(weight, hessian, format, gptq.GPTQ(damping=1e-6, passes=8))
    levels = torch.cartesian_prod(*[torch.arange(4.0)] * 6)
    for row in range(4):
        values = (levels - 2) * quantized.scale[row].float()
        difference = values - weight[row]
        best = ((difference @ hessian) * difference).sum(1).min()
        ours = quantized.dequantize()[row] - weight[row]
        assert float(ours @ hessian @ ours) <= 2.0 * float(best)


def test_dead_inputs_quantize_weight():
    weight, hessian = layer()
    dead = torch.tensor([0, 40, 95])
    hessian[dead], hessian[:, dead] = 0, 0
    quantized = gptq.quantize(weight, hessian, WeightFormat(4, "asym", 32))
    step = quantized.scale.float()[:, dead // 32]
    clipped = (quantized.codes()[:, dead] % 15) == 0
    error = (quantized.dequantize() - weight)[:, dead].abs()
    assert bool(((error <= 0.501 * step) | clipped).all())


def test_singular_hessian_is_damped():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    x = correlated_inputs(3, 64)  # rank 3
    format = WeightFormat(3, "asym", 32)
    quantized = gptq.quantize(weight, x.T @ x, format, gptq.GPTQ(damping=1e-9))
    assert loss(weight, x.T @ x, quantized) < loss(weight, x.T @ x, quantize_weight(weight, format))


def test_constant_and_zero_rows_stay_finite():
    weight, hessian = layer()
    weight[0], weight[1] = 0, 1.5
    for code in ("sym", "asym", "bipolar"):
        values = gptq.quantize(weight, hessian, WeightFormat(3, code, 32)).dequantize()
        assert bool(values.isfinite().all())
        assert float(values[0].abs().max()) < 1e-3


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5])
def test_small_weights_of_float16_lose_no_more_than_large_ones(size, bits):
    """Their scales are below float16's smallest normal number."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(*shape, generator=generator) for shape in ((16, 128), (512, 128)))
    weight, hessian = (weight * size).half(), x.T @ x / 512
    format = WeightFormat(bits, "sym", 64)
    found = (quantize_weight(weight, format), gptq.quantize(weight, hessian, format))
    nearest, ours = (layer_error(weight.float(), one.dequantize(torch.float32), hessian) for one in found)
    assert ours < nearest


@pytest.mark.parametrize("broken", ["nan weight", "nan hessian", "never reached", "not positive", "shape"])
def test_bad_input_is_named(broken):
    weight, hessian = layer()
    if broken == "nan weight":
        weight[3, 4] = torch.nan
    elif broken == "nan hessian":
        hessian[3, 4] = torch.inf
    elif broken == "never reached":
        hessian.zero_()
    elif broken == "not positive":
        hessian = hessian - 3 * torch.linalg.eigvalsh(hessian)[-1] * torch.ones(96, 96) / 96
        hessian.diagonal().abs_()
    else:
        hessian = hessian[:5, :5]
    with pytest.raises(CalibrationError, match=r"model\.layers\.3\.q_proj"):
        gptq.quantize(weight, hessian, WeightFormat(4, "asym", 32), name="model.layers.3.q_proj")


@pytest.mark.parametrize("code", ["sym", "asym", "bipolar"])
def test_candidates_reach_the_extremes_of_a_group(code):
    weight = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    grid = Grid.of(WeightFormat(4, code, 64))
    scale, zero = grid.candidates(weight, torch.tensor([1.0]))
    error = (grid.codes(weight, scale[0], zero[0]) - zero[0]) * scale[0] - weight
    most = 1.01 if code == "sym" else 0.51  # a symmetric grid is one step short on one side
    assert bool((error.abs() <= most * scale[0].abs()).all())


@pytest.mark.parametrize("options", [{"order": "random"}, {"damping": 0.0}, {"damping": 2.0}, {"passes": -1}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        gptq.GPTQ(**options)


@pytest.mark.parametrize(
    ("bits", "code", "group"), [(4, "sym", 32), (4, "asym", 32), (3, "asym", None), (2, "sym", 64)]
)
@pytest.mark.parametrize("k", [96, 100])
def test_sparse_layers_beat_magnitude_masks(bits, code, group, k):
    weight, hessian = layer(k=k)
    format = WeightFormat(bits, code, group, sparse=True)
    quantized = gptq.quantize(weight, hessian, format)
    values = quantized.dequantize()
    assert bool(((values.view(24, -1, 4) != 0).sum(-1) <= 2).all())
    assert loss(weight, hessian, quantized) < loss(weight, hessian, quantize_weight(weight, format))


def test_sparse_layers_want_fours():
    with pytest.raises(LayerError, match="multiple of 4 inputs, and a layer has 66"):
        gptq.quantize(*layer(k=66), WeightFormat(4, "sym", 32, sparse=True))


def test_two_of_four_are_kept_by_what_losing_them_costs():
    weight = torch.tensor([[1.0], [3.0], [2.0], [4.0]])
    diagonal = torch.tensor([0.1, 1.0, 1.0, 1.0])  # the first is small, but nothing can compensate for it
    assert gptq.keep_two(weight, diagonal)[:, 0].tolist() == [True, False, False, True]


@pytest.mark.parametrize("k", [64, 72])
@pytest.mark.parametrize("text", ["w2a16g32asym", "w3a16", "w1a16g32", "w2a16g32s24"])
def test_nearest_clips_for_the_least_squares(text, k):
    format = Scheme.parse(text).weights
    weight = torch.randn(16, k, generator=torch.Generator().manual_seed(0))
    found = gptq.nearest(weight, format, torch.float32)
    spared = quantize_weight(weight, format)
    assert (found.shape, found.scale.shape, found.format) == (spared.shape, spared.scale.shape, format)
    lost, more = ((part.dequantize() - weight).square().sum() for part in (found, spared))
    assert float(lost) < 1.02 * float(more)
    with pytest.raises(CalibrationError, match="weights of a layer hold NaN"):
        gptq.nearest(weight / 0, format, torch.float32)
