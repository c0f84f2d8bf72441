# SPDX-License-Identifier: Apache-2.0
"""Simulates a kill of a compaction at each I/O call: copies the directory as it would remain."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shown import bytes_below

from deltackpt.format import naming
from deltackpt.maintenance import compact
from deltackpt.testing import Disk, DiskCall


class Killed(NamedTuple):
    """How often a compaction was killed, and how often it was already published."""

    kills: int
    published: int


def killed_anywhere(root: Path, read: Callable[[Path, int], object], *, every: int = 1) -> Killed:
    """Kills a compaction of step 3, the parent of step 4, at each ``every``-th call.

    After each, the files of the steps are unchanged, the steps are read as before, through the
    compacted base if there is one, and the next compaction succeeds and leaves no leftovers.
    """
    shown, files = _shown(root, read), _of_steps(root)
    calls, published, problems = 0, list[bool](), list[BaseException]()

    def kill(call: DiskCall) -> None:
        nonlocal calls
        calls += 1
        if calls % every or problems:
            return
        image = root.with_name(f"{root.name}-{calls}")
        disk.copy_now(image)
        try:
            published.append((image / naming.COMPACTED / "3" / naming.EMBEDDINGS_ITEM).is_dir())
            assert _of_steps(image) == files, call
            assert _shown(image, read) == shown, call
            if not published[-1]:
                _compact(image)
                assert _shown(image, read) == shown, call
        except BaseException as error:
            problems.append(error)
        shutil.rmtree(image)

    with Disk(root) as disk:
        disk.on((), kill)
        _compact(root)
    assert not problems, problems[0]
    return Killed(len(published), sum(published))


def _compact(root: Path) -> None:
    assert compact.compact(root, step=3, workers=1, memory_bytes=64 << 20) is not None
    left = os.listdir(root / naming.COMPACTED)
    assert not [name for name in left if naming.is_compaction(name)], left


def _of_steps(root: Path) -> dict[str, bytes]:
    """The files of the steps, without those of compacted bases."""
    below = bytes_below(root).items()
    return {name: data for name, data in below if not name.startswith(f"{naming.COMPACTED}/")}


def _shown(root: Path, read: Callable[[Path, int], object]) -> list[object]:
    return [read(root, step) for step in (3, 4)]
