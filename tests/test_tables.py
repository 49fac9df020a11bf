"""Tables in README.md and docs/ match the rows in benchmarks/results: nobody types them."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anybit.codes.packing import layer_shapes
from anybit.kernels.attention.kv_page import PageLayout
from anybit.scheme import KVFormat, Scheme

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_tables_match_rows() -> None:
    script = BENCHMARKS / "tables.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run: python benchmarks/tables.py"


def test_attention_page_counts_bits_as_the_cache_does() -> None:
    page = (BENCHMARKS.parent / "docs" / "design" / "attention.md").read_text()
    rows = re.findall(r"^\| (`kv?\d?[^|]*) \| ([\d., ]+) \|", page, re.MULTILINE)
    told = {
        kv: bits for names, all_bits in rows for kv, bits in zip(names.split(", "), all_bits.split(", "), strict=True)
    }
    assert len(told) >= 8
    for name, bits in told.items():
        assert f"{PageLayout(KVFormat.parse(name.strip('`')), 128).bits_per_element:.2f}" == f"{float(bits):.2f}", name


def test_weights_gb_counts_as_folders_do() -> None:
    schemes = ["w8a16g128", "w4a16g128", "w4a8", "w3a16g64asym", "w2a16g64asym"]
    code = (
        "import json, tables; from cases import LLAMA3_8B\n"
        f"told = {{scheme: tables.weights_gb(scheme) for scheme in {schemes}}}\n"
        "print(json.dumps([list(LLAMA3_8B.values()), tables.REST, tables.KV4, told]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    layers, rest, kv4, told = json.loads(done.stdout)
    sizes = {"weight_packed": 4, "weight_scale": 2, "weight_zero_point": 4, "weight_shape": 0}
    for scheme, gigabytes in told.items():
        shapes = [layer_shapes(n, k, Scheme.parse(scheme).weights) for n, k in layers]
        stored = 32 * sum(sizes[name] * math.prod(shape) for layer in shapes for name, shape in layer.items())
        assert gigabytes == pytest.approx((stored + 2 * rest) / 1e9, rel=0.003), scheme
    assert PageLayout(KVFormat.parse("kv4"), 128).bits_per_element == kv4


def test_tables_print_by_name() -> None:
    command = [sys.executable, str(BENCHMARKS / "tables.py")]
    names = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True).stdout.split()
    assert {"headline", "choosing", "packed_layers"} <= set(names)
    done = subprocess.run([*command, *names], capture_output=True, text=True, check=True)
    printed = done.stdout.strip().split("\n\n")
    assert len(printed) >= len(names) and all("|" in part or part.startswith("**") for part in printed)
    wrong = subprocess.run([*command, "headlin"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "there is no table headlin" in wrong.stderr


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results" / "h200").glob("*.json")), ids=lambda path: path.stem)
def test_rows_with_times_were_checked(path: Path) -> None:
    for row in json.loads(path.read_text()):
        if "us" in row or "ms" in row:
            assert row["checked"] is True or (row["checked"] is False and row["ablation"]), row


@pytest.mark.parametrize("checked", [None, False, "failed", "as its neighbours", 1])
def test_merge_rows_refuses_unchecked_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: Any) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import timing

    good = {"case": "a", "us": 1.0, "checked": True}
    left_out = {"case": "b", "us": 1.0, "checked": False, "ablation": "softmax is left out"}
    timing.merge_rows(tmp_path / "rows.json", [good, left_out], ("case",))
    before = (tmp_path / "rows.json").read_text()
    with pytest.raises(ValueError, match=r"a: checked is .*, and only a checked result is written down"):
        timing.merge_rows(tmp_path / "rows.json", [{"case": "a", "us": 0.5, "checked": checked}], ("case",))
    assert (tmp_path / "rows.json").read_text() == before


def test_add_rows_from_two_processes_loses_nothing(tmp_path: Path) -> None:
    path, count = tmp_path / "rows.json", 40
    script = "import sys, rows; from pathlib import Path\n"
    script += f"for i in range({count}):\n"
    script += "    rows.add(Path(sys.argv[1]), [{'case': f'{sys.argv[2]} {i}', 'checked': True}], ('case',))"
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(path), name], cwd=BENCHMARKS) for name in ("one", "other")
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(json.loads(path.read_text())) == 2 * count


def test_commit_comes_from_git_or_the_environment_else_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rows

    monkeypatch.delenv("ANYBIT_COMMIT", raising=False)
    monkeypatch.setattr(rows, "ROOT", tmp_path / "copy")
    (tmp_path / "copy").mkdir()
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)  # around it, and of something else
    with pytest.raises(SystemExit, match=r"is no git checkout, .*: set ANYBIT_COMMIT"):
        rows.commit()
    monkeypatch.setenv("ANYBIT_COMMIT", "0123abc")
    assert rows.commit() == "0123abc"
