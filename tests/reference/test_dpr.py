"""The DPR model (ADAngel, section 4.2): every partition of every width gives the exact product."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import BITS, PAIRS, activation_formats, random_codes, weight_formats

from anybit import dpr
from anybit.errors import KernelError
from anybit.scheme import CODES, ActivationFormat, WeightFormat

ARCHS = list(dpr.TENSOR_CORES)


@pytest.mark.parametrize("bits", BITS)
def test_partitions(bits: int) -> None:
    schemas = list(dpr.partitions(bits))
    assert len({schema.widths for schema in schemas}) == len(schemas) == 2 ** (bits - 1)
    codes = random_codes((3, 40), bits)
    for schema in schemas:
        assert schema.bits == bits
        parts = schema.split(codes)
        assert all(int(part.max()) < 2**width for part, width in zip(parts, schema.widths, strict=True))
        total = sum(part << shift for part, shift in zip(parts, schema.shifts, strict=True))
        assert torch.equal(total, codes.long())


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_every_partition_is_exact(p: int, q: int) -> None:
    # Against all partitions of the other operand in turn; products of pairs are linear, so a diagonal covers them all.
    w, x = random_codes((3, 37), p, seed=p), random_codes((2, 37), q, seed=q)
    w[0], x[0] = 2**p - 1, 2**q - 1  # the largest sum there is
    exact = x.long() @ w.long().T
    schemas_w, schemas_x = list(dpr.partitions(p)), list(dpr.partitions(q))
    for i in range(max(len(schemas_w), len(schemas_x))):
        schema_w, schema_x = schemas_w[i % len(schemas_w)], schemas_x[i % len(schemas_x)]
        for arch in ("sm_80", "sm_90a"):
            plan = dpr.Plan("split", schema_w, schema_x, dpr.promote(schema_w, schema_x, arch))
            assert torch.equal(dpr.execute(plan, x, w), exact), str(plan)


@given(p=st.sampled_from(BITS), q=st.sampled_from(BITS), data=st.data())
@settings(max_examples=100)
def test_any_two_partitions_are_exact(p: int, q: int, data: st.DataObject) -> None:
    schema_w = data.draw(st.sampled_from(list(dpr.partitions(p))))
    schema_x = data.draw(st.sampled_from(list(dpr.partitions(q))))
    k = data.draw(st.integers(1, 70))
    w, x = random_codes((2, k), p), random_codes((3, k), q)
    plan = dpr.Plan("split", schema_w, schema_x, dpr.promote(schema_w, schema_x, "sm_80"))
    assert len(plan.terms) == len(schema_w.widths) * len(schema_x.widths)
    assert torch.equal(dpr.execute(plan, x, w), x.long() @ w.long().T)


@given(weights=weight_formats, activations=activation_formats, arch=st.sampled_from(ARCHS))
@settings(max_examples=200)
def test_plans_run_or_say_why_not(weights: WeightFormat, activations: ActivationFormat, arch: str) -> None:
    for strategy in dpr.STRATEGIES:
        refusal = dpr.why_not(weights, activations, arch, strategy)
        if refusal is not None:
            assert len(refusal.split()) >= 5
            with pytest.raises(KernelError):
                dpr.plan(weights, activations, arch, strategy)
            continue
        plan = dpr.plan(weights, activations, arch, strategy)
        assert plan.number in dpr.TENSOR_CORES[arch]
        assert plan.weight_parts.bits == weights.bits
        assert plan.activation_parts.bits == activations.bits
        if plan.number in ("b1", "u4", "u8") and activations.integer:
            w, x = random_codes((2, 33), weights.bits), random_codes((3, 33), activations.bits)
            assert torch.equal(dpr.execute(plan, x, w), x.long() @ w.long().T)
    served = activations.integer or not activations.quantized or "e4m3" in dpr.TENSOR_CORES[arch]
    served = served and (weights.code in CODES or not activations.quantized)
    assert bool(dpr.plans(weights, activations, arch)) == served


@pytest.mark.parametrize(
    ("arch", "p", "q", "number"),
    [
        ("sm_80", 1, 1, "b1"),
        ("sm_80", 2, 2, "u4"),
        ("sm_80", 3, 5, "u8"),
        ("sm_90a", 2, 2, "u8"),
        ("sm_100a", 1, 1, "u8"),
    ],
)
def test_promotion_takes_the_narrowest_native_number(arch: str, p: int, q: int, number: str) -> None:
    assert dpr.promote(dpr.Partition((p,)), dpr.Partition((q,)), arch) == number


def test_refusals() -> None:
    w4, a4, a16 = WeightFormat(4), ActivationFormat(4, "sym"), ActivationFormat()
    assert dpr.why_not(w4, a16, "sm_90a", "dequantize") is None
    assert "16-bit floats" in str(dpr.why_not(w4, a16, "sm_90a", "bitwise"))
    assert "emulated" in str(dpr.why_not(w4, a4, "sm_100a", "bitwise"))
    with pytest.raises(KernelError, match="'sm_70' is not known"):
        dpr.plans(w4, a4, "sm_70")
    with pytest.raises(KernelError, match="at least one bit"):
        dpr.Partition((2, 0))
    with pytest.raises(KernelError, match="multiplies no integers of 9 bits"):
        dpr.promote(dpr.Partition((9,)), dpr.Partition((1,)), "sm_90a")
    plan = dpr.Plan("bitwise", dpr.Partition((2,)), dpr.Partition((1,)), "b1")
    with pytest.raises(KernelError, match="which b1 cannot"):
        dpr.execute(plan, torch.ones(1, 4), torch.full((1, 4), 3))
