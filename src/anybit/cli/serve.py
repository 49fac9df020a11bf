"""anybit serve, anybit bench."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from anybit.cli.common import JsonOption, Model, SchemeOption, TrustOption, errors, output, print_json
from anybit.errors import KernelError
from anybit.scheme import Scheme


class EngineName(StrEnum):
    """A server for OpenAI-compatible endpoints."""

    vllm = "vllm"
    transformers = "transformers"


def serve(
    model: Model,
    others: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments passed to vLLM's server unchanged.")
    ] = None,
    scheme: SchemeOption = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs that share each layer (vLLM).")] = 1,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a prompt and its answer; by default the model's.")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(min=0.05, max=1.0, help="Fraction of the GPU's memory to use (vLLM); by default 0.9."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of activations: float16, bfloat16, or auto, the model's.")] = "auto",
    engine: Annotated[
        EngineName | None, typer.Option(help="The server to run; by default vLLM if it is installed and has a GPU.")
    ] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Serve a model over OpenAI-compatible endpoints, with vLLM if it is installed, else with transformers.

    \b
    Examples:
    anybit serve smollm2-w4
    anybit serve ./llama --scheme w4a16g128 --port 9000
    anybit serve ./llama-w4 --tensor-parallel 2 --memory 0.8
    """
    parsed = None if scheme is None else Scheme.parse(scheme)
    from anybit.vllm.serving import Server, choose_engine
    from anybit.vllm.serving import serve as run

    chosen, why = choose_engine(None if engine is None else engine.value)
    server = Server(
        model, parsed, host, port, tensor_parallel, max_length, memory, dtype, list(others or ()), trust_remote_code
    )
    name = {"vllm": "vLLM", "transformers": "transformers serve"}[chosen]
    worker = ", its worker in a process of its own" if chosen == "vllm" and server.own_worker else ""
    errors.print(
        f"{name} serves {model}{f' in {parsed}' if parsed else ''} at {server.url}: {why}{worker}",
        markup=False, soft_wrap=True,
    )  # fmt: skip

    def ready() -> None:
        errors.print(f"ready; try it:\n{server.example()}", markup=False, soft_wrap=True)

    try:
        code = run(server, chosen, ready)
    except KernelError:
        errors.print()  # the server's last line may be unfinished
        raise
    if code:
        raise typer.Exit(code if code > 0 else 1)


def bench(
    model: Annotated[str, typer.Argument(help="The model's name on the server: what `anybit serve` was given.")],
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    rates: Annotated[
        list[float] | None, typer.Option("--rate", "-r", help="Requests per second; may be repeated.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at each rate.")] = 64,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words of each prompt.")] = 100,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    picture: Annotated[Path | None, typer.Option(help="Draw the figures into this file (.png, .svg, .pdf).")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", "-k", help="Trust any certificate of an https:// address, as curl -k does.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a running server: time to the first token, time per token and throughput by request rate.

    \b
    Examples:
    anybit bench smollm2-w4
    anybit bench ./llama-w4 -r 1 -r 4 -r 16 --picture load.svg
    """
    from dataclasses import asdict

    from anybit.hf.load_test import check_picture, measure
    from anybit.hf.load_test import picture as draw

    if picture is not None:
        check_picture(picture)
    found = []
    for rate in rates or [1.0, 4.0, 16.0]:
        one = measure(url.rstrip("/"), model, rate, requests, prompt_words, new_tokens, insecure)
        found.append(one)
        if not as_json:
            output.print(
                f"{rate:g} requests/s: first token {one.ttft_ms:.0f} ms (99 %: {one.ttft_p99_ms:.0f}), then "
                f"{one.tpot_ms:.1f} ms each (99 %: {one.tpot_p99_ms:.1f}), {one.tokens_per_second:.0f} tokens/s"
                + (f"; {one.failed} of {requests} failed" if one.failed else ""),
                markup=False,
            )
    if picture is not None:
        draw(picture, model, found)
        errors.print(f"drew {picture}", markup=False)
    if as_json:
        print_json({"model": model, "url": url, "rates": [asdict(one) for one in found]})
