"""What ``anybit serve`` was asked to serve, with arguments for vLLM."""

import json
import os
import shlex
from dataclasses import dataclass, field

from anybit.errors import OptionError
from anybit.scheme import Scheme


@dataclass(frozen=True)
class Server:
    """What to serve, and where.

    scheme: quantize while loading.  tensor_parallel: GPUs per layer.  max_length: most tokens of a prompt and its
    answer.  memory: fraction of GPU memory for vLLM.  dtype: of activations; "auto": the model's.  others: arguments
    passed to vLLM unchanged.  trust_remote_code: run the model's own Python files.
    width: of a nested model, the bits of its weights to take.
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
    width: int | None = None

    @property
    def url(self) -> str:
        """The server's URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http{'s' if self.encrypted else ''}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def encrypted(self) -> bool:
        """Whether the server uses TLS."""
        return bool(values_of("ssl-certfile", self.others) or values_of("ssl-keyfile", self.others))

    def example(self) -> str:
        """An example curl command; if ``VLLM_API_KEY`` is needed and unset, the shell says so."""
        model = (values_of("served-model-name", self.others) or [self.model])[0]
        body = {"model": model, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        text = shlex.quote(json.dumps({**body, "max_tokens": 64}))
        keyed = vllm_environment(without_key(self.others)[1]).get("VLLM_API_KEY")  # an empty key is none
        # Do not print the key itself. -k: the certificate is self-signed or for another host name than this.
        key = ' -H "Authorization: Bearer ${VLLM_API_KEY:?set it to the key of this server}"' if keyed else ""
        curl = "curl -k" if self.encrypted else "curl"
        return f"{curl} {shlex.quote(self.url)}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {text}"

    @property
    def own_worker(self) -> bool:
        """Whether to run vLLM's worker in its own process even on one GPU, so that launches overlap with scheduling;
        False if arguments for vLLM may set the process layout.
        """
        return self.tensor_parallel == 1 and not any(name.startswith(_LAYOUTS) for name, *_ in options_in(self.others))


_LAYOUTS = ("distributed-executor", "config", "pipeline-parallel", "pp", "data-parallel", "dp", "nnodes")


def options_in(others: list[str]) -> list[tuple[str, list[str], list[str]]]:
    """(name without dashes and with hyphens, values, words) of each option among arguments for vLLM, in order.

    Words that belong to no option have the name "".
    """
    found = [("", list[str](), list[str]())]
    for word in others:
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            found.append((name.lstrip("-").replace("_", "-"), [value] if equals else [], [word]))
        else:
            found[-1][1].append(word)
            found[-1][2].append(word)
    return found


def values_of(option: str, others: list[str]) -> list[str]:
    """The values of an option (named without dashes) among arguments for vLLM; the last occurrence wins, as in vLLM."""
    return next((values for name, values, _ in reversed(options_in(others)) if name == option), [])


def without_key(others: list[str]) -> tuple[list[str], str | None]:
    """(arguments for vLLM without ``--api-key``, the key), as vLLM's log and the process list would show it.

    Raises OptionError for several keys: the environment variable takes only one.
    """
    found = options_in(others)
    keys = [key for name, values, _ in found if name == "api-key" for key in values]
    if len(keys) > 1:
        raise OptionError(f"--api-key takes one key, not {len(keys)}: vLLM would write several keys to its log")
    return [word for name, _, words in found if name != "api-key" for word in words], keys[0] if keys else None


KEEP_ALIVE = 75
"""Seconds before a server closes an idle connection. uvicorn's default, 5, is also httpx's (and so OpenAI's client's):
now and then a request would go out on a connection that is just being closed, and fail."""


def vllm_environment(key: str | None) -> dict[str, str]:
    """The environment of vLLM's server, with its API key."""
    found = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE), **os.environ}
    return found if key is None else {**found, "VLLM_API_KEY": key}
