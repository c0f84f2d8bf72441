# SPDX-License-Identifier: Apache-2.0
"""Kills compactions of step 3, the parent of step 4, at each call in turn.

Each compaction runs in its own process. Afterwards the files of the steps are unchanged, and the
steps are read as before the first, through the compacted base if there is one. Run as a script;
see ``killed_anywhere``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
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

from deltackpt.format import naming
from deltackpt.maintenance import compact

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


def _written(root: Path) -> dict[Path, bytes]:
    """The files of the steps, without those of compacted bases."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {
        path: path.read_bytes() for path in files if root / naming.COMPACTED not in path.parents
    }


def _read(root: Path, part: str, into: Path) -> None:
    into.write_bytes(pickle.dumps({step: _PARTS[part](root, step) for step in (3, 4)}))


def _check(root: Path, part: str, before: Path, steps: tuple[int, ...]) -> None:
    shown = pickle.loads(before.read_bytes())
    for step in steps:
        assert _PARTS[part](root, step) == shown[step]


def _main(root: Path, part: str, every: int) -> None:
    base = root / naming.COMPACTED / "3"
    before, files = root.with_name(f"{root.name}-before"), _written(root)
    assert _in_child(functools.partial(_read, root, part, before)) == 0
    at, kills, published = 1, 0, 0
    while True:
        ended = _in_child(functools.partial(_compact, root, at))
        assert ended in (0, -signal.SIGKILL), ended
        # So that without the base, the steps are read as before.
        assert _written(root) == files, at
        is_published = (base / naming.EMBEDDINGS_ITEM).is_dir()
        # With the base, or with what the killed compaction left.
        steps = (3, 4) if is_published else (4,)
        assert _in_child(functools.partial(_check, root, part, before, steps)) == 0, at
        if ended == 0:
            break
        kills += 1
        if is_published:
            # Killed after the rename: the base is complete.
            published += 1
            shutil.rmtree(base)
        at += every
    left = [name for name in os.listdir(root / naming.COMPACTED) if naming.is_compaction(name)]
    assert left == [], left
    print(kills, published)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
