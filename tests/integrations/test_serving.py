"""`anybit serve` over transformers: a real server and real clients; and its errors where it cannot serve."""

import asyncio
import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import cases_serving as cases
from anybit.cli import app
from anybit.errors import KernelError
from anybit.hf.load_test import Answer, Figures, ask, measure, picture
from anybit.scheme import Scheme
from anybit.vllm import serving
from anybit.vllm.serving_source import vllm_folder
from cases_damage import save_gguf
from checkpoints.test_formats import whole_model
from checkpoints.test_gguf_blocks import MIXED

needed = [name for name in ("fastapi", "uvicorn", "openai", "httpx") if importlib.util.find_spec(name) is None]
has_server = pytest.mark.skipif(bool(needed), reason=f"{', '.join(needed)} not installed: pip install 'anybit[serve]'")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cases.Running]:
    folder = tmp_path_factory.mktemp("served")
    cases.save_small_llama(folder)
    options = ("--scheme", "w4a16g64", "--engine", "transformers")
    with cases.served(folder, folder / "log", *options) as running:
        yield running


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@has_server
def test_answers_streams_and_the_line_to_paste(server: cases.Running) -> None:
    assert f"transformers serve serves {server.model} in w4a16g64 at {server.url}: as requested" in server.said
    cases.check_answers(server)


@has_server
def test_many_at_once_and_clients_that_hang_up(server: cases.Running) -> None:
    cases.check_many_at_once(server, 8)


@has_server
def test_empty_prompts_and_prompts_beyond_the_context(server: cases.Running) -> None:
    cases.check_odd_prompts(server)


@has_server
def test_strangers_get_answers_of_the_one_model(server: cases.Running) -> None:
    cases.check_strangers(server)


