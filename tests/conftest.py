"""Makes tests/ importable, so that tests of every rung share their cases and kernels."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
