# SPDX-License-Identifier: Apache-2.0
"""Checks processes that append to a WAL and are killed; see ``wal_trainee.py``."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import harness
from harness import Encoded, Ended

#: Actions of a process between its start and its end, and their weights.
_DOINGS = {
    "log": 8,
    "union": 2,
    "save": 4,
    "look": 1,
    "roll": 1,
    "forget": 1,
    "wait_appended": 3,
    "wait": 1,
    "compact": 1,
    "move": 1,
}

PHASES = (
    *harness.PHASES,
    "log: head",
    "log: new segment",
    "log: frames",
    "log: sync",
    "log: progress",
    "log: trimming",
)
#: Substrings of the shim's lines of the phases that are hardest to hit by chance.
MATCHES = {
    **harness.MATCHES,
    "log: head": ".msgpack",
    "log: new segment": "open /log/",
    "log: sync": "fsync /log/",
    "log: trimming": "unlink /log/",
}


def phase(call: str, path: str) -> str:
    """The phase of a process when it entered an I/O call, like ``harness.phase``."""
    top, _, below = path.lstrip("/").partition("/")
    if top != "log":
        return harness.phase(call, path)
    name = below.rpartition("/")[2]
    if "progress" in name:
        return "log: progress"
    if call == "unlink":
        return "log: trimming"
    if name == below or "head" in name:
        return "log: head"
    if call == "write":
        return "log: frames"
    return "log: sync" if call == "fsync" else "log: new segment"


class Offer(NamedTuple):
    """A state that a restore may find.

    Attributes:
      step: its step; 0 if nothing exists.
      history: of the state.
      kept: whether it was saved or appended, not only rolled back to.
    """

    step: int
    history: str
    kept: bool = True


class Offers:
    """States that the trainers of a directory offered, in order; a restore may find them.

    Attributes:
      restored: how many restores were compared.
      of_points: how many of these were of points.
      inexact: in how many of these a lossy codec had changed some leaves.
    """

    def __init__(self) -> None:
        self.restored = self.of_points = self.inexact = 0
        self._encoded = Encoded()
        #: The newest offer that is known to be valid, and all later ones.
        self._standing = [Offer(0, "")]
        #: Every history that was ever offered.
        self._ever: set[str] = set()

    def check(self, ended: Ended) -> None:
        """Checks what a process found; records what it offered and what it was promised.

        Args:
          ended: a process that started where another had ended.
        """
        offered = self._standing
        for note in ended.notes:
            kind = note["note"]
            if kind == "ready":
                self._compare(note)
                found = Offer(note["step"], note["history"] if note["step"] else "")
                if not self._is_left(note, offered):
                    assert found[:2] in [one[:2] for one in offered], (note, offered)
                # Newer states are lost and are made again.
                offered = [found]
            elif kind == "looked":
                self._compare(note)
                assert note["history"] in self._ever, note
            elif kind == "encoded":
                self._encoded.take(note)
            elif kind == "offered":
                offered.append(Offer(note["step"], note["history"], note["by"] != "roll"))
                self._ever.add(note["history"])
            elif kind == "withdrawn":
                offered.pop()
            elif kind == "removed":
                offered = [Offer(0, "")]
            elif kind == "acknowledged":
                offered = _acknowledged(offered, note.get("step"))
        self._standing = offered

    def _is_left(self, note: dict[str, Any], offered: list[Offer]) -> bool:
        """Whether a step was found that is not moved aside yet: later ones go first, one by one."""
        rolls = [at for at, one in enumerate(offered) if not one.kept]
        if not rolls or note["log"] or note["history"] not in self._ever:
            return False
        newest = max((one.step for one in offered[: rolls[0]]), default=0)
        return min(offered[at].step for at in rolls) < note["step"] < newest

    def _compare(self, note: dict[str, Any]) -> None:
        if note["step"]:
            assert note["wrong"] is None, note
            assert note["items"] == (note["history"] if note["log"] else None), note
            self.restored += 1
            self.of_points += note["log"]
            self.inexact += self._encoded.check(note)


def _acknowledged(offered: list[Offer], step: int | None) -> list[Offer]:
    """The possible states after a step was promised; None: after the last that was kept."""
    if step is None:
        at = max((at for at, one in enumerate(offered) if one.kept), default=0)
    else:
        # After a rollback, a step number may occur twice: only the older one is certain.
        at = next((at for at, one in enumerate(offered) if one.step == step), 0)
        if not offered[at].kept:
            return offered  # The steps after it exist until the next save or record.
    return offered[at:]


def draw_log_life(random_: random.Random, life: int, doings: int) -> dict[str, Any]:
    """Draws the task of a training process with a WAL.

    Args:
      random_: source of the draws.
      life: its number in the directory, from 1.
      doings: number of actions.
    """
    drawn: list[list[str | int]] = [["save", 1]] if life == 1 else []
    for doing in random_.choices(list(_DOINGS), list(_DOINGS.values()), k=doings):
        if doing.startswith("wait") or doing in ("compact", "move"):
            drawn.append([doing])
        elif doing in ("look", "roll"):
            drawn.append([doing, random_.randrange(8)])
        else:
            drawn.append([doing, random_.choice((1, 1, 2, 5))])
    wal_dense = random_.choice(("whole", "delta", "delta"))
    return {
        **harness.draw_around(random_, drawn, log=True),
        "branch": 1000 * life,
        "max_to_keep": random_.choice((1, 2, 2, 4)),
        "policy": random_.choice(("consecutive", "one_shot", "intermittent")),
        "dense": harness.draw_dense(random_, wal_blocks=wal_dense == "delta"),
        "ids": random_.random() < 0.5,
        "log_options": {
            "dense": wal_dense,
            "dense_every": random_.choice((1, 1, 3)),
            # 1e-3 makes append() save some of the steps.
            "max_wal_ratio": random_.choice((1.0, 1.0, 1e-3)),
            # A segment has a few records, so that segments are closed and trimmed.
            "backend": {"segment_bytes": random_.choice((1 << 16, 1 << 20))},
        },
    }
