# SPDX-License-Identifier: Apache-2.0
"""The v0 adapter: tables as an item of Orbax's ``CheckpointManager``."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from deltackpt.handlers import v1
from deltackpt.handlers.orbax_private import (
    AsyncCheckpointHandler,
    CommitFutureAwaitingContractedSignals,
)
from deltackpt.handlers.v1 import DeltaCheckpointableHandler
from deltackpt.reading import stored_saves
from deltackpt.reading.reader import RestoredTables
from deltackpt.restore import placing
from deltackpt.restore.placing import AbstractEmbeddings
from deltackpt.save.pending_save import Embeddings


class DeltaHandler(AsyncCheckpointHandler):
    """Saves ``Embeddings`` and restores ``RestoredTables`` under Orbax v0.

    Stateless. It writes what ``DeltaCheckpointableHandler`` reads, and vice versa.
    """

    @classmethod
    def typestr(cls) -> str:
        """Returns the v1 handler's name, so that each API finds its handler for the other."""
        return f"{DeltaCheckpointableHandler.__module__}.{DeltaCheckpointableHandler.__qualname__}"

    async def async_save(self, directory: epath.Path, args: DeltaSave) -> list[Any]:
        """Captures the rows; the returned future writes them."""
        item_dir = Path(directory)
        pending, coordinator = v1.started(args.item, item_dir)

        async def write() -> None:
            await asyncio.to_thread(pending.write_alone, item_dir, coordinator)

        return [CommitFutureAwaitingContractedSignals(write(), name="deltackpt-save")]

    def save(self, directory: epath.Path, args: DeltaSave) -> None:
        """Saves, and waits until the save is written."""
        for future in asyncio.run(self.async_save(directory, args)):
            future.result()

    def restore(self, directory: epath.Path, args: DeltaRestore | None = None) -> RestoredTables:
        """Reads the chain of a step and merges it."""
        return v1.load_item(Path(directory), args.item if args is not None else None)

    def metadata(self, directory: epath.Path) -> AbstractEmbeddings:
        """Returns shapes and dtypes of the tables and slots of a step."""
        item_dir = Path(directory)
        return placing.abstract_of(stored_saves.read_save(item_dir.parent, item_dir.name))


@ocp.args.register_with_handler(DeltaHandler, for_save=True)
@dataclasses.dataclass
class DeltaSave(ocp.args.CheckpointArgs):
    """Save arguments."""

    item: Embeddings


@ocp.args.register_with_handler(DeltaHandler, for_restore=True)
@dataclasses.dataclass
class DeltaRestore(ocp.args.CheckpointArgs):
    """Restore arguments; None restores everything to the host."""

    item: AbstractEmbeddings | None = None
