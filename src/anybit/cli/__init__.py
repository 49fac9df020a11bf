"""The command line: quantize, generate, chat, serve, eval, tune, explain, convert, info.

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
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

from anybit.cli import checkpoints, evaluate, generate, quantize, serve, tune
from anybit.cli.common import errors, output
from anybit.errors import AnyBitError
from anybit.version import __version__

app = typer.Typer(
    name="anybit",
    help="Quantize language models to any bit-width, and run them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # whose tables cut the names of options,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.print(f"anybit {__version__}")
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
app.command("eval")(evaluate.evaluate)
app.command()(tune.tune)
app.command()(tune.explain)
app.command()(checkpoints.convert)
app.command()(checkpoints.info)


# Signals that end a command; SIGHUP comes from a closing terminal, and does not exist on Windows.
_ENDS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_received: int | None = None
"""The signal that is ending this command."""


class _Terminated(BaseException):
    """A signal other than Ctrl-C, as an exception, so that half-written files are cleaned up."""


def main() -> None:
    """Run the command line."""
    global _received
    sys.excepthook, sys.unraisablehook = _show_traceback, _show_lost
    _check_streams()
    _received = None
    # nohup ignores SIGHUP.
    before = {number: found for number in _ENDS if (found := signal.getsignal(number)) not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, _end)
        with warnings.catch_warnings():
            warnings.showwarning = _note
            app(standalone_mode=True, prog_name="anybit")
    except (KeyboardInterrupt, _Terminated):
        sys.exit(128 + (_received or signal.SIGINT))
    except Exception as error:
        if _received is not None:  # a library made an error of it, as numpy does while it is imported
            sys.exit(128 + _received)
        if isinstance(error, AnyBitError):
            _fail(str(error))
        if isinstance(error, OSError):
            _fail(_of_system(error))
        if type(error).__name__ != "OutOfMemoryError":  # torch's, by name, so that torch need not be imported
            raise
        _fail(f"{str(error).partition('. ')[0]}; a shorter text, fewer bits or another --device may fit")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_streams() -> None:
    """Open standard streams that are closed; without stdout there is no place for results: an error."""
    # Files opened later would get their numbers, and a library's messages. The lowest free number is taken.
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115, PTH123
    closed = sys.stdout is None
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    if closed:
        _fail("standard output is closed: send it to /dev/null if nobody is to read it")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Escape characters that stdout's encoding lacks, as stderr does.
        sys.stdout.reconfigure(errors="backslashreplace")


def _show_lost(lost: "sys.UnraisableHookArgs") -> None:
    """End the process if an interrupt reached it in a destructor or a callback, which cannot raise it."""
    if _received is not None and lost.exc_type in (KeyboardInterrupt, _Terminated):
        os._exit(128 + _received)
    sys.__unraisablehook__(lost)


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unexpected error, with control characters (from files) escaped."""
    errors.print("".join(traceback.format_exception(kind, error, trace)))


def _fail(message: str) -> NoReturn:
    errors.print(f"[bold red]error:[/] {escape(message)}", markup=True)
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


def _end(number: int, frame: FrameType | None) -> None:
    global _received
    _received = number
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    for other in _ENDS:  # a closing terminal may send several signals: do not interrupt the cleanup
        signal.signal(other, signal.SIG_IGN)
    raise _Terminated


def _note(message: Warning | str, *where: object, **more: object) -> None:
    """Print a warning as one line, without its source line."""
    errors.print(f"[bold yellow]note:[/] {escape(str(message))}", markup=True)
