"""The tables in README.md and docs/ are those of the rows in benchmarks/results: nobody types them."""

import subprocess
import sys
from pathlib import Path


def test_tables_are_those_of_the_rows() -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "tables.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run: python benchmarks/tables.py"
