"""`cuckpt demo`: a real process, checkpointed and checked."""

import argparse

from cuckpt.demo import main


def demo(arguments: argparse.Namespace) -> int:
    """Run the demo.

    Parameters
    ----------
    arguments : argparse.Namespace

    Returns
    -------
    int
        Exit status.
    """
    return main(arguments.memory)
