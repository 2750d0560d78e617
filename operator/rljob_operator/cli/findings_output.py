"""Findings for people and for programs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from rljob_api.findings import Finding, Severity
from rljob_operator.cli.checking import CheckedJob

_STYLES = {Severity.ERROR: ("error", "bold red"), Severity.WARNING: ("warning", "yellow")}


def print_findings(console: Console, findings: list[Finding]) -> None:
    """One finding a line, never wrapped: lines are searched and copied."""
    for finding in findings:
        word, style = _STYLES[finding.severity]
        text = Text.assemble("  ", (f"{word:7}", style), "  ")
        if finding.path:
            text.append(f"{finding.path}: ", style="bold")
        text.append(f"{finding.message} ({finding.reason})")
        console.print(text, soft_wrap=True)


def print_checked(console: Console, checked: CheckedJob) -> None:
    """Headline and findings of one job."""
    num_errors = sum(finding.severity is Severity.ERROR for finding in checked.findings)
    num_warnings = len(checked.findings) - num_errors
    counts = [
        f"{number} {word}{'s' if number > 1 else ''}"
        for number, word in ((num_errors, "error"), (num_warnings, "warning"))
        if number
    ]
    verdict = ("valid", "green") if checked.is_valid else ("invalid", "bold red")
    label = checked.source if checked.name is None else f"{checked.source}: {checked.name}"
    console.print(Text.assemble(f"{label}: ", verdict, f" ({', '.join(counts)})" if counts else ""), soft_wrap=True)
    print_findings(console, checked.findings)


def to_json(checked: CheckedJob) -> dict[str, Any]:
    """The same as data."""
    return {
        "source": checked.source,
        "name": checked.name,
        "valid": checked.is_valid,
        "findings": [
            {
                "severity": str(finding.severity),
                "reason": str(finding.reason),
                "path": finding.path,
                "message": finding.message,
            }
            for finding in checked.findings
        ],
    }
