# SPDX-License-Identifier: Apache-2.0
"""The v1 adapter: ``Embeddings`` as a checkpointable of Orbax's new API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from deltackpt.handlers import steps
from deltackpt.reading import saves
from deltackpt.reading.reader import RestoredTables
from deltackpt.restore import placing
from deltackpt.restore.placing import AbstractEmbeddings
from deltackpt.save.flight import Embeddings, PendingSave


class DeltaCheckpointableHandler:
    """Saves ``Embeddings``; loads ``RestoredTables``, as ``AbstractEmbeddings`` requests.

    Stateless: configuration is part of the checkpointable. Register it with
    ``ocp.handlers.register_handler``. Under a stock v1 ``Checkpointer``, steps are as durable as
    ``durability="process"``, digests cover only deltackpt's item, and every save is a base.
    """

    async def save(
        self, directory: ocp.path.PathAwaitingCreation, checkpointable: Embeddings
    ) -> Awaitable[None]:
        """Captures the rows; the returned awaitable writes them."""
        pending, coordinator = steps.started(checkpointable, Path(directory.path))

        async def write() -> None:
            try:
                created = Path(await directory.await_creation())
            except BaseException:
                pending.abandon()
                raise
            await asyncio.to_thread(pending.write_alone, created, coordinator)

        return write()

    async def load(
        self,
        directory: ocp.path.Path,
        abstract_checkpointable: AbstractEmbeddings | None = None,
    ) -> Awaitable[RestoredTables]:
        """Reads the chain of a step and merges it, in the background."""
        item_dir = Path(directory)

        # A task, not a coroutine: Orbax drops it unawaited where another item fails.
        return asyncio.ensure_future(
            asyncio.to_thread(placing.load_item, item_dir, abstract_checkpointable)
        )

    async def metadata(self, directory: ocp.path.Path) -> AbstractEmbeddings:
        """Returns shapes and dtypes of the tables and slots of a step."""
        item_dir = Path(directory)
        return placing.abstract_of(saves.read_save(item_dir.parent, item_dir.name))

    def is_handleable(self, checkpointable: Any) -> bool:
        """Returns whether the checkpointable is ``Embeddings``."""
        return isinstance(checkpointable, (Embeddings, PendingSave))

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Returns whether the abstract checkpointable is ``AbstractEmbeddings``."""
        return isinstance(abstract_checkpointable, AbstractEmbeddings)
