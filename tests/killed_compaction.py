# SPDX-License-Identifier: Apache-2.0
"""Kills compactions of step 3, the parent of step 4, at each call in turn.

Each compaction runs in its own process. Afterwards the steps are read with and without the
compacted base, if there is one: both must be equal. Run as a script; see ``killed_anywhere``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tensorstore  # noqa: F401  Loaded before the first child is forked.
from shown import dense_leaves, table_fields

from deltackpt.format import names
from deltackpt.upkeep import compact

#: Audit events at which a compaction is killed.
_CALLS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")


class Killed(NamedTuple):
    """How often a compaction was killed, and how often it was already published."""

    kills: int
    published: int


def killed_anywhere(root: Path, part: str, *, every: int = 1) -> Killed:
    """Kills compactions at each ``every``-th call, until one completes; the others leave nothing.

    Args:
      root: a directory of steps, of which 3 can be compacted.
      part: which part of the steps is compared: ``tables`` or ``dense``.
      every: the number of calls from one kill to the next.
    """
    run = subprocess.run(
        [sys.executable, __file__, str(root), part, str(every)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    kills, published = map(int, run.stdout.split())
    return Killed(kills, published)


_PARTS = {"tables": table_fields, "dense": dense_leaves}


def _in_child(call: Callable[[], None]) -> int:
    """Exit code of a process that makes a call; negative if a signal killed it."""
    # No other thread is running at the fork.
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except BaseException:
            traceback.print_exc()
            os._exit(9)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _named(argument: object) -> str:
    """A path, or the path of a directory descriptor."""
    if isinstance(argument, int):
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{argument}")
    return str(argument)


def _compact(root: Path, at: int) -> None:
    """Compacts step 3, and kills itself at the ``at``-th call below the root."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in _CALLS and any(str(root) in _named(one) for one in arguments):
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    assert compact.compact(root, step=3, workers=1, memory_bytes=64 << 20) is not None


def _check(root: Path, part: str) -> None:
    compacted, aside = root / names.COMPACTED, root.with_name("aside")
    with_base = [_PARTS[part](root, step) for step in (3, 4)]
    if compacted.exists():
        compacted.rename(aside)
    try:
        without = [_PARTS[part](root, step) for step in (3, 4)]
    finally:
        if aside.exists():
            aside.rename(compacted)
    assert with_base == without


def _main(root: Path, part: str, every: int) -> None:
    base = root / names.COMPACTED / "3"
    at, kills, published = 1, 0, 0
    while True:
        ended = _in_child(functools.partial(_compact, root, at))
        assert ended in (0, -signal.SIGKILL), ended
        assert _in_child(functools.partial(_check, root, part)) == 0, at
        if ended == 0:
            break
        kills += 1
        if (base / names.EMBEDDINGS_ITEM).is_dir():
            # Killed after the rename: the base is published and complete.
            published += 1
            shutil.rmtree(base)
        at += every
    left = [name for name in os.listdir(root / names.COMPACTED) if names.is_compaction(name)]
    assert left == [], left
    print(kills, published)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
