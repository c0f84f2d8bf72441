# SPDX-License-Identifier: Apache-2.0
"""Findings of the doctor, and how they are formatted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

Severity = Literal["ok", "note", "warning", "problem"]


Area = Literal["directory", "machine", "software"]


SCRATCH = ".deltackpt-doctor."


SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
      area: ``directory``, ``machine`` or ``software``.
      subject: what was checked.
      severity: ``ok``; ``note``: worth knowing; ``warning``: works, but slower or with weaker
        guarantees; ``problem``: saves or restores fail, or their guarantees do not hold.
      found: what was found.
      meaning: what that means for checkpoints; empty if it is obvious.
      action: what to do; empty if nothing has to be done.
      figures: machine-readable values; names end in units.
    """

    area: Area = "directory"
    subject: str
    severity: Severity = "ok"
    found: str
    meaning: str = ""
    action: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def file_text(path: str | Path) -> str:
    """Reads a file of the kernel; returns an empty string if it does not exist."""
    try:
        return Path(path).read_text(errors="surrogateescape")
    except OSError:
        return ""


def secs_text(secs: float) -> str:
    """Formats seconds in a suitable unit."""
    return f"{secs * 1e6:.0f} µs" if secs < 1e-3 else f"{secs * 1e3:.1f} ms"


def ago_text(secs: float | None) -> str:
    """Formats an age in seconds; None means that the object was removed."""
    if secs is None:
        return "removed since"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= length:
            return f"{secs / length:.0f} {unit} old"
    return f"{max(0.0, secs):.0f} s old"
