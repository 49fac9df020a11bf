"""What maps and searches cover: token counts."""

from anybit.choose.builtin import MOST_TOKENS, bucket, step
from anybit.choose.families import FAMILIES as FAMILIES
from anybit.kernels.linear_problem import LinearProblem as LinearProblem

GRID = tuple(sorted({bucket(tokens) for tokens in range(1, MOST_TOKENS + 1)}))
"""Token counts of maps that cover all layers and schemes."""
STEPS = tuple(sorted({step(tokens) for tokens in range(1, MOST_TOKENS + 1)}))
"""All values of ``step``: the token counts that `anybit tune` measures."""
