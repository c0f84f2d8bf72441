# SPDX-License-Identifier: Apache-2.0
"""What an examination finds, and how it says it."""

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
    """One thing that was looked at.

    Attributes:
      area: of what.
      subject: what was looked at.
      severity: ``ok``; ``note``: worth knowing; ``warning``: works, but slower or with less than
        one may expect; ``problem``: saves or restores fail, or what they promise does not hold.
      found: what there is.
      meaning: what that means for checkpoints; empty where it goes without saying.
      action: what to do; empty where nothing is to be done.
      figures: what was found, for programs; units stand in the names.
    """

    area: Area
    subject: str
    severity: Severity
    found: str
    meaning: str = ""
    action: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def file_text(path: str | Path) -> str:
    """A file of the kernel's; empty where this system has none."""
    try:
        return Path(path).read_text(errors="surrogateescape")
    except OSError:
        return ""


def secs_text(secs: float) -> str:
    """Seconds in a unit that suits."""
    return f"{secs * 1e6:.0f} µs" if secs < 1e-3 else f"{secs * 1e3:.1f} ms"


def ago_text(secs: float | None) -> str:
    """How long ago something changed, in words."""
    if secs is None:
        return "gone meanwhile"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= length:
            return f"{secs / length:.0f} {unit} old"
    return f"{max(0.0, secs):.0f} s old"
