"""Where the command ``tdpfed`` begins: beside the package, whose import takes a second or two of PyTorch's.

Ctrl-C in that time ends the process as it would any other program, without a traceback.
"""

import signal


def main() -> None:
    """Import the command line and run it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not where whoever started this has Ctrl-C ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tdpfed.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()
