# SPDX-License-Identifier: Apache-2.0
"""A program that ends with a save in flight and never closes its manager; for test_exits.py.

Its task is JSON: where to save, how to end, and which stage of the save is delayed until shortly
after the program's own code has ended, so that it runs during the exit.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import multiprocessing
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import model

import deltackpt
from deltackpt.save import commit, pending_save

HANDLERS = {"embeddings": deltackpt.Tables(select=model.SELECT, slots=model.SLOTS)}
#: Stages that can be delayed: the directories (hence all of the save), its rows, its commit.
STAGES = {
    "all": (commit, "write"),
    "write": (pending_save.PendingSave, "write"),
    "commit": (commit, "_commit"),
}
#: Delay after the end of the program's code: an interpreter that does not wait exits sooner.
LONGER_SECS = 1.0
#: Set by the last line of the program.
leaving = threading.Event()
never = threading.Event()
interrupted = threading.Event()


def states(steps: int) -> list[tuple[Any, Any]]:
    """The state and its TouchState at steps 0 to ``steps``."""
    state = model.initial()
    found = [(state, model.new_touched(state))]
    for step in range(1, steps + 1):
        found.append(model.train(*found[-1], step))
    return found


def hold_back(task: dict[str, Any]) -> None:
    """Delays a stage of every later save, or makes it fail or hang."""
    if task["stage"] is None:
        return
    where, name = STAGES[task["stage"]]
    real = getattr(where, name)

    @functools.wraps(real)
    def later(*args: Any, **kwargs: Any) -> Any:
        leaving.wait(60)
        time.sleep(LONGER_SECS)
        if task["fault"] == "fail":
            raise OSError("the disk is on fire")
        if task["fault"] == "hang":
            never.wait()
        return real(*args, **kwargs)

    mock.patch.object(where, name, later).start()


def train(task: dict[str, Any], keep: Callable[[Any], None]) -> None:
    """Commits step 1 and leaves step 2 in flight, whose retention imports modules at exit."""
    manager = deltackpt.CheckpointManager(
        task["root"],
        handlers=HANDLERS,
        options=deltackpt.ManagerOptions(
            max_to_keep=1, timeouts=deltackpt.Timeouts(close_secs=task["close_secs"])
        ),
    )
    keep(manager)
    found = states(2)
    state, marks = found[1]
    model.commit(manager, 1, state, touched=marks)
    hold_back(task)
    state, marks = found[2]
    manager.save(2, state, touched=marks, force_base=task["kind"] == "base")


def end(task: dict[str, Any]) -> None:
    """Ends this program as the task specifies."""
    leaving.set()
    print(json.dumps({"note": "leaving"}), flush=True)
    if task["ending"] == "interrupted":
        # Runs before the manager's callbacks, like a Ctrl-C at that moment.
        threading._register_atexit(interrupt_once)  # type: ignore[attr-defined]
    if task["ending"] == "no threads":
        # Like Python 3.12.0: no thread starts once the program's own code has ended.
        mock.patch.object(threading, "_start_new_thread", refuse).start()
    if task["ending"] == "raise":
        raise ValueError("the training diverged")
    if task["ending"] == "exit":
        sys.exit(task["code"])


def interrupt_once() -> None:
    """Simulates one press of Ctrl-C."""
    if not interrupted.is_set():
        interrupted.set()
        signal.raise_signal(signal.SIGINT)


def refuse(*_: Any) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def in_daemon(task: dict[str, Any]) -> None:
    """Trains in a daemon thread, which is never joined."""
    begun = threading.Event()

    def run() -> None:
        train(task, kept.append)
        begun.set()
        never.wait()

    threading.Thread(target=run, daemon=True).start()
    begun.wait()


def in_thread(task: dict[str, Any]) -> None:
    """Continues to train in a thread after the main thread has ended.

    ``where`` is when, or by which thread, the manager is opened; or that the thread only appends.
    """
    where, begun, managers = task["where"], threading.Event(), []

    def opened() -> None:
        log = deltackpt.WalOptions() if where == "logging thread" else None
        options = deltackpt.ManagerOptions(wal=log)
        managers.append(
            deltackpt.CheckpointManager(task["root"], handlers=HANDLERS, options=options)
        )

    def run() -> None:
        if where == "late thread":
            leaving.wait()
            time.sleep(LONGER_SECS)
        if not managers:
            opened()
        begun.set()
        leaving.wait()
        time.sleep(LONGER_SECS)
        for step, (state, marks) in enumerate(states(2)[1:], 1):
            save = managers[0].append if where == "logging thread" else managers[0].save
            save(step, state, touched=marks)

    if where in ("thread of another's", "logging thread"):
        opened()
    threading.Thread(target=run).start()
    if where != "late thread":
        begun.wait()


def in_child(task: dict[str, Any]) -> None:
    """Runs in a child of multiprocessing, whose executor still has work at the end."""
    train(task, kept.append)
    executor = concurrent.futures.ThreadPoolExecutor(1)
    executor.submit(time.sleep, 3 * LONGER_SECS)
    executor.submit(print, json.dumps({"note": "worked"}), flush=True)
    end(task)


def children(task: dict[str, Any], method: str, target: Callable[..., None]) -> None:
    """Runs a child of multiprocessing and prints its exit code."""
    child = multiprocessing.get_context(method).Process(target=target, args=(task,))
    child.start()
    child.join()
    print(json.dumps({"child": child.exitcode}), flush=True)


def idle(task: dict[str, Any]) -> None:
    """Runs in a forked child, which must not affect its parent's save."""
    sys.exit(7)


kept: list[Any] = []

if __name__ == "__main__":
    # Background jobs of a shell, and their children, ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    task = {
        "ending": "end",
        "kind": "delta",
        "stage": None,
        "fault": None,
        "close_secs": 60.0,
        "code": 3,
        "where": "main",
        **json.loads(sys.argv[1]),
    }
    if task["where"] == "main":
        train(task, kept.append)
    elif task["where"] == "dropped":
        train(task, lambda manager: kept.append(weakref.ref(manager)))
    elif task["where"] == "daemon":
        in_daemon(task)
    elif task["where"] == "worker":
        concurrent.futures.ThreadPoolExecutor(1).submit(train, task, kept.append).result()
    elif "thread" in task["where"]:
        in_thread(task)
    elif task["where"] == "forked":
        train(task, kept.append)
        children(task, "fork", idle)
    elif task["where"] == "child":
        children(task, "spawn", in_child)
        sys.exit(0)
    end(task)
