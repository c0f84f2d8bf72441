# SPDX-License-Identifier: Apache-2.0
"""Checks the versions of required packages, and whether checksums use compiled code."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from deltackpt.upkeep.doctor.findings import Finding

#: Always shown; others only if there is a problem.
_SHOWN = ("jax", "orbax-checkpoint", "tensorstore", "numpy", "flax", "ray")


def version_findings() -> Iterator[Finding]:
    """Checks the versions of the installed packages against the supported ranges."""
    try:
        ours = importlib.metadata.distribution("deltackpt")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            area="software",
            subject="deltackpt",
            severity="warning",
            found="imported from a source tree that is not installed",
            meaning="The required versions cannot be determined.",
            action="pip install -e .",
        )
        return
    yield Finding(area="software", subject="deltackpt", severity="ok", found=ours.version)
    python = ours.metadata["Requires-Python"] or ""
    yield version_finding("python", platform.python_version(), python, required=True)
    requirements = {}
    for text in ours.requires or ():
        requirement = Requirement(text)
        if requirement.name not in requirements or requirement.marker is None:
            requirements[requirement.name] = requirement
    for name in (*_SHOWN, *sorted(requirements.keys() - {*_SHOWN})):
        requirement = requirements.get(name)
        if requirement is None:
            continue
        marker = requirement.marker
        required = marker is None or marker.evaluate({**default_environment(), "extra": ""})
        finding = version_finding(
            name, _installed(name), str(requirement.specifier), required=required
        )
        if name in _SHOWN or (required and finding.severity != "ok"):
            yield finding


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_finding(name: str, found: str | None, supported: str, *, required: bool) -> Finding:
    """Checks the version of a package.

    Args:
      name: name of the package, or ``python``.
      found: its version; None if it is not installed.
      supported: the supported range, such as ``>=1.2,<2``.
      required: whether deltackpt cannot work without it.
    """
    wanted = ",".join(sorted(supported.split(","), reverse=True))
    action = f'pip install "{name}{wanted}"' if name != "python" else f"use python {wanted}"
    figures = {"version": found, "supported": wanted}
    if found is None:
        return Finding(
            area="software",
            subject=name,
            severity="problem" if required else "note",
            found="not installed",
            meaning="" if required else "Only features that build on it need it.",
            action=action if required else f"if you need it: {action}",
            figures=figures,
        )
    fits = SpecifierSet(supported).contains(found, prereleases=True)
    return Finding(
        area="software",
        subject=name,
        severity="ok" if fits else "problem",
        found=found if fits else f"{found}, supported is {wanted}",
        meaning="" if fits else "deltackpt is not tested with it.",
        action="" if fits else action,
        figures=figures,
    )


def checksum_findings() -> Iterator[Finding]:
    """Checks that checksums are computed by compiled code."""
    import google_crc32c

    fast = google_crc32c.implementation == "c"
    yield Finding(
        area="software",
        subject="google-crc32c",
        severity="ok" if fast else "problem",
        found=f"{google_crc32c.implementation} implementation",
        meaning="" if fast else "Every byte is checksummed: saves and restores are very slow.",
        action="" if fast else "pip install --force-reinstall --only-binary :all: google-crc32c",
        figures={"implementation": google_crc32c.implementation},
    )
