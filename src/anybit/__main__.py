"""The command ``anybit``, which ``python -m anybit`` runs too.

While the command line is imported there is nothing to clean up, and Python would print a traceback for Ctrl-C: a signal
ends the process at once.
"""

import os
import signal


def main() -> None:
    """Run the command line."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os._exit(128 + number))
    from anybit.cli import main as run

    run()


if __name__ == "__main__":
    main()
