"""The command line: cuda-checkpoint's own, and the verbs of cuckpt.

What imports much is imported only when it is needed: CRIU calls cuda-checkpoint
several times for each process.
"""

import os
import signal
import sys

CONTRACT_NAME = "cuda-checkpoint"


def main(argv: "list[str] | None" = None) -> int:
    """Run the command line.

    Under the name of cuda-checkpoint, or with options instead of a verb, it is that of
    NVIDIA's tool.

    Parameters
    ----------
    argv : list of str, optional
        Arguments without the program's name; those of the process if left out.

    Returns
    -------
    int
        Exit status: 0 success, 1 failure, 2 wrong usage of a verb, 128 + the signal if
        one ended it.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while it starts
    if os.path.basename(sys.argv[0]) == CONTRACT_NAME:
        from cuckpt.cli import contract

        return contract.main(arguments, CONTRACT_NAME)
    first = arguments[0] if arguments else ""
    if first.startswith("-") and first not in ("-h", "--help", "--version"):
        from cuckpt.cli import contract

        return contract.main(arguments, "cuckpt")
    try:
        from cuckpt.cli import verbs

        return verbs.main(arguments)
    except KeyboardInterrupt:  # before that has its own way
        return 130
