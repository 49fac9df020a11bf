"""Load-test a server: Poisson arrivals, time to first token (TTFT) and time per output token (TPOT)."""

import asyncio
import json
import os
import random
import ssl
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybit.errors import KernelError, OptionError, one_line

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")

SILENCE = 600.0
"""Seconds without a byte after which a request counts as failed."""


@dataclass(frozen=True)
class Answer:
    """One request: seconds to its first and last token, number of tokens; or the error."""

    first: float
    last: float
    tokens: int
    error: str = ""


@dataclass(frozen=True)
class Figures:
    """Results at one request rate. rate: requests/s.  ttft, tpot: ms, median and 99th percentile."""

    rate: float
    requests: int
    failed: int
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tpot_p99_ms: float
    tokens_per_second: float


async def ask(client: Any, url: str, model: str, prompt: str, new_tokens: int, ignore_eos: bool) -> Answer:
    """Stream one completion."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "stream": True}
    body |= {"temperature": 0}
    if ignore_eos:
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    begin, first, pieces, counted = time.perf_counter(), 0.0, 0, 0
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body, timeout=SILENCE) as response:
            if response.status_code != 200:
                said = await anext(response.aiter_bytes(200), b"")  # only the start: the body may be endless
                return Answer(0, 0, 0, f"{response.status_code}: {said!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("error"):  # after the response has started
                    return Answer(0, 0, 0, f"the server said: {str(event['error'])[:200]!r}")
                if any(choice.get("text") for choice in event.get("choices") or ()):
                    first = first or time.perf_counter() - begin
                    pieces += 1
                if pieces > 2 * new_tokens + 8:
                    return Answer(0, 0, 0, f"{pieces} chunks arrived for {new_tokens} tokens asked for")
                told = (event.get("usage") or {}).get("completion_tokens")
                counted = told if type(told) is int and 0 < told <= new_tokens else counted
    except Exception as error:
        return Answer(0, 0, 0, f"{type(error).__name__}: {error}")
    if not first:
        return Answer(0, 0, 0, "no token arrived")
    return Answer(first, time.perf_counter() - begin, counted or pieces)


async def _at_rate(
    url: str, model: str, rate: float, requests: int, words: int, new_tokens: int, trusted: ssl.SSLContext
) -> Figures:
    import httpx

    draw = random.Random(f"{rate}")
    prompts = [" ".join(draw.choices(_WORDS, k=words)) for _ in range(requests)]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    key = os.environ.get("VLLM_API_KEY")  # the same variable as the server's
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    here = httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")  # bypass proxies
    async with httpx.AsyncClient(limits=limits, headers=headers, trust_env=not here, verify=trusted) as client:
        vllm = (await client.get(f"{url}/version")).status_code == 200
        begin, tasks, at = time.perf_counter(), [], 0.0
        for prompt in prompts:
            at += draw.expovariate(rate)
            await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(client, url, model, prompt, new_tokens, vllm)))
        answers = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begin
    good = [answer for answer in answers if not answer.error]
    if not good:
        raise KernelError(f"no request at {rate:g} per second was answered: {answers[0].error}")
    ttft = sorted(1e3 * answer.first for answer in good)
    tpot = sorted(1e3 * (a.last - a.first) / max(1, a.tokens - 1) for a in good)

    def late(values: list[float]) -> float:
        return values[min(len(values) - 1, int(0.99 * len(values)))]

    total, failed = sum(answer.tokens for answer in good), requests - len(good)
    medians = statistics.median(ttft), statistics.median(tpot)
    return Figures(rate, requests, failed, medians[0], late(ttft), medians[1], late(tpot), total / seconds)


def measure(
    url: str, model: str, rate: float, requests: int, words: int, new_tokens: int, insecure: bool = False
) -> Figures:
    """Send ``requests`` prompts of ``words`` random words, Poisson arrivals at ``rate`` per second, and wait for all.

    Sends the key in ``VLLM_API_KEY``, if it is set.  insecure: do not verify the server's certificate.

    Raises KernelError if no server answers, its certificate is not trusted or httpx is not installed; OptionError for a
    rate that is not positive, and certificates that cannot be read.
    """
    if not rate > 0:
        raise OptionError(f"a rate must be above 0 requests per second, not {rate}")
    try:
        import httpx
    except ImportError:
        raise KernelError("measuring a server needs httpx: pip install 'anybit[serve]'") from None
    try:
        # Also reads SSL_CERT_FILE for servers on this machine, for which trust_env is off.
        trusted = httpx.create_ssl_context(verify=not insecure)
    except OSError as error:
        raise OptionError(f"SSL_CERT_FILE or SSL_CERT_DIR names no certificates: {one_line(error)}") from None
    try:
        return asyncio.run(_at_rate(url, model, rate, requests, words, new_tokens, trusted))
    except httpx.ConnectError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise KernelError(
                f"the certificate of {url} is not trusted ({one_line(error)}): set SSL_CERT_FILE to it or to its "
                "authority's, or do not verify it (anybit bench --insecure)"
            ) from None
        raise KernelError(f"no server answers at {url}: start one with `anybit serve {model}`") from None
    except (httpx.HTTPError, httpx.InvalidURL, ExceptionGroup) as error:  # a group: for an invalid port
        inner = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        hint = " (a server with a certificate needs https://)" if url.startswith("http://") else ""
        raise KernelError(f"{url} does not answer like such a server: {one_line(inner)}{hint}") from None


def check_picture(path: Path) -> None:
    """Check before measuring: KernelError without matplotlib, OptionError for a file that it cannot write."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise KernelError("a picture needs matplotlib: pip install 'anybit[plots]'") from None
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise OptionError(f"--picture {path} must end in one of {', '.join('.' + kind for kind in kinds)}")
    if not path.parent.is_dir():
        raise OptionError(f"--picture {path}: there is no folder {path.parent}")


def picture(path: Path, model: str, figures: list[Figures]) -> None:
    """Plot TTFT, TPOT and throughput over the request rate. Raises like ``check_picture``."""
    check_picture(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6))
    rates = [one.rate for one in figures]
    lines = (
        ("time to first token, ms", ("ttft_ms", "ttft_p99_ms")),
        ("time per token, ms", ("tpot_ms", "tpot_p99_ms")),
        ("tokens per second", ("tokens_per_second",)),
    )
    for axis, (title, names) in zip(axes, lines, strict=True):
        for name in names:
            axis.plot(rates, [getattr(one, name) for one in figures], marker="o", label="99 %" if "p99" in name else "")
        axis.set(xlabel="requests per second", title=title, ylim=(0, None))
        axis.grid(alpha=0.3)
    figure.suptitle(model)
    figure.tight_layout()
    figure.savefig(path)