@has_server
def test_openai_s_client_is_told_why_and_gets_samples(server: cases.Running) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def ask(**fields: Any) -> Any:
        return client.completions.create(model=server.model, prompt="abc", max_tokens=16, **fields).choices[0].text

    with pytest.raises(openai.BadRequestError, match="n=2 is not supported by the transformers server"):
        ask(n=2)
    with pytest.raises(openai.BadRequestError, match="Server is pinned to"):  # transformers' own words
        client.completions.create(model="gpt-4", prompt="abc")
    drawn = [ask(temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and ask(temperature=0) not in drawn
    answer = client.responses.create(model=server.model, input="abc", max_output_tokens=16)
    assert answer.status == "completed"


@has_server
def test_metrics_count_what_was_answered(server: cases.Running) -> None:
    import httpx

    def figures() -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}

    before = figures()
    server.text("abc")
    httpx.get(f"{server.url}/made/up")
    after = figures()
    assert after["anybit_requests_running"] == 0
    for name in ('requests_total{path="/v1/completions",status="200"}', 'requests_total{path="other",status="404"}'):
        assert after[f"anybit_{name}"] == before.get(f"anybit_{name}", 0) + 1
    of = '{path="/v1/completions"}'
    assert 0 < after[f"anybit_first_byte_seconds_sum{of}"] <= after[f"anybit_request_seconds_sum{of}"]
    assert not any("made" in name for name in after)


@has_server
def test_a_running_server_is_measured(server: cases.Running, tmp_path: Path) -> None:
    figures = measure(server.url, server.model, rate=20, requests=4, words=3, new_tokens=4)
    assert (figures.requests, figures.failed, figures.rate) == (4, 0, 20)
    assert 0 < figures.ttft_ms <= figures.ttft_p99_ms and figures.tokens_per_second > 0
    if importlib.util.find_spec("matplotlib"):
        picture(tmp_path / "load.svg", server.model, [figures])
        assert (tmp_path / "load.svg").stat().st_size > 1000


@has_server
def test_transformers_server_keeps_connections_longer_than_clients_do(server: cases.Running) -> None:
    """uvicorn's default of 5 seconds equals the time for which clients reuse a connection."""
    address = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", "/health")
    connection.getresponse().read()
    held = connection.sock
    time.sleep(7)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200 and connection.sock is held


@pytest.mark.parametrize(("name", "reason"), [("load.what", "must end in one of"), ("no/load.png", "no folder")])
def test_a_picture_that_cannot_be_is_refused_before_anything_is_measured(
    tmp_path: Path, name: str, reason: str
) -> None:
    pytest.importorskip("matplotlib")
    words = ["bench", "m", "--url", "http://127.0.0.1:1", "--picture", str(tmp_path / name)]
    assert reason in str(CliRunner().invoke(app, words).exception)


def test_a_picture_needs_figures_of_several_rates(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    every = [Figures(rate, 10, 0, 50 * rate, 90 * rate, 8, 9, 100 * rate) for rate in (1.0, 2.0)]
    picture(tmp_path / "load.png", "m", every)
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


@has_server
def test_a_shutdown_in_the_middle(server: cases.Running) -> None:  # last, since it ends the server
    cases.check_shutdown(server)


@has_server
def test_a_place_where_another_program_listens_is_refused(tmp_path: Path) -> None:
    cases.save_small_llama(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = serving.Server(str(tmp_path), port=other.getsockname()[1])
        for engine in ("transformers", "vllm"):
            with pytest.raises(serving.OptionError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in"):
                serving.serve(taken, engine, lambda: None)
    with pytest.raises(serving.OptionError, match=r"cannot listen on nowhere\.invalid:8000"):
        serving.serve(serving.Server(str(tmp_path), host="nowhere.invalid"), "vllm", lambda: None)


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


def test_a_key_reaches_vllm_and_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["--api-key", "secret", "--seed", "1"], ["--seed", "1", "--api-key=secret"]):
        assert serving.without_key(words) == (["--seed", "1"], "secret")
    assert serving.without_key(["--seed", "1"]) == (["--seed", "1"], None)
    with pytest.raises(serving.OptionError, match="--api-key takes one key, not 2") as error:
        serving.without_key(["--api-key", "secret", "other", "--seed", "1"])
    assert "secret" not in str(error.value)
    cases.save_small_llama(tmp_path)
    program = (
        "import os, sys; assert os.environ['VLLM_API_KEY'] == 'secret'; assert 'secret' not in sys.argv; sys.exit(9)"
    )
    command = serving.vllm_command
    monkeypatch.setattr(serving, "vllm_command", lambda *given: [cases.sys.executable, "-c", program, *command(*given)])
    server = serving.Server(str(tmp_path), port=free_port(), others=["--api-key", "secret"])
    assert serving.serve(server, "vllm", lambda: None) == 9


def test_vllm_keeps_connections_longer_than_clients_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else requests are sent on connections that the server is closing: uvicorn's 5 seconds lost 10 of 24,000."""
    monkeypatch.delenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", raising=False)
    assert float(serving.vllm_environment(None)["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > httpx.Limits().keepalive_expiry
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "9")  # set by the user
    assert serving.vllm_environment("secret")["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "9"


def test_vllm_gets_other_tools_models_by_name(tmp_path: Path) -> None:
    """A folder marked for anybit, a GGUF file as a folder, and unsupported folders as they are."""
    folder = whole_model("fp8-blocks", tmp_path / "fp8")
    with vllm_folder(serving.Server(str(folder))) as (path, options):
        assert (path, options) == (folder, ["--quantization", "anybit"])
    with vllm_folder(serving.Server(str(folder), others=["--quantization", "fp8"])) as (_, options):
        assert options == []
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
def test_a_server_that_ends_by_itself_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
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
    port = free_port()
    command = [cases.sys.executable, "-c", program, str(port), str(code)]
    monkeypatch.setattr(serving, "vllm_command", lambda *given: command)
    told: list[bool] = []
    with pytest.raises(KernelError, match="vLLM's server ended by itself: the first ERROR line above says why"):
        serving.serve(serving.Server(str(tmp_path), port=port), "vllm", lambda: told.append(True))
    assert told == [True]


def test_an_engine_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KernelError, match=r"vLLM is not installed: pip install 'anybit\[vllm\]'"):
        serving.choose_engine("vllm")
    with pytest.raises(KernelError, match=r"needs fastapi, uvicorn, openai, pydantic: pip install 'anybit\[serve\]'"):
        serving.choose_engine()


def test_what_transformers_cannot_do_is_refused(tmp_path: Path) -> None:
    cases.save_small_llama(tmp_path)
    server = serving.Server(str(tmp_path), tensor_parallel=2)
    with pytest.raises(serving.OptionError, match="--tensor-parallel, --memory and arguments after -- are for vLLM"):
        serving.serve(server, "transformers", lambda: None)


def test_heads_that_gpus_cannot_share_are_refused_before_vllm_starts(tmp_path: Path) -> None:
    cases.save_small_llama(tmp_path)
    server = serving.Server(str(tmp_path), port=free_port(), tensor_parallel=3)
    with pytest.raises(
        serving.OptionError, match=r"4 attention heads .* one of 1, 2, 4, .* --pipeline-parallel-size 3"
    ):
        serving.serve(server, "vllm", lambda: None)


def test_so_are_kv_heads(tmp_path: Path) -> None:
    """Four GPUs can share 12 heads, but not 6 KV heads."""
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 12, "num_key_value_heads": 6}))
    for ranks in (1, 2, 3, 6, 12):  # named as alternatives
        serving._refuse_uneven(serving.Server("m", tensor_parallel=ranks), tmp_path)
    with pytest.raises(serving.OptionError, match="4 cannot share the 6 KV heads of m: choose one of 1, 2, 3"):
        serving._refuse_uneven(serving.Server("m", tensor_parallel=4), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 12, "vocab_size": 300}))  # 320 in vLLM
    with pytest.raises(serving.OptionError, match="3 cannot share the 300 tokens of m: choose one of 1, 2, 4, or"):
        serving._refuse_uneven(serving.Server("m", tensor_parallel=3), tmp_path)


