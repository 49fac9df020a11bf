"""anybit serve."""

from typing import Annotated

import typer

from anybit.cli import options
from anybit.cli.common import errors
from anybit.scheme import Scheme


def serve(
    model: options.Model,
    others: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments passed to vLLM's server unchanged.")
    ] = None,
    scheme: options.Scheme = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8000,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs that share each layer.")] = 1,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a prompt and its answer; by default the model's.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.05, max=1.0, help="Fraction of the GPU's memory to use; by default 0.9.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of activations: float16, bfloat16, or auto, the model's.")] = "auto",
    width: options.Width = None,
    trust_remote_code: options.Trust = False,
) -> None:
    """Serve a model over OpenAI-compatible endpoints, with vLLM.

    \b
    Examples:
    anybit serve smollm2-w4
    anybit serve ./llama --scheme w4a16g128 --port 9000
    anybit serve ./llama-w4 --tensor-parallel 2 --memory 0.8
    anybit serve ./llama-w4 -- --max-num-seqs 64
    """
    parsed = None if scheme is None else Scheme.parse(scheme)
    from anybit.vllm.server import Server
    from anybit.vllm.serving import serve as run

    server = Server(
        model, parsed, host, port, tensor_parallel, max_length, memory, dtype, list(others or ()), trust_remote_code,
        width,
    )  # fmt: skip
    code = run(server, errors.print)
    if code:
        raise typer.Exit(code if code > 0 else 1)
