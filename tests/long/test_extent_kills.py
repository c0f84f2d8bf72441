# SPDX-License-Identifier: Apache-2.0
"""SIGKILL and power cuts at any moment while bundles are stored in extents and dropped.

Acknowledged bundles exist, bit for bit; dropped ones do not; in-flight ones may or may not. Power
cuts are those of ``test_power_cuts``: they lose what the file system has not fsynced.
``tests/test_extents.py`` loses blocks that the drive has not written.
"""

from __future__ import annotations

import collections
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import extent_worker
import pytest
from memory_pack import contents
from test_power_cuts import disk

from deltackpt.tiers.extent_store import ExtentFile

__all__ = ["disk"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

KILLS = 100
CUTS = 200
#: Runs per file; a new file then tests interrupted creation, too.
LIVES = 10
_LONGEST_SECS = 0.5


class Expected:
    """The bundles that must exist, according to the notes of the killed processes."""

    def __init__(self) -> None:
        #: Maps a key to its length.
        self.held: dict[str, int] = {}
        self.restored = 0

    def take_in(self, notes: list[dict[str, Any]]) -> tuple[dict[str, int], set[str], str]:
        """Applies the notes of a process.

        Returns:
          The bundles that it was storing and dropping when it ended, and its last phase.
        """
        for note in notes:
            if note["note"] == "held":
                self.held[note["key"]] = note["nbytes"]
            elif note["note"] == "dropped":
                for key in note["keys"]:
                    del self.held[key]
        last = notes[-1] if notes else {"note": "opening"}
        holding = {last["key"]: last["nbytes"]} if last["note"] == "holding" else {}
        dropping = set(last["keys"]) if last["note"] == "dropping" else set()
        return holding, dropping, last["note"]

    def check(self, found: ExtentFile, holding: dict[str, int], dropping: set[str]) -> None:
        """Reads all stored bundles and checks that the required ones exist and no others."""
        there = {label.key: label.nbytes for label in found.refs()}
        assert self.held.keys() - dropping <= there.keys(), (self.held, there)
        assert there.items() <= (self.held | holding).items(), (self.held, holding, there)
        for label in found.refs():
            out = bytearray(label.nbytes)
            reader = found.open(label)
            reader.read_into(0, memoryview(out))
            assert out == contents(label.key, label.nbytes), label
            self.restored += 1
        self.held = there


def run(directory: Path, seed: int, secs: float, end: Callable[[subprocess.Popen], None]) -> list:
    """Returns the notes of a process that is ended some time after it started or was ready."""
    command = [sys.executable, extent_worker.__file__, str(directory), str(seed)]
    making = not (directory / "extents").exists()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        timer = threading.Timer(secs, end, [process])
        if making:
            timer.start()
        notes = []
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            notes.append(json.loads(line))
            if len(notes) == 1 and not making:
                timer.start()
        errors = process.stderr.read()
        process.wait()
        if timer.ident is not None:  # Otherwise the process failed before it was ready.
            timer.join()
    assert process.returncode == -9 or "Input/output error" in errors, errors
    return notes


def drawn_secs(random_: random.Random, directory: Path) -> float:
    """Draws when to end a process; if it creates the file, allows for Python's start."""
    if (directory / "extents").exists():
        return random_.uniform(0, _LONGEST_SECS)
    return random_.uniform(0.2, 0.6)


def test_every_acknowledged_bundle_survives_a_kill(tmp_path, campaign, figures):
    random_ = campaign.random("extent kills")
    phases: collections.Counter[str] = collections.Counter()
    kills, directory, expected = campaign.count(KILLS), tmp_path / "0", Expected()
    restored = 0
    for kill in range(kills):
        if kill % LIVES == 0:
            restored += expected.restored
            directory, expected = tmp_path / str(kill), Expected()
        notes = run(directory, kill, drawn_secs(random_, directory), lambda process: process.kill())
        holding, dropping, phase = expected.take_in(notes)
        phases[phase] += 1
        found = extent_worker.opened(directory)
        expected.check(found, holding, dropping)
        found.close()
    figures(
        "extents, kills", kills=kills, packs_read=restored + expected.restored, phase=dict(phases)
    )


def test_every_acknowledged_bundle_survives_a_power_cut(disk, campaign, figures):
    random_ = campaign.random("extent power cuts", disk.kind)
    phases: collections.Counter[str] = collections.Counter()
    cuts, directory, expected = campaign.count(CUTS) // 2, disk.mount / "0", Expected()
    restored = 0
    for cut in range(cuts):
        if cut % LIVES == 0:
            restored += expected.restored
            for path in (directory / "extents", directory / "extents.making"):
                path.unlink(missing_ok=True)
            directory, expected = disk.mount / str(cut), Expected()
        secs = drawn_secs(random_, directory)
        notes = run(directory, cut, secs, lambda process: (disk.cut(), process.kill()))
        holding, dropping, phase = expected.take_in(notes)
        phases[phase] += 1
        disk.restart()
        found = extent_worker.opened(directory)
        expected.check(found, holding, dropping)
        found.close()
    figures(
        f"extents, power cuts of {disk.kind}",
        cuts=cuts,
        packs_read=restored + expected.restored,
        phase=dict(phases),
    )
