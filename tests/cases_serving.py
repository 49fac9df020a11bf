"""A real server in its own process, and checks of it that all engines share."""

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cases_models import save_byte_tokenizer

ROOT = Path(__file__).parent.parent
CONTEXT = 256


def save_small_llama(folder: Path, tied: bool = False) -> Path:
    """A random Llama whose greedy outputs do not depend on the last bit, with a byte tokenizer."""
    torch.manual_seed(0)
    size = save_byte_tokenizer(folder)
    ids = AutoTokenizer.from_pretrained(folder)  # programs stop at the tokenizer's EOS, or at the model's
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=size, max_position_embeddings=CONTEXT, bos_token_id=ids.bos_token_id,
        eos_token_id=ids.eos_token_id, pad_token_id=ids.pad_token_id, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.08)
    model.save_pretrained(folder)
    return folder


class Running:
    """A server that is up. said: its output so far."""

    def __init__(self, model: Path, url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.model, self.url, self.process, self._log = str(model), url, process, log

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def complete(self, prompt: str, new_tokens: int = 12, **words: Any) -> Any:
        import httpx

        body = {"model": self.model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, **words}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def text(self, prompt: str, new_tokens: int = 12) -> str:
        answer = self.complete(prompt, new_tokens)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def hang_up(self, prompt: str) -> None:
        """Open a stream, read its first piece, and close the connection."""
        import httpx

        body = {"model": self.model, "prompt": prompt, "max_tokens": 200, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as answer:
            next(answer.iter_lines())


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port for a server to listen on, which the system gives to no other program meanwhile: it stays bound."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def served(model: Path, log: Path, *options: str, seconds: float = 120) -> Iterator[Running]:
    """`anybit serve MODEL`, from when it says that it is ready."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(held_port())
        command = [sys.executable, "-m", "anybit", "serve", str(model), "--port", str(port), *options]
        out = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": path})
        stack.callback(_end, process)
        running = Running(model, f"http://127.0.0.1:{port}", process, log)
        end = time.monotonic() + seconds
        while "ready; try it" not in running.said:
            assert process.poll() is None, f"the server ended: {running.said}"
            assert time.monotonic() < end, f"the server is not up after {seconds} s: {running.said}"
            time.sleep(0.2)
        yield running


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def check_answers(server: Running) -> None:
    """Health, and the printed command."""
    import httpx

    assert httpx.get(f"{server.url}/health").status_code == 200
    line = next(line for line in server.said.splitlines() if line.startswith("curl "))
    pasted = subprocess.run(line, shell=True, capture_output=True, text=True, check=True, timeout=120)
    assert '"role":"assistant"' in pasted.stdout.replace('": "', '":"')


def check_many_at_once(server: Running, count: int) -> None:
    """Requests of mixed lengths, some of which hang up: every finished answer is that of the request alone."""
    prompts = ["xyz" * (1 + 7 * i % 20) + str(i) for i in range(count)]
    alone = [server.text(prompt, 4 + i % 9) for i, prompt in enumerate(prompts)]
    with concurrent.futures.ThreadPoolExecutor(count + 4) as pool:
        gone = [pool.submit(server.hang_up, f"bye {i}") for i in range(4)]
        together = [pool.submit(server.text, prompt, 4 + i % 9) for i, prompt in enumerate(prompts)]
        assert [one.result() for one in together] == alone
        for one in gone:
            one.result()
    assert server.text(prompts[0], 4) == alone[0]


def check_strangers(server: Running) -> None:
    """Requests can get answers of the one model, and nothing else: no other model, no chat template, no file."""
    import httpx

    before = server.text("still here")
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    chat = {"model": server.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    for path, body in (
        ("v1/completions", {"model": "/etc", "prompt": "abc"}),
        ("v1/completions", {"model": server.model + "/../" + Path(server.model).name, "prompt": "abc"}),
        ("v1/chat/completions", {**chat, "model": str(ROOT)}),
        ("v1/chat/completions", {**chat, "chat_template": endless}),
        ("v1/chat/completions", {**chat, "chat_template_kwargs": {"chat_template": endless}}),
        ("v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}),
        ("load_model", {"model": "/etc"}),
        ("reset", {}),
        ("sleep", {}),
        ("collective_rpc", {"method": "x"}),
    ):
        answer = httpx.post(f"{server.url}/{path}", json=body, timeout=30)
        assert 400 <= answer.status_code < 500, (path, body, answer.status_code, answer.text)
        assert "root:" not in answer.text
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 30) as raw:
        raw.sendall(
            b"GET /%1b[31mred%0aINFO HTTP/1.1\r\nHost: x\r\nx-request-id: \x1b[31m\r\nConnection: close\r\n\r\n"
        )
        assert raw.recv(100).startswith(b"HTTP/1.1 4")
    assert server.text("still here") == before
    assert "\x1b[31m" not in server.said
    assert "abc" not in httpx.get(f"{server.url}/metrics").text


def check_shutdown(server: Running) -> None:
    """Told to shut down during an answer, the server ends."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.complete, "to be cut off", 200)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) in (0, 143, -signal.SIGTERM)
        with contextlib.suppress(Exception):  # cut off, or finished: both are fine
            asked.result(timeout=10)