@has_server
def test_a_port_that_is_none_is_told_in_one_line() -> None:
    with pytest.raises(KernelError, match=r"127\.0\.0\.1:99999 does not answer like such a server: .*0-65535"):
        measure("http://127.0.0.1:99999", "m", 1.0, 1, 4, 1)


@has_server
def test_no_server_is_told_in_one_line() -> None:
    found = CliRunner().invoke(app, ["bench", "m", "--url", "http://127.0.0.1:1", "-r", "5", "--requests", "1"])
    assert isinstance(found.exception, KernelError) and "no server answers at http://127.0.0.1:1" in str(
        found.exception
    )


def test_what_is_no_server_is_told_in_one_line_too() -> None:
    pytest.importorskip("httpx")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk() -> None:
            connection, _ = listening.accept()
            connection.recv(4096)
            connection.sendall(b"\x1b[2J no HTTP\r\n\r\n")
            connection.close()

        threading.Thread(target=talk, daemon=True).start()
        with pytest.raises(KernelError, match="does not answer like such a server") as error:
            measure(f"http://127.0.0.1:{listening.getsockname()[1]}", "m", 1.0, 1, 4, 1)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([{"choices": [{"text": "a"}], "usage": {"completion_tokens": 2}}], 2),
        ([{"choices": [{"text": "a"}], "usage": {"completion_tokens": "\x1b[2J"}}], 1),
        ([{"choices": [{"text": "a"}], "usage": {"completion_tokens": 10**30}}], 1),
        ([{"choices": [{"text": "a"}]}] * 1000, "for 4 tokens asked for"),
        ([["\x1b[2J"]], "AttributeError"),
        ([{"choices": 3}], "TypeError"),
        ([{"error": "\x1b[2J"}], "the server said: '\\x1b[2J'"),
        ([{"choices": [{"text": "a"}]}, {"error": {"message": "the engine has died"}}], "the engine has died"),
    ],
)
def test_what_a_server_makes_up_is_no_figure(events: list[Any], found: int | str) -> None:
    httpx = pytest.importorskip("httpx")
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)

    async def asked() -> Answer:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
        async with httpx.AsyncClient(transport=transport) as client:
            return await ask(client, "http://there", "m", "Hi", 4, True)

    answer = asyncio.run(asked())
    assert answer.tokens == found if isinstance(found, int) else found in answer.error and not answer.tokens


