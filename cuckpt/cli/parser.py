"""The verbs and their options."""

import argparse
import re
from typing import TYPE_CHECKING, Any

import cuckpt

if TYPE_CHECKING:
    from cuckpt.simulator import Fault

_CONTRACT = """\
With options in the place of a verb it is NVIDIA's cuda-checkpoint, as in
  cuckpt --action lock --pid PID --timeout MS
and `cuckpt install-shim DIR` makes a program of that name.
"""


class _Version(argparse.Action):
    """Looks the version up only when it is asked for, since that takes long."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"cuckpt {cuckpt.__version__}")
        parser.exit()


class _Verb(argparse.ArgumentParser):
    """Tells of arguments that it does not know with its own usage."""

    def parse_known_args(self, *arguments: Any) -> Any:  # type: ignore[override]
        found, unknown = super().parse_known_args(*arguments)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line.

    Returns
    -------
    argparse.ArgumentParser
        What it parses has the attribute `verb`, None without one.
    """
    whole = argparse.ArgumentParser(
        prog="cuckpt",
        description="Checkpoint and restore the GPU state of CUDA processes.",
        epilog=_CONTRACT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument(
        "--version", action=_Version, nargs=0, help="show the version and exit"
    )
    verbs = whole.add_subparsers(
        title="verbs", metavar="VERB", dest="verb", parser_class=_Verb
    )
    for add in (
        _add_ps,
        _add_suspend,
        _add_resume,
        _add_recover,
        _add_save,
        _add_load,
        _add_image,
        _add_doctor,
        _add_info,
        _add_install_shim,
        _add_demo,
        _add_simulate,
    ):
        add(verbs)
    return whole


if TYPE_CHECKING:
    _Verbs = argparse._SubParsersAction[_Verb]


def _add_ps(verbs: "_Verbs") -> None:
    verb = verbs.add_parser(
        "ps",
        help="list the CUDA processes",
        description="List the CUDA processes that this user may ask about.",
    )
    verb.add_argument(
        "--tree", type=_pid, metavar="PID", help="only this one and its descendants"
    )
    _add_json(verb)


def _add_suspend(verbs: "_Verbs") -> None:
    verb = verbs.add_parser(
        "suspend",
        help="lock and checkpoint processes: their GPU memory is free",
        description="Lock all, then checkpoint all. If one fails, each gets the state "
        "back that it had.",
    )
    _add_processes(verb)
    _add_timeout(verb)


def _add_resume(verbs: "_Verbs") -> None:
    verb = verbs.add_parser(
        "resume",
        help="restore and unlock processes: they run",
        description="Restore all, then unlock all. If one fails, each gets the state "
        "back that it had. Those that run stay as they are.",
    )
    _add_processes(verb)
    _add_device_map(verb)


def _add_recover(verbs: "_Verbs") -> None:
    verb = verbs.add_parser(
        "recover",
        help="let processes run, whatever state they were left in",
        description="Bring each to RUNNING, from whatever state somebody left it in.",
    )
    _add_processes(verb)


def _add_save(verbs: "_Verbs") -> None:
    verb = verbs.add_parser(
        "save",
        help="copy the GPU memory of processes to an image",
        usage="cuckpt save [options] PID... DIR",
        description="Lock all, and copy the GPU memory of all to an image in a folder, "
        "which is made. They are suspended then, and no copy is in host memory. If one "
        "fails, each gets the state back that it had. Needs CUDA 13.4.",
    )
    _add_processes(verb)
    verb.add_argument("folder", metavar="DIR", type=_new_folder)
    _add_timeout(verb)
    verb.add_argument(
        "--replace", action="store_true", help="replace an image that is there"
    )
    verb.add_argument(
        "--fallback",
        action="append",
        default=[],
        metavar="DIR",
        help="take this folder if the other cannot; as often as you like",
    )
    verb.add_argument(
        "--no-sync",
        action="store_true",
        help="do not wait for the disk: the page cache takes it, ten times as fast",
    )
    verb.add_argument(
        "--dry-run", action="store_true", help="only check, and tell what would be"
    )


def _add_load(verbs: "_Verbs") -> None:
    verb = verbs.add_parser(
        "load",
        help="bring the processes of an image back: they run",
        description="Copy the GPU memory of all processes of an image back, then let "
        "them run. If one fails, all stay suspended. Needs CUDA 13.4.",
    )
    verb.add_argument("folder", metavar="DIR", type=_old_folder)
    _add_device_map(verb)
    verb.add_argument(
        "--any-process",
        action="store_true",
        help="also processes that were made anew with these pids, as by CRIU",
    )
    verb.add_argument(
        "--remove", action="store_true", help="remove the image once all run"
    )
    _add_trace(verb)
    _add_json(verb)


def _add_image(verbs: "_Verbs") -> None:
    verb = verbs.add_parser(
        "image",
        help="tell what is in an image, or compare it with its checksums",
        description="info tells what is in an image; verify also reads it, and "
        "compares all of it with its checksums.",
    )
    verb.add_argument("what", choices=["info", "verify"])
    verb.add_argument("folder", metavar="DIR")
    _add_json(verb)


def _add_doctor(verbs: "_Verbs") -> None:
    verb = verbs.add_parser(
        "doctor",
        help="tell what will stand in the way",
        description="Look at driver, permissions, GPUs, host memory and processes. "
        "Changes nothing. Exits 1 if there is a problem.",
    )
    verb.add_argument("pids", type=_pid, nargs="*", metavar="PID")
    _add_json(verb)


def _add_info(verbs: "_Verbs") -> None:
    verb = verbs.add_parser(
        "info",
        help="show the version and the driver in use",
        description="Show the version and the CUDA driver in use. Exits 0 also "
        "without a driver; 1 if CUCKPT_LIBCUDA names one that does not load.",
    )
    _add_json(verb)


def _add_install_shim(verbs: "_Verbs") -> None:
    verb = verbs.add_parser(
        "install-shim",
        help="make a program named cuda-checkpoint",
        description="Put a program named cuda-checkpoint into a folder, which CRIU "
        "and others find if it is in PATH.",
    )
    verb.add_argument("folder", metavar="DIR")
    verb.add_argument(
        "--force", action="store_true", help="replace another file of that name"
    )
    _add_json(verb)


def _add_demo(verbs: "_Verbs") -> None:
    verb = verbs.add_parser(
        "demo",
        help="checkpoint, restore and check a real process",
        description="Start a process that fills GPU memory with random bytes, "
        "suspend it, restore it and check every byte; then the same through "
        "custom storage. On the real driver and a GPU if there are, else on a "
        "simulated machine. Exits 0 only if every check passed.",
    )
    _add_memory(verb, "64MiB", "how much the process fills")


def _add_simulate(verbs: "_Verbs") -> None:
    verb = verbs.add_parser(
        "simulate",
        help="run a command on a simulated machine with GPUs",
        usage="cuckpt simulate [options] -- CMD...",
        description="Run a command on a simulated machine with GPUs, for itself and "
        "its children. The exit status is the command's; 127 if there is no such "
        "command.",
        epilog="example: cuckpt simulate --gpus 2 --memory 4GiB -- python job.py",
    )
    verb.add_argument(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="how many GPUs, 1 to 16; default 1",
    )
    _add_memory(verb, "8GiB", "of each GPU: bytes, or as 512MiB or 4GiB")
    verb.add_argument(
        "--driver-version",
        type=_version,
        default=_version("13.5"),
        metavar="V",
        help="as 13.5 or 13050; default 13.5",
    )
    verb.add_argument(
        "--fault",
        type=_fault,
        action="append",
        metavar="FAULT",
        help="what is to go wrong, as restore=OUT_OF_MEMORY@2 (the second restore) "
        "or checkpoint,delay=5 (the first); also count=, when=after, kill=target or "
        "caller; as often as you like. Without one: those in CUCKPT_FAULTS",
    )
    verb.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="CMD", help=argparse.SUPPRESS
    )


