"""Reading and writing folders: errors name what is broken, and nothing broken is left behind."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybit.checkpoints.companions import companions
from anybit.checkpoints.folder import Folder
from anybit.checkpoints.safetensors import DTYPES, FileWriter, header_room, read_header, read_tensor
from anybit.checkpoints.source import local_folder
from anybit.checkpoints.writing import MANIFEST, new_folder
from anybit.errors import CheckpointError


def folder_with(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return path


def raw_file(path: Path, header: str, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)
    return path


@given(
    tensors=st.dictionaries(
        st.text("abc.é", min_size=1, max_size=8),
        st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    )
)
def test_files_are_safetensors(tmp_path_factory: pytest.TempPathFactory, tensors: dict) -> None:
    file = tmp_path_factory.mktemp("written") / "model.safetensors"
    made = {name: torch.ones(shape).to(dtype) for name, (dtype, shape) in tensors.items()}
    writer = FileWriter(file, header_room(made))
    for name, tensor in made.items():
        writer.add(name, tensor)
    writer.close()
    theirs = safetensors.torch.load_file(file)
    ours = {entry.name: read_tensor(entry) for entry in read_header(file)}
    assert theirs.keys() == ours.keys() == made.keys()
    for name, tensor in made.items():
        assert theirs[name].dtype == ours[name].dtype == tensor.dtype
        assert theirs[name].shape == ours[name].shape == tensor.shape
        assert torch.equal(ours[name].double(), tensor.double())
        assert torch.equal(theirs[name].double(), tensor.double())


@pytest.mark.parametrize("keep", [0, 4, 8, 20, 90, -1])
def test_cut_off_files_are_named(tmp_path: Path, keep: int) -> None:
    file = folder_with(tmp_path, weight=torch.ones(8, 8)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*cut off"):
        Folder(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("not json", "corrupt safetensors header"),
        ("[1]", "corrupt safetensors header"),
        ('{"a": 3}', "corrupt safetensors header"),
        ('{"a": {"dtype": "F32", "shape": [1]}}', "corrupt safetensors header"),
        ('{"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}', "tensor a has dtype Q4"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "does not take 4 bytes"),
        ('{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "which are impossible"),
        ('{"a": {"dtype": "U8", "shape": [3], "data_offsets": [1, 4]}}', "starts at byte"),
        ('{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}', "corrupt: its header describes"),
        (
            '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
            ' "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            "tensor a appears twice",
        ),
    ],
)
def test_corrupt_headers_are_named(tmp_path: Path, header: str, message: str) -> None:
    file = raw_file(tmp_path / "model.safetensors", header, b"\0" * 4)
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(file)
    assert str(file) in str(error.value)


def test_indexes_are_checked(tmp_path: Path) -> None:
    for name in ("one", "two"):
        safetensors.torch.save_file({"shared": torch.ones(2), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"

    def refusal(weight_map: object) -> str:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError) as error:
            Folder(tmp_path)
        return str(error.value)

    assert "tensor shared appears twice" in refusal({"one": "one.safetensors", "two": "two.safetensors"})
    assert "tensor gone is missing from" in refusal({"gone": "one.safetensors"})
    assert "three.safetensors is missing" in refusal({"one": "three.safetensors"})
    assert "points outside its folder" in refusal({"one": "../one.safetensors"})
    assert "has no weight_map" in refusal([1])
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json is not valid JSON"):
        Folder(tmp_path)


def test_no_pickle_is_ever_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin: pickles can run code"):
        Folder(tmp_path)
    folder_with(tmp_path, a=torch.ones(1))
    assert companions(tmp_path) == ([], [Path("model.safetensors"), Path("pytorch_model.bin")])


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    for config, message in (
        (None, r"has no config\.json"),
        ("{}", r"neither model\.safetensors nor"),
        ("[]", "holds a list"),
    ):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(CheckpointError, match=message):
            Folder(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGML....")
    for name, message in (("nope", "neither a folder, nor a GGUF file"), ("model.gguf", "is not a GGUF file")):
        with pytest.raises(CheckpointError, match=message), local_folder(tmp_path / name):
            pass


def test_large_values_are_no_infinity(tmp_path: Path) -> None:
    folder = Folder(folder_with(tmp_path, layer=torch.full((8,), 3e38)))
    assert folder.read("layer", finite=True).shape == (8,)


def test_new_folders_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    with new_folder(tmp_path / "deep" / "out") as work:
        (work / "file").write_text("new")
        assert not (tmp_path / "deep" / "out").exists()
    assert (tmp_path / "deep" / "out" / "file").read_text() == "new"
    with pytest.raises(CheckpointError, match="exists already and is not empty"), new_folder(tmp_path / "deep" / "out"):
        pass
    (tmp_path / "deep" / "out" / "file").unlink()
    (tmp_path / "deep" / "out" / "config.json").write_text('{"model_type": "old"}')
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "deep" / "out", overwrite=True) as work:
        (work / "config.json").write_text("half")
        raise KeyboardInterrupt
    assert (tmp_path / "deep" / "out" / "config.json").read_text() == '{"model_type": "old"}'
    with new_folder(tmp_path / "deep" / "out", overwrite=True) as work:
        (work / "other").write_text("newer")
    assert sorted(f.name for f in (tmp_path / "deep" / "out").iterdir()) == [MANIFEST, "other"]
    assert [f.name for f in (tmp_path / "deep").iterdir()] == ["out"]


def test_unwritable_places_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"), new_folder(tmp_path / "file"):
        pass
    with pytest.raises(CheckpointError, match="cannot be written"), new_folder(tmp_path / "file" / "out"):
        pass
    with pytest.raises(CheckpointError, match="cannot be written"), new_folder("/proc/anybit/out"):
        pass
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o555)
        with pytest.raises(CheckpointError, match="Permission denied"), new_folder(tmp_path / "locked" / "out"):
            pass


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="out cannot be written: No space left"), new_folder(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_command_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = slow_command(tmp_path)
    for _ in range(1 if number == signal.SIGINT else 3):  # a closing terminal may send more than one
        process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_nohup_is_obeyed(tmp_path: Path) -> None:
    process = slow_command(tmp_path, "signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM


def slow_command(tmp_path: Path, before: str = "") -> subprocess.Popen[bytes]:
    """Start a command that is writing a folder; before: code to run first."""
    script = (
        # Background tests ignore some signals, and child processes would inherit that.
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"signal.signal(signal.SIGHUP, signal.SIG_DFL)\n{before}\n"
        "from pathlib import Path; from anybit import cli; from anybit.checkpoints.scratch import Scratch\n"
        "def slow(*a, **k):\n"
        "    with Scratch(Path(sys.argv[1])) as work:\n"
        "        (work / 'half').write_text('x'); time.sleep(60)\n"
        "cli.app = slow; cli.main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".anybit-unfinished-*/half")) and time.monotonic() < deadline:
        time.sleep(0.05)
    return process
