"""The reference linear layer against exact integers, for every pair of widths, code and ragged shape."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import PAIRS, dense_formats, generator, random_weight, seeds

from anybit.codes import reference
from anybit.errors import LayerError
from anybit.scheme import CODES, ActivationFormat, WeightFormat

SHAPES = [(1, 1, 1), (3, 5, 37), (2, 7, 200), (4, 3, 576)]


def half_integers(codes: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """2 (u - z), an integer for every code."""
    return (2 * codes.double() - 2 * zero.double()).long()


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_integer_products_are_exact(p: int, q: int) -> None:
    for i, (w_code, x_code) in enumerate(itertools.product(CODES, CODES)):
        m, n, k = SHAPES[(p + q + i) % len(SHAPES)]
        weight = random_weight(n, k, WeightFormat(p, w_code), seed=k)
        x = torch.randn(m, k, generator=generator(q))
        activations = ActivationFormat(q, x_code)
        quantized = reference.quantize_activations(x, activations)
        # Exact, by the definition of codes: 4 (uw - zw)(ux - zx) in 64-bit integers.
        uw = half_integers(weight.codes(), weight.zeros().expand(n, 1))
        ux = half_integers(quantized.codes, quantized.zero[:, None])
        exact = ux @ uw.T
        expected = exact.double() / 4 * weight.scale.double()[:, 0] * quantized.scale.double()[:, None]
        y = reference.linear(x, weight, activations)
        torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-30)


@given(
    format=dense_formats,
    q=st.sampled_from([16, 8, 4, 1]),
    m=st.integers(1, 3),
    n=st.integers(1, 5),
    k=st.integers(1, 300),
    seed=seeds,
)
@settings(max_examples=100)
def test_linear_is_dequantized_operands_multiplied(format, q, m, n, k, seed) -> None:
    weight = random_weight(n, k, format, seed)
    x = torch.randn(m, k, generator=generator(seed))
    activations = ActivationFormat() if q == 16 else ActivationFormat(q, "float" if seed % 2 and q == 8 else "asym")
    operand = reference.quantize_activations(x, activations).dequantize() if activations.quantized else x
    bias = torch.randn(n, generator=generator(seed))
    exact = operand.double() @ weight.dequantize(torch.float64).T + bias
    tolerance = 1e-5 * (operand.abs().double() @ weight.dequantize(torch.float64).abs().T).max().item() + 1e-6
    y = reference.linear(x, weight, activations, bias)
    assert (y.double() - exact).abs().max() <= tolerance
    decoded = reference.decode(weight, activations)
    assert torch.equal(reference.linear(x, weight, activations, bias, decoded), y)


@given(q=st.integers(1, 8), code=st.sampled_from(CODES), k=st.integers(1, 64), seed=seeds)
@settings(max_examples=150)
def test_activations_are_nearest(q: int, code: str, k: int, seed: int) -> None:
    x = torch.randn(4, k, generator=generator(seed)) * torch.tensor([[1e-3], [1.0], [50.0], [0.0]])
    quantized = reference.quantize_activations(x, ActivationFormat(q, code))  # type: ignore[arg-type]
    assert int(quantized.codes.max()) < 2**q
    error = (quantized.dequantize(torch.float64) - x.double()).abs()
    assert torch.equal(quantized.dequantize()[3], torch.zeros(k))
    if q > 1:  # one bit keeps only the sign
        assert (error <= quantized.scale[:, None].double() * 0.50001 + 1e-30).all()
    else:
        most = x.double().abs().amax(1, keepdim=True)
        assert (error <= 2 * most + 1e-30).all()


@pytest.mark.parametrize("activations", [ActivationFormat(8, "float"), *(ActivationFormat(4, c) for c in CODES)])
def test_nan_and_infinity_give_nan_rows(activations: ActivationFormat) -> None:
    x = torch.randn(3, 32, generator=generator(0))
    x[0, 3], x[1, 5] = torch.nan, -torch.inf
    y = reference.linear(x, random_weight(4, 32, WeightFormat(4)), activations)
    assert y[:2].isnan().all()
    assert y[2].isfinite().all()


def test_dtypes_and_shapes() -> None:
    weight = random_weight(6, 40, WeightFormat(3, "asym", 32))
    x = torch.randn(2, 3, 40, generator=generator(1))
    exact = reference.linear(x.double(), weight, ActivationFormat())
    assert exact.shape == (2, 3, 6)
    for dtype, rtol in ((torch.float32, 1e-5), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)):
        y = reference.linear(x.to(dtype), weight, ActivationFormat())
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, rtol=rtol, atol=rtol)
    assert reference.linear(x[:0], weight, ActivationFormat(4, "sym")).shape == (0, 3, 6)


def test_wrong_shapes_are_named() -> None:
    weight = random_weight(6, 40, WeightFormat(3))
    with pytest.raises(LayerError, match=r"x has shape \(1, 41\), and the weight takes 40 features"):
        reference.linear(torch.zeros(1, 41), weight, ActivationFormat())
    with pytest.raises(LayerError, match="x is int64, and a layer takes floating-point"):
        reference.linear(torch.zeros(1, 40, dtype=torch.int64), weight, ActivationFormat())