def _add_processes(verb: argparse.ArgumentParser) -> None:
    """Add which processes are meant, and how to follow what is done to them."""
    which = verb.add_mutually_exclusive_group(required=True)
    which.add_argument("pids", type=_pid, nargs="*", default=[], metavar="PID")
    which.add_argument(
        "--tree", type=_pid, metavar="PID", help="this one and its descendants"
    )
    _add_trace(verb)
    _add_json(verb)


def _add_timeout(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--timeout-s",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="how long to wait for their GPU work in all, in seconds; default 10",
    )


def _add_device_map(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--device-map",
        type=_gpu_map,
        metavar="OLD=NEW[,OLD=NEW]...",
        help="which GPU the memory of another goes to: UUIDs, or the numbers that "
        "nvidia-smi shows. GPUs that are not named stay, or change places",
    )


def _add_trace(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--trace", metavar="FILE", help="write what happens, for ui.perfetto.dev"
    )


def _add_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="print one JSON object")


def _add_memory(verb: argparse.ArgumentParser, default: str, what: str) -> None:
    verb.add_argument(
        "--memory",
        type=_size,
        default=_size(default),
        metavar="SIZE",
        help=f"{what}; default {default}",
    )


def _pid(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text) or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"a pid is a positive number, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"expected seconds, not {text!r}")
    return seconds


def _gpu_map(text: str) -> dict[str | int, str | int]:
    pairs = [pair.split("=") for pair in text.split(",")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"expected as OLD=NEW,OLD=NEW, not {text!r}")
    gpu_map = {_gpu(old): _gpu(new) for old, new in pairs}
    if len(gpu_map) < len(pairs):
        raise argparse.ArgumentTypeError(f"a GPU stands there twice: {text!r}")
    return gpu_map


def _gpu(text: str) -> str | int:
    """Return the number of a GPU, or what must be a UUID."""
    return int(text) if re.fullmatch(r"[0-9]{1,4}", text) else text


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)(?:([KMGT])iB)?", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(
            f"expected a number of bytes, or as 512MiB or 4GiB, not {text!r}"
        )
    return int(match[1]) << 10 * " KMGT".index(match[2] or " ")


def _fault(text: str) -> "Fault":
    from cuckpt.simulator import Fault

    try:
        return Fault.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _version(text: str) -> int:
    match = re.fullmatch(r"(\d\d)(?:\.(\d)|(\d\d)0)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected as 13.5 or 13050, not {text!r}")
    return int(match[1]) * 1000 + int(match[2] or match[3] or 0) * 10


def _new_folder(text: str) -> str:
    if text.isdecimal():  # a pid, and the folder was forgotten
        raise argparse.ArgumentTypeError(
            f"{text} may be a pid: a folder of that name is ./{text}"
        )
    return text


def _old_folder(text: str) -> str:
    if text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text} may be a pid, and an image knows its processes: cuckpt load DIR; "
            f"a folder of that name is ./{text}"
        )
    return text
