# SPDX-License-Identifier: Apache-2.0
"""Replaces Python calls in error messages with commands, for users of the command line."""

from __future__ import annotations

import re

_LISTS = "deltackpt ls lists the steps, and ls --wal the recovery points"
_BY_COMMANDS = (
    (r"all_steps\(\) and (?:recovery_)?points\(\) list what (?:there is|exists)", _LISTS),
    (r"(?:see|call) (?:all_)?steps(?:\(\))? and (?:recovery_)?points\(\)", _LISTS),
    (r"list the steps with all_steps\(\)", "deltackpt ls lists the steps"),
    (r"see (?:all_)?steps\b(?:\(\))?", "deltackpt ls lists the steps"),
    (r"see step\.tables", "deltackpt show lists tables and slots"),
    (
        r"restore a step: restore_latest\(wal=False\)",
        "deltackpt ls lists the steps, which do not need the WAL",
    ),
    (
        r"restore the step itself: restore_latest\(wal=False\)",
        "deltackpt show shows the step below it",
    ),
    (
        r"restore an older step: restore_latest\(\) falls back automatically",
        "deltackpt verify reports which steps and recovery points are intact",
    ),
    (
        r"restore_latest\(\) falls back automatically to the previous recovery point",
        "deltackpt verify reports which steps and recovery points are intact",
    ),
    (r": restore it, or call restore_latest\(\)", ""),
    (r"restore_latest\(\) examines all of them", "deltackpt verify examines all of them"),
)


def as_commands(text: str) -> str:
    """Returns the text of an error, with commands instead of Python calls."""
    for pattern, command in _BY_COMMANDS:
        text = re.sub(pattern, command, text)
    return text
