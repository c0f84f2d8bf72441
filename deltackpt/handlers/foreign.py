# SPDX-License-Identifier: Apache-2.0
"""Items of a step that Orbax handlers write: additional items, and unusual dense leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from deltackpt.errors import OptionError
from deltackpt.format import names
from deltackpt.handlers.orbax_private import AsyncCheckpointHandler
from deltackpt.resources.runtime import Runtime
from deltackpt.save.writers import StepWriters
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.posix import fsync_tree


class HandlerItem:
    """An item that a handler writes; see ``step.Item``."""

    def __init__(self, handler: Any, futures: list[Any]):
        """Created by ``begin``."""
        self._handler = handler
        self._futures = futures

    @classmethod
    def begin(cls, handler: Any, item_dir: Path, args: Any, runtime: Runtime) -> HandlerItem:
        """Makes the handler capture its data; training may continue afterwards.

        Args:
          handler: an Orbax handler.
          item_dir: existing directory of the item, in the step's temporary directory.
          args: its save arguments.
          runtime: a thread for work that cannot be done in a running event loop.
        """
        directory = epath.Path(item_dir)
        if not isinstance(handler, AsyncCheckpointHandler):
            handler.save(directory, args=args)
            return cls(handler, [])
        return cls(handler, _awaited(handler.async_save(directory, args=args), runtime) or [])

    def write(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """See ``step.Item``."""
        for future in self._futures:
            future.result()
        if others.count == 1:
            return
        if not others.shared_fs:
            self._adopt_own(item_dir, batch, others)
            return
        for own in _own(item_dir, others.process):
            batch.adopt(own)
        # Whichever process wrote the rest, this process's share is on disk.
        fsync_tree(item_dir, while_others_write=True)

    def _adopt_own(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """Adds what this process wrote; arrays of several processes cannot be merged."""
        if _own(item_dir, others.process):
            raise OptionError(
                f"item {item_dir.name}: expected one that {type(self._handler).__name__} writes on "
                "one process, with Tiers(shared=False), found arrays of several processes in it; "
                "use a staging directory that all processes see, or keep unusual leaves (strings "
                "and PRNG keys of several processes) out of the state"
            )
        if others.process > 0:
            batch.adopt(item_dir)

    def complete(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """See ``step.Item``."""
        self._handler.finalize(epath.Path(item_dir))
        digested = [own for process in range(1, others.count) for own in _own(item_dir, process)]
        batch.adopt(item_dir, but=digested)


class Metrics:
    """The user's metrics of a step, stored as Orbax stores them; see ``step.Item``."""

    def __init__(self, metrics: Mapping[str, float]):
        """Keeps them."""
        self._text = json.dumps(dict(metrics))

    def write(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """Writes the metrics, on process 0."""
        if others.process == 0:
            batch.write(item_dir / names.METRICS, self._text.encode())

    def complete(self, item_dir: Path, batch: FileBatch, others: StepWriters) -> None:
        """Does nothing."""


def _own(item_dir: Path, process: int) -> list[Path]:
    """Returns the existing directories that Orbax's PyTree handler assigns to one process."""
    folder = item_dir / names.dense_part(process)
    return [folder] if folder.is_dir() else []


def _awaited(call: Any, runtime: Runtime) -> Any:
    """Returns the result of a coroutine, also in a notebook, whose thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(call)
    return runtime.start(asyncio.run, call).result()
