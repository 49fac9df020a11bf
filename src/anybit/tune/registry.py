"""What maps and searches are of: kernel families with the revisions of their machine code, and token counts."""

from anybit.kernels.gemm.builtin import MOST_TOKENS, bucket, step
from anybit.kernels.gemm.families import FAMILIES as FAMILIES
from anybit.kernels.gemm.linear_problem import LinearProblem as LinearProblem

REVISIONS = dict.fromkeys((*FAMILIES, "quantize_activations"), 1)
"""Which device code a map was measured with. Raise a family's number by one, on purpose, when its kernels' machine code
changes: points of a map with another number are hints for searches, no more. Comments, names and host code leave it as
it is. tests/compile/test_revisions.py compares machine code and says when a number is due."""

GRID = tuple(sorted({bucket(tokens) for tokens in range(1, MOST_TOKENS + 1)}))
"""The token counts of a map of all layers and schemes."""
STEPS = tuple(sorted({step(tokens) for tokens in range(1, MOST_TOKENS + 1)}))
"""All counts of ``step``: what `anybit tune` measures."""
