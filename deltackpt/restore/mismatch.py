# SPDX-License-Identifier: Apache-2.0
"""The error for a template that does not match a step: lists the differences and the remedy."""

from __future__ import annotations

from collections.abc import Mapping

from deltackpt.errors import TemplateMismatch
from deltackpt.format.globs import listed

#: Shown for a leaf that one side lacks.
NOTHING = "no such array"


def mismatch(
    step: int, faults: Mapping[str, tuple[str, str]], advice: str | None = None
) -> TemplateMismatch:
    """Returns the error for leaves in which a template and a step differ.

    Args:
      step: the step.
      faults: each leaf's name in errors, the most important first, mapped to what the template has
        and what the step has; ``NOTHING`` if it lacks the leaf.
      advice: what to do; by default to use another template, or ``read_state``.
    """
    (first, (want, have)), *rest = faults.items()
    if advice is None:
        how = (
            "which reads the leaves that both have and keeps the others"
            if NOTHING in (want, have)
            else "with a placeholder (...) in place of this leaf"
        )
        advice = (
            f"pass the saved state as the template, call read_state({step}, template), "
            f"{how}, or restore without a template"
        )
    if any(want == NOTHING for want, _ in faults.values()):
        advice += "; leaves that only the step has would be lost"
    message = (
        f"step {step}, {first}: expected {want} as in the template, found {have} in the step; "
        f"{advice}"
    )
    template_only, step_only, different = [], [], []
    for name, (want, have) in faults.items() if rest else ():
        if have == NOTHING:
            template_only.append(f"{name}: {want}")
        elif want == NOTHING:
            step_only.append(f"{name}: {have}")
        else:
            different.append(f"{name}: {want} in the template, {have} in the step")
    for title, lines in (
        ("only the template has", template_only),
        ("only the step has", step_only),
        ("both have, but differently", different),
    ):
        if lines:
            message += f"\n{title}\n{listed(lines)}"
    return TemplateMismatch(message)
