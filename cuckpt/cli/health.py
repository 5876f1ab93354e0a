"""`cuckpt doctor`: what will stand in the way, on a screen."""

import argparse
import itertools
from collections.abc import Sequence

from cuckpt.cli import screens
from cuckpt.diagnosis import Finding, doctor as examine

_COLOURS = {"problem": "red", "warning": "yellow", "ok": "green", "skipped": "dim"}
_INDENT = " " * 11


def doctor(arguments: argparse.Namespace) -> int:
    """Print what was found.

    Parameters
    ----------
    arguments : argparse.Namespace

    Returns
    -------
    int
        Exit status: 1 if there is a problem.
    """
    findings = examine(arguments.pids)
    problems = sum(finding.level == "problem" for finding in findings)
    if arguments.json:
        screens.print_json(
            {"findings": [vars(finding) for finding in findings], "problems": problems}
        )
    else:
        _print(findings)
    return 1 if problems else 0


def _print(findings: Sequence[Finding]) -> None:
    for subject, about in itertools.groupby(findings, lambda found: found.subject):
        print(screens.coloured(subject, "bold"))
        for finding in about:
            _print_finding(finding)
    levels = [finding.level for finding in findings]
    counts = [
        screens.counted(levels.count(level), level) for level in ("problem", "warning")
    ]
    print(f"\n{', '.join(counts)}")


def _print_finding(finding: Finding) -> None:
    level = screens.coloured(f"{finding.level:7}", _COLOURS[finding.level])
    what = screens.hanging(finding.what, _INDENT, _INDENT).lstrip()
    print(f"  {level}  {what}")
    if finding.why:
        print(screens.hanging(f"{finding.why}.", _INDENT, _INDENT))
    if finding.do:
        print(screens.hanging(f"{finding.do}.", f"{_INDENT}To do: ", _INDENT))
