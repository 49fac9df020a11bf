"""The small kernels between products compile for every architecture, without a GPU and without spills."""

from dataclasses import replace

import pytest
import torch

from anybit import jit
from anybit.errors import KernelError
from anybit.kernels.block import hadamard, norm_act, rope, rope_pages
from machine_code import ARCHITECTURES


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_elementwise_kernels_do_not_spill(arch):
    row = norm_act.Problem(1, 14336)
    head = rope.Problem(1, 32, 8, 128, torch.bfloat16, stores=True)
    for kernel in (
        norm_act.kernel("add_rms_norm", norm_act.norm_config(row)),
        norm_act.kernel("silu_mul", norm_act.silu_config(row)),
        norm_act.kernel("silu_mul", norm_act.silu_config(row, paired=True)),
        rope.kernel(rope.default(head)),
        rope.kernel(rope.default(replace(head, paired=True))),
        rope.kernel(rope.default(replace(head, head_dim=96))),
        *(rope_pages.kernel(rope_pages.default(rope_pages.Problem(m, 32, 8, 128, paired=m > 1))) for m in (1, 4096)),
        hadamard.kernel(hadamard.default(hadamard.Problem(1, 14336))),
        hadamard.kernel(hadamard.default(hadamard.Problem(1, 576, torch.bfloat16))),
    ):
        compiled = jit.cached(kernel, arch)
        assert compiled.spill_bytes == compiled.stack_bytes == 0


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (norm_act.Problem(1, 1 << 18), "more than one block holds"),
        (norm_act.Problem(1, 64, torch.float32), "not float32"),
        (norm_act.Problem(0, 64), "are empty"),
    ],
)
def test_refused_by_name(problem, words):
    with pytest.raises(KernelError, match=words):
        norm_act.norm_config(problem)