class Answering(BaseHTTPRequestHandler):
    """A server of one-token answers; heard: the API keys of its completions."""

    heard: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        self.heard.append(self.headers["Authorization"])
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n')

    def log_message(self, *_: Any) -> None:
        pass


def test_a_proxy_is_not_asked_about_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a server that requires a key queried without one."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    heard = Answering.heard = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{listening.server_port}"
        up = threading.Event()
        threading.Thread(target=serving._when_up, args=(url, up.set), daemon=True).start()
        assert up.wait(10), "the server's health was asked of a proxy"
        assert measure(url, "m", 100.0, 2, 3, 4).failed == 0 and heard == ["Bearer secret"] * 2
        listening.shutdown()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make a certificate")
def test_a_certificate_that_nobody_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bench's error names the certificate, and bench accepts it if it, or any, is to be trusted."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *names], check=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as listening:
        listening.socket = context.wrap_socket(listening.socket, server_side=True)
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        url = f"https://127.0.0.1:{listening.server_port}"
        words = ["bench", "m", "-r", "100", "--requests", "2", "--url"]
        wrong = CliRunner().invoke(app, [*words, url]).exception
        assert isinstance(wrong, KernelError) and "is not trusted" in str(wrong) and "--insecure" in str(wrong)
        plain = CliRunner().invoke(app, [*words, url.replace("https", "http")]).exception
        assert isinstance(plain, KernelError) and "needs https://" in str(plain)
        assert CliRunner().invoke(app, [*words, url, "--insecure"]).exit_code == 0
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert measure(url, "m", 100.0, 2, 3, 4).failed == 0
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
        with pytest.raises(serving.OptionError, match="SSL_CERT_FILE or SSL_CERT_DIR names no certificates"):
            measure(url, "m", 100.0, 2, 3, 4)
        listening.shutdown()


def test_the_line_to_paste_names_address_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert "curl 'http://[::1]:8000'/v1/" in serving.Server("m", host="::1").example()
    assert "http://[::1]:8000" in serving.Server("m", host="::").example()
    assert "Authorization" not in serving.Server("m").example()
    keyed = serving.Server("m", others=["--api-key", "secret"]).example()
    assert '-H "Authorization: Bearer ${VLLM_API_KEY:?set it to the key of this server}"' in keyed
    assert "secret" not in keyed
    with pytest.raises(serving.OptionError, match="--port=9 is an option of `anybit serve` itself: put it before --"):
        serving.serve(serving.Server("m", others=["--port=9"]), "vllm", lambda: None)


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
        serving.serve(asked, "vllm", lambda: None)


def test_a_second_interruption_ends_vllm_and_all_that_it_started(tmp_path: Path) -> None:
    """Like Ctrl-C on a terminal, which signals the whole group; here with programs that ignore it."""
    psutil = pytest.importorskip("psutil")
    deaf = "import signal, sys; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; "
    child = deaf + "signal.pause()"
    parent = deaf + f"import subprocess; subprocess.Popen([sys.executable, '-c', {child!r}]); print(1); signal.pause()"
    program = f"import sys; from anybit.hf import serving; serving._run([sys.executable, '-c', {parent!r}], None)"
    process = subprocess.Popen(
        [cases.sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.read(1) == b"1"
        family = psutil.Process(process.pid).children(recursive=True)
        time.sleep(1)  # the last program started now ignores signals
        os.killpg(process.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=10)
        assert len(family) == 2 and not psutil.wait_procs(family, timeout=10)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
