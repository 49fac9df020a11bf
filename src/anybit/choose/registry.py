"""What maps and searches cover: kernel families with the revisions of their machine code, and token counts."""

from anybit.choose.builtin import MOST_TOKENS, bucket, step
from anybit.choose.families import FAMILIES as FAMILIES
from anybit.kernels.linear_problem import LinearProblem as LinearProblem

REVISIONS = dict.fromkeys((*FAMILIES, "quantize_activations"), 1)
"""The device code that a map was measured with. Increment a family's number when its kernels' machine code changes:
points with another number become mere hints for searches. Comments, names and host code do not count.
tests/compile/test_revisions.py compares machine code and fails when an increment is due."""

GRID = tuple(sorted({bucket(tokens) for tokens in range(1, MOST_TOKENS + 1)}))
"""Token counts of maps that cover all layers and schemes."""
STEPS = tuple(sorted({step(tokens) for tokens in range(1, MOST_TOKENS + 1)}))
"""All values of ``step``: the token counts that `anybit tune` measures."""
