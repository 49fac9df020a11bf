"""GGUF's blocks against the gguf package's own dequantization, bit for bit."""

import numpy as np
import pytest
import torch

from anybit.checkpoints.formats.gguf_blocks import BLOCKS, read_blocks
from anybit.errors import CheckpointError
from anybit.scheme import Scheme

gguf = pytest.importorskip("gguf")
N, K = 3, 512
# The places of a block's half-precision numbers; all other bytes may be anything.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (),
}  # fmt: skip


def random_blocks(kind: str) -> np.ndarray:
    """Blocks of random bytes with sensible scales, uint8 [N, bytes of a row]."""
    random = np.random.default_rng(len(kind))
    block = BLOCKS[kind]
    data = random.integers(0, 256, (N, K // block.weights, block.bytes), dtype=np.uint8)
    for place in HALVES[kind]:
        scales = random.normal(0, 0.05, data.shape[:2]).astype(np.float16)
        data[..., place : place + 2] = scales[..., None].view(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = random.integers(110, 130, data.shape[:2])
    if kind == "TQ2_0":
        data[..., :64] &= 0b10101010  # pairs of 3 are no ternary digits
    return data.reshape(N, -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_what_gguf_makes_of_them(kind: str) -> None:
    data = random_blocks(kind)
    weight = read_blocks(torch.from_numpy(data), kind, (N, K))
    assert weight.format == Scheme.parse(BLOCKS[kind].scheme).weights
    expected = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]).astype(np.float32))
    assert torch.equal(weight.dequantize(), expected)
    size, count = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][::-1]
    assert (BLOCKS[kind].weights, BLOCKS[kind].bytes) == (count, size)


def test_what_is_no_matrix_is_refused() -> None:
    data = torch.from_numpy(random_blocks("Q4_0"))
    with pytest.raises(CheckpointError, match=r"864 bytes are no 3 x 480 matrix in Q4_0"):
        read_blocks(data, "Q4_0", (3, 480))
    data[0, :2] = 0xFF
    with pytest.raises(CheckpointError, match="not finite"):
        read_blocks(data, "Q4_0", (N, K))
