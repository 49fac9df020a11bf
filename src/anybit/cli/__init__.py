"""The command line: quantize, generate, chat, serve, bench, eval, tune, explain, convert, info.

Text from files and libraries is printed with control characters escaped (``anybit.cli.common``).

Exit codes: 0 success; 1 an error, reported in one line; 2 wrong usage; 129 hung up; 130 interrupted; 143 terminated.
"""

import contextlib
import io
import os
import signal
import sys
import traceback
import warnings
from types import FrameType, TracebackType
from typing import Annotated, Any, NoReturn

import typer

from anybit.cli import checkpoints, evaluate, generate, quantize, serve, tune
from anybit.cli.common import errors, output
from anybit.errors import AnyBitError
from anybit.version import __version__

app = typer.Typer(
    name="anybit",
    help="Quantize language models to any bit-width, and run them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.print(f"anybit {__version__}", markup=False)
        raise typer.Exit


@app.callback()
def _anybit(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Quantize language models to any bit-width, and run them."""


app.command()(quantize.quantize)
app.command()(generate.generate)
app.command()(generate.chat)
app.command()(serve.serve)
app.command()(serve.bench)
app.command("eval")(evaluate.evaluate)
app.command()(tune.tune)
app.command()(tune.explain)
app.command()(checkpoints.convert)
app.command()(checkpoints.info)


# Signals that end a command; SIGHUP comes from a closing terminal, and does not exist on Windows.
_ENDS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _Terminated(BaseException):
    """A signal of ``_ENDS``, as an exception, so that half-written files are cleaned up."""


def main() -> None:
    """Run the command line."""
    sys.excepthook = _show_traceback
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Escape characters that stdout's encoding lacks, as stderr does.
        sys.stdout.reconfigure(errors="backslashreplace")
    # On shared cores, torch's OpenMP threads waste time spinning: a millisecond after every small op before they sleep.
    # Spinning for microseconds is 16 times as fast there, and as fast on idle cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for number in _ENDS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _terminate)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _note
            app(standalone_mode=True, prog_name="anybit")
    except AnyBitError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)
    except _Terminated as terminated:
        sys.exit(128 + int(terminated.args[0]))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        _fail(_of_system(error))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, by name, so that torch need not be imported
            raise
        _fail(f"{str(error).partition('. ')[0]}; a shorter text, fewer bits or another --device may fit")


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unexpected error, with control characters (from files) escaped."""
    errors.print("".join(traceback.format_exception(kind, error, trace)), markup=False, soft_wrap=True)


def _fail(message: str) -> NoReturn:
    errors.print(f"[bold red]error:[/] {_plain(message)}", highlight=False, soft_wrap=True)
    sys.exit(1)


def _of_system(error: OSError) -> str:
    """An OSError as "FILE: reason"."""
    try:
        sys.stdout.flush()
    except OSError:
        # Python would flush the rest again at exit and print an error of its own: send it to /dev/null.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{error.filename}: {reason}"


def _terminate(number: int, frame: FrameType | None) -> None:
    for other in _ENDS:  # a closing terminal may send several signals: do not interrupt the cleanup
        signal.signal(other, signal.SIG_IGN)
    raise _Terminated(number)


def _note(message: Warning | str, *where: Any, **more: Any) -> None:
    """Print a warning as one line, without its source line."""
    errors.print(f"[bold yellow]note:[/] {_plain(str(message))}", highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
