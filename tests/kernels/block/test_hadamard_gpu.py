"""The Hadamard transform's kernel on a GPU."""

import pytest
import torch

from anybit import ops
from anybit.codes import hadamard
from anybit.codes.rtn import quantize_weight
from anybit.kernels.bitplane import bitplane_layout
from anybit.kernels.block import hadamard as kernel
from anybit.kernels.block import quantize_activations
from anybit.kernels.block.quantize_activations import Target
from anybit.layers.linear import QuantLinear
from anybit.ops.elementwise import add_rms_norm, silu_mul
from anybit.scheme import ActivationFormat, Scheme
from cases import quantized

SIZES = (64, 576, 1536, 4096, 8192, 14336)


ROTATED = (64, 576, 1536, 14336)
CODED = [
    (ActivationFormat(1, "bipolar"), Target.planes),
    (ActivationFormat(4, "asym"), Target.planes),
    (ActivationFormat(8, "sym"), Target.bytes),
    (ActivationFormat(8, "float"), Target.bytes),
]


def same(found: quantize_activations.Packed, wanted: quantize_activations.Packed) -> bool:
    def codes(packed: quantize_activations.Packed) -> torch.Tensor:
        if packed.target is Target.planes:
            return bitplane_layout.unpack(packed.codes.cpu(), packed.m, packed.k)
        return packed.codes[:, : packed.k].view(torch.uint8).cpu()

    # A 1-bit scale is a mean, summed in an order that depends on the config.
    if not torch.allclose(found.scale, wanted.scale, rtol=1e-6 * (wanted.format.bits == 1), atol=0):
        return False
    parts = [(codes(found), codes(wanted)), (found.sum, wanted.sum), (found.zero, wanted.zero)]
    return all(a is b is None or torch.equal(a, b) for a, b in parts)


@pytest.mark.parametrize("k", ROTATED)
@pytest.mark.parametrize("case", range(len(CODED)))
def test_rotated_while_coded_is_rotated_and_coded(case, k):
    """One kernel gives the same codes as two, bit for bit, in every config."""
    format, target = CODED[case]
    x = torch.randn(5, k + 8, generator=torch.Generator().manual_seed(k)) * 3
    x[1] = 0
    x[2, 7] = 3e4
    x = x.to("cuda", (torch.float16, torch.bfloat16)[case % 2])[:, :k]
    wanted = quantized(kernel.transform(x), format, target)
    problem = quantize_activations.problem_of(x, format, target, rotated=True)
    for config in quantize_activations.configs(problem):
        found = quantize_activations.Packed(5, k, format, target, x.device)
        found.buffer.fill_(0xA5)
        quantize_activations.launch(problem, config, found, x)
        assert same(found, wanted), config


def layers(scheme, k):
    """Two equal layers; the second rotates its input."""
    weight = quantize_weight(
        torch.randn(64, k, generator=torch.Generator().manual_seed(2)), Scheme.parse(scheme).weights
    )
    plain, turned = (QuantLinear.from_weight(weight.to("cuda"), scheme).prepare() for _ in range(2))
    turned.hadamard = True
    return plain, turned


@pytest.mark.parametrize("scheme", ["w4a4", "w2a3-xasym", "w4a8", "w4a8g64"])
def test_layers_rotate_what_a_norm_or_an_activation_gives(scheme):
    """With and without a separate launch for the rotation, a layer computes the same, bit for bit."""
    k = 1536
    plain, turned = layers(scheme, k)
    g = torch.Generator().manual_seed(3)
    x, other = (torch.randn(2, 9, k, generator=g).to("cuda", torch.float16) for _ in range(2))
    gamma, both = torch.rand(k, generator=g).to("cuda", torch.float16), torch.cat([x, other], -1)
    assert torch.equal(turned(x), plain(ops.hadamard(x)))
    assert torch.equal(turned.silu_linear(both), plain(ops.hadamard(silu_mul(both))))
    normed, total = add_rms_norm(x, other, gamma, 1e-5)
    found, found_total = turned.norm_linear(x, other, gamma, 1e-5)
    assert torch.equal(found_total, total)
    # The norm's sum of squares differs: by no more than a flipped last bit of a value.
    torch.testing.assert_close(found, plain(ops.hadamard(normed)), rtol=2e-2, atol=0.1)
    compiled = torch.compile(turned, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), turned(x))


def test_sizes_that_no_kernel_rotates_are_rotated_before():
    k = 44
    plain, turned = layers("w4a8", k)
    assert ops.rotation_refused(k, torch.float16)
    x = torch.randn(3, k, device="cuda", dtype=torch.float16)
    assert torch.equal(turned(x), plain(ops.hadamard(x)))


def test_other_rows_are_not_touched_by_what_is_not_finite():
    x = torch.randn(3, 1536, device="cuda", dtype=torch.float16)
    x[1, 9] = torch.nan
    form = ActivationFormat(4, "asym")
    packed = quantize_activations.Packed(3, 1536, form, Target.planes, x.device)
    problem = quantize_activations.problem_of(x, form, Target.planes, rotated=True)
    quantize_activations.launch(problem, quantize_activations.default(problem), packed, x)
    assert packed.scale.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", SIZES)
def test_same_as_in_double(k, dtype):
    x = torch.randn(2, 7, k + 8, generator=torch.Generator().manual_seed(k)).to("cuda", dtype)[..., :k]
    found = ops.hadamard(x)
    assert found.dtype == dtype and found.shape == x.shape
    torch.testing.assert_close(found.double(), hadamard.transform(x.double()), rtol=1e-2, atol=4e-3)


def test_other_sizes_and_types_take_torch():
    for x in (torch.randn(3, 11008, device="cuda", dtype=torch.float16), torch.randn(3, 576, device="cuda")):
        torch.testing.assert_close(ops.hadamard(x).double(), hadamard.transform(x.double()), rtol=1e-2, atol=4e-3)


def test_hadamard_takes_no_rows():
    assert ops.hadamard(torch.empty(0, 576, device="cuda", dtype=torch.float16)).shape == (0, 576)


def test_not_finite_rows_stay_to_themselves():
    x = torch.randn(3, 576, device="cuda", dtype=torch.float16)
    x[1, 7] = torch.inf
    found = ops.hadamard(x).isfinite().all(1)
    assert found.tolist() == [True, False, True]
