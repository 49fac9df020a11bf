"""A server under overload, for a minute: python tests/serving/soak_serving.py [--requests 1000]

vLLM over a small quantized model with few cache pages: 1,000 concurrent requests of mixed lengths, some of which hang
up, some exceed the context and some are empty; requests that do not fit are preempted. Every finished answer
must equal that of its request alone, up to a token that was equally likely (another batch
sums in another order); no page leaks, and a signal during an answer ends the server.
Not a pytest test: it needs vLLM, and a minute.
"""

import argparse
import asyncio
import random
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]

import cases_serving as cases  # noqa: E402
from anybit.quantization.methods.registry import quantize_folder  # noqa: E402

CONTEXT = cases.CONTEXT
TIE = 0.03
"""Log-probabilities within this distance are ties in float16: those of the two likeliest tokens
differ by at most 0.016 from float32 (by 0.12 in bfloat16), in each of the two answers compared."""
Answer = tuple[list[int], list[dict[str, float]]]
"""Tokens, and for each the likeliest ones with their log-probabilities, if requested."""


def requests_of(count: int) -> list[tuple[str, str, int]]:
    """(kind, prompt, new tokens) of each request; a few dozen distinct ones are to be finished."""
    draw = random.Random(0)
    kinds = ["whole"] * 17 + ["hang up", "cancel", "empty", "beyond"]
    found = []
    for _ in range(count):
        kind = draw.choice(kinds)
        number = draw.randrange(48)
        prompt = f"{number} " + "ab cd " * (1 + 5 * number % 23)
        prompt = {"empty": "", "beyond": "q" * (4 * CONTEXT)}.get(kind, prompt)
        found.append((kind, prompt, 4 + 7 * number % 60))
    return found


async def ask(
    client: Any, server: cases.Running, kind: str, prompt: str, new: int, likely: int | None = None
) -> Answer | int | None:
    """The answer, the status of a refusal, or None if the client hung up. likely: log-probabilities per token."""
    import httpx

    body = {"model": server.model, "prompt": prompt, "max_tokens": new, "temperature": 0, "return_token_ids": True}
    body |= {} if likely is None else {"logprobs": likely, "return_tokens_as_token_ids": True}
    if kind == "hang up":
        body |= {"stream": True, "max_tokens": 100}
        async with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                return None
        return None
    try:
        sent = client.post(f"{server.url}/v1/completions", json=body)
        response = await (asyncio.wait_for(sent, 0.5) if kind == "cancel" else sent)
    except (TimeoutError, httpx.TransportError):
        if kind != "cancel":
            raise
        return None
    if response.status_code != 200:
        return int(response.status_code)
    choice = response.json()["choices"][0]
    return choice["token_ids"], (choice["logprobs"] or {}).get("top_logprobs") or []


def differs(got: Answer | int | None, alone: Answer | int | None) -> float:
    """How much less likely than the request's own token the first differing one was; 0 if none differs."""
    if not isinstance(got, tuple) or not isinstance(alone, tuple) or not len(got[0]) <= len(alone[0]) == len(alone[1]):
        return float("inf")
    for one, other, likely in zip(got[0], *alone, strict=False):
        if one != other:
            return likely[f"token_id:{other}"] - likely.get(f"token_id:{one}", float("-inf"))
    return 0.0 if len(got[0]) == len(alone[0]) else float("inf")


async def everything(server: cases.Running, asked: list[tuple[str, str, int]]) -> tuple[int, int, list[str]]:
    """The number of answers compared, of ties, and what is wrong."""
    import httpx

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=120) as client:
        alone = {}
        for kind, prompt, new in asked:
            if kind == "whole" and (prompt, new) not in alone:
                alone[prompt, new] = await ask(client, server, kind, prompt, new, likely=5)
        answers = await asyncio.gather(*(ask(client, server, *one) for one in asked), return_exceptions=True)
    wrong, compared, ties = [], 0, 0
    for (kind, prompt, new), got in zip(asked, answers, strict=True):
        if isinstance(got, BaseException):
            wrong.append(f"{kind}: {type(got).__name__}: {got}")
        elif kind == "beyond" and got not in (400, 422):
            wrong.append(f"a prompt beyond the context: {got!r}")
        elif kind == "empty" and isinstance(got, int) and got not in (400, 422):
            wrong.append(f"an empty prompt: {got}")
        elif kind == "whole":
            compared += 1
            apart = differs(got, alone[prompt, new])
            ties += 0 < apart <= TIE
            if apart > TIE:
                wrong.append(f"{prompt[:12]!r}..., {apart:.3f} apart: {got!r} for {alone[prompt, new]!r}")
    return compared, ties, wrong


def metrics(server: cases.Running) -> dict[str, float]:
    """vLLM's metrics by name, without labels."""
    import httpx

    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if line.startswith("vllm:"))
    return {name.partition("{")[0]: float(value) for name, _, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--scheme", default="w4a16g64")
    parser.add_argument("--pages", type=int, default=160, help="of the cache: too few for all concurrent requests")
    parser.add_argument("--patience", type=float, default=300, help="seconds until the server is up")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--serve", default="", help="options of anybit serve, as one argument")
    parser.add_argument("--vllm", default="", help="of vllm serve")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    (root / "plain").mkdir()
    quantize_folder(cases.save_small_llama(root / "plain"), root / "model", args.scheme)
    flags = ["--max-length", str(CONTEXT), "--dtype", args.dtype]
    flags += [*shlex.split(args.serve), "--", *shlex.split(args.vllm)]
    flags += ["--num-gpu-blocks-override", str(args.pages), "--no-enable-prefix-caching"]
    with cases.served(root / "model", root / "log", *flags, seconds=args.patience) as server:
        begin = time.perf_counter()
        compared, ties, wrong = asyncio.run(everything(server, requests_of(args.requests)))
        seconds = time.perf_counter() - begin
        for _ in range(50):  # the server releases disconnected clients' requests a step or two later
            figures = metrics(server)
            left = [figures.get(f"vllm:{name}", -1) for name in ("num_requests_running", "num_requests_waiting")]
            left.append(figures.get("vllm:kv_cache_usage_perc", -1))
            if not any(left):
                break
            time.sleep(0.2)
        preempted = figures.get("vllm:num_preemptions_total", 0)
        print(
            f"{args.requests} requests in {seconds:.1f} s: {compared} answers compared, {len(wrong)} wrong, {ties} ties"
        )
        print(f"preemptions {preempted:.0f}; afterwards running, waiting, fraction of the cache in use: {left}")
        print(*wrong[:5], sep="\n")
        cases.check_odd_prompts(server)
        cases.check_shutdown(server)
        print(f"ended during an answer with {server.process.returncode}")
    if wrong or any(left) or not preempted:
        raise SystemExit("the soak failed")


if __name__ == "__main__":
    main()
