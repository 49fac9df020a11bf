"""The op ``experts`` on the CPU: the reference against plain float64, saving, refusals, tracing."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit import Slot
from anybit.kernels.packed.packed_layout import round_up
from anybit.kernels.packed.packed_tiles import prepare
from anybit.ops.experts import ExpertsSpec, experts, experts_plan, prepare_experts
from anybit.ops.plans import Rows
from anybit.ops.prepared_experts import resized, why_not
from anybit.scheme import ActivationFormat, Scheme, WeightFormat
from cases_experts import Mixture, error

A16 = ActivationFormat()


def plain(mixture: Mixture, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Token by token and expert by expert, in float64."""
    gate_up, down = (one.dequantize(torch.float64) for one in (mixture.gate_up, mixture.down))
    gate_up, down = (one.view(mixture.count, -1, one.shape[1]) for one in (gate_up, down))
    y = torch.zeros(mixture.x.shape, dtype=torch.float64)
    for t, (token_ids, token_weights) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
        for expert, weight in zip(token_ids, token_weights, strict=True):
            if 0 <= expert < mixture.count:
                gate, up = (gate_up[expert] @ mixture.x[t].double()).view(-1, 2, 8).unbind(1)
                y[t] += weight * (down[expert] @ (silu(gate) * up).flatten())
    return y


@pytest.mark.parametrize("ids", [[[0, 3], [1, 1], [-1, 2]], [[3, 3], [-1, -1], [4, 0]]])
def test_the_reference_is_a_sum_over_experts(ids: list[list[int]]) -> None:
    mixture = Mixture(WeightFormat(4, "asym", 32), 4, 72, 40, 3, torch.float64)
    prepared = prepare_experts(mixture.gate_up, mixture.down, 4, A16)
    chosen, weights = torch.tensor(ids), mixture.routing(2)[1].double()
    y = experts(mixture.x, chosen, weights, prepared)
    torch.testing.assert_close(y, plain(mixture, chosen, weights))


@pytest.mark.parametrize("activations", [A16, ActivationFormat(8, "sym")])
def test_saves_traces_and_quantizes_activations(activations: ActivationFormat) -> None:
    mixture = Mixture(WeightFormat(4, "sym", 32), 4, 64, 40, 5, torch.bfloat16, bias=True)
    prepared = prepare_experts(mixture.gate_up, mixture.down, 4, activations)
    assert str(ExpertsSpec.parse(prepared.spec_text)) == prepared.spec_text
    for found, given in zip(prepared.restore(), (mixture.gate_up, mixture.down), strict=True):
        assert torch.equal(found.words, given.words) and torch.equal(found.scale, given.scale)
    ids, weights = mixture.routing(2)
    y = experts(mixture.x, ids, weights, prepared, *mixture.biases)
    assert y.dtype == torch.bfloat16 and error(y, mixture.expected(ids, weights)) < 0.03
    traced = torch.compile(
        lambda x: experts(x, ids, weights, prepared, *mixture.biases), backend="eager", fullgraph=True
    )
    assert torch.equal(traced(mixture.x), y)
    assert experts(mixture.x[:0], ids[:0], weights[:0], prepared).shape == (0, 64)


@pytest.mark.parametrize("scheme", ["w3a16g32", "w3a16g32asym", "w3a16g32min", "w4a16g32s24"])
def test_padding_an_expert_to_tiles_is_undone_exactly(scheme: str) -> None:
    mixture = Mixture(Scheme.parse(scheme).weights, 3, 72, 40, 1)
    for given in (mixture.gate_up, mixture.down):
        rows = given.shape[0] // 3
        padded = resized(given, 3, round_up(rows, 64))
        assert padded.shape[0] % (3 * 64) == 0
        prepare(padded)  # which checks 2:4 indices
        found = resized(padded, 3, rows)
        assert found.shape == given.shape
        for name in ("words", "scale", "zero", "minimum", "indices"):
            one, other = getattr(found, name), getattr(given, name)
            assert one is other is None or torch.equal(one, other)


def test_says_what_does_not_fit() -> None:
    mixture = Mixture(WeightFormat(4, "sym", 32), 4, 64, 40, 2)
    with pytest.raises(KernelError, match="do not fit"):
        prepare_experts(mixture.gate_up, mixture.down, 3, A16)
    with pytest.raises(KernelError, match="gate 'relu' is unknown"):
        prepare_experts(mixture.gate_up, mixture.down, 4, A16, "relu")
    prepared = prepare_experts(mixture.gate_up, mixture.down, 4, A16)
    ids, weights = mixture.routing(2)
    for x, i, w, bias, said in (
        (mixture.x[0], ids, weights, None, "x has shape"),
        (mixture.x, ids.float(), weights, None, "ids must be"),
        (mixture.x, ids[:1], weights, None, "ids must be"),
        (mixture.x, ids, weights[:, :1], None, "weights must be"),
        (mixture.x, ids, ids, None, "weights must be"),
        (mixture.x, ids, weights, torch.zeros(4, 40), "gate_up_bias must"),
    ):
        with pytest.raises(KernelError, match=said):
            experts(x, i, w, prepared, bias)


@pytest.mark.parametrize(
    ("tokens", "top", "count", "sorts"),
    [(8, 8, 128, False), (16, 8, 128, True), (3, 2, 8, False), (4, 2, 8, True), (2, 8, 32, False), (24, 4, 128, True)],
)
def test_sorts_where_that_was_faster(tokens: int, top: int, count: int, sorts: bool) -> None:
    """As measured on an H200."""
    spec = ExpertsSpec.parse(f"{count}|silu|packed:{count * 128}x128:w4a16g128|packed:{count * 128}x64:w4a16g128")
    gpu = Device.named("sm_90a")
    rows = Rows(Slot("x"), tokens, 128, 128, True, torch.bfloat16, torch.device("cpu"), gpu)
    few = ["sm90_experts_gate_up", "sm90_experts_down"] * -(-tokens // 8)
    for asked in (rows, replace(rows, aligned=False, stride=129)):  # rows between 16-byte places are copied
        entries = [kernel.entry for kernel in experts_plan(spec, asked, top, torch.int32, (True, True)).kernels]
        assert entries[0] == "route_tokens" and entries[-1] == "combine_slots" if sorts else entries == few


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("scheme", ["w4a8", "w4a8fp", "w4a4"])
def test_quantized_activations_run_by_the_kernels_that_sort(scheme: str, tokens: int) -> None:
    parsed = Scheme.parse(scheme)
    gpu, formats = Device.named("sm_90a"), (parsed.weights, parsed.weights)
    assert why_not(8, 128, 64, formats, parsed.activations, "silu", gpu) is None
    spec = ExpertsSpec.parse(f"8|silu|packed:1024x128:{scheme}|packed:1024x64:{scheme}")
    rows = Rows(Slot("x"), tokens, 128, 128, True, torch.bfloat16, torch.device("cpu"), gpu)
    entries = [kernel.entry for kernel in experts_plan(spec, rows, 2, torch.int32).kernels]
    assert entries[-1] == "combine_slots" and sum("quantize" in entry for entry in entries) == 2, entries
