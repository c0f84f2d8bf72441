# SPDX-License-Identifier: Apache-2.0
"""The v1 adapter: ``Embeddings`` as a checkpointable of Orbax's new API."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from deltackpt import coordination
from deltackpt.coordination import Coordinator
from deltackpt.errors import TemplateMismatch
from deltackpt.format import naming
from deltackpt.format.naming import Leaf
from deltackpt.reading import stored_saves
from deltackpt.reading.chains import read_chain
from deltackpt.reading.reader import RestoredTables, check_keys, restore_tables, verify_keys
from deltackpt.restore import placing
from deltackpt.restore.placing import AbstractEmbeddings
from deltackpt.save import pending_save
from deltackpt.save.lineage import Lineage
from deltackpt.save.pending_save import Embeddings, PendingSave
from deltackpt.state import placement


@placement.neutral()
def started(embeddings: Embeddings, item_dir: Path) -> tuple[PendingSave, Coordinator]:
    """Captures the rows: the blocking half of a save without deltackpt's manager."""
    root, secs = str(item_dir.parent.parent), embeddings.processes_secs
    coordinator = Coordinator(root, secs)
    if embeddings.lineage is None:
        run = coordinator.join("starting a save")
        embeddings = dataclasses.replace(embeddings, lineage=Lineage(protected=False, run=run))
    step_dir = final_step_dir(item_dir)
    pending = pending_save.capture(embeddings, step_number(step_dir), step_dir)
    pending.wait_copied()
    return pending, coordinator


def final_step_dir(item_dir: Path) -> Path:
    """Returns the committed step directory of an item that is being saved.

    ``item_dir`` is ``<root>/<step>.orbax-checkpoint-tmp/<item>``, or ``<root>/<step>/<item>`` if
    Orbax commits by a file.
    """
    step_dir = item_dir.parent
    name, _, _ = step_dir.name.partition(naming.TEMPORARY)
    return step_dir.with_name(name)


def step_number(step_dir: Path) -> int:
    """Returns the step of a step directory's name, 0 for a checkpoint outside a sequence."""
    found = re.search(r"(\d+)$", step_dir.name)
    return naming.as_step(int(found[1])) if found else 0


@placement.neutral()
def load_item(item_dir: Path, abstract: AbstractEmbeddings | None) -> RestoredTables:
    """Restores the tables of a committed step, without a manager."""
    saves = read_chain(item_dir.parent, item_dir.name)
    if abstract is None or abstract.tables is None:
        return restore_tables(saves)
    stored = placing.abstract_of(saves[-1]).tables or {}
    tables = placement.resolved(abstract.tables)
    for name, fields in tables.items():
        for field, leaf in fields.items():
            _check_leaf(name, field, leaf, stored.get(name, {}).get(field))
            placing.check_width(f"table {name}, {field}", leaf)
    wanted = placing.wanted_of(tables)
    merged = restore_tables(saves, wanted=wanted)
    check_keys(merged)
    share = coordination.process_index(), coordination.process_count()
    if share[1] > 1:
        verify_keys(saves, known=wanted, share=share)
    return dataclasses.replace(merged, placed=placing.place(merged, tables))


def _check_leaf(name: str, field: str, wanted: Leaf, stored: Leaf | None) -> None:
    found = None if stored is None else (tuple(stored.shape), stored.dtype)
    if found != (tuple(wanted.shape), wanted.dtype):
        raise TemplateMismatch(
            f"table {name}, {field}: expected {wanted.dtype}{wanted.shape} as in the template, "
            f"found {found or 'no such array'} in the step; use the shapes that metadata() returns"
        )


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
        pending, coordinator = started(checkpointable, Path(directory.path))

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
            asyncio.to_thread(load_item, item_dir, abstract_checkpointable)
        )

    async def metadata(self, directory: ocp.path.Path) -> AbstractEmbeddings:
        """Returns shapes and dtypes of the tables and slots of a step."""
        item_dir = Path(directory)
        return placing.abstract_of(stored_saves.read_save(item_dir.parent, item_dir.name))

    def is_handleable(self, checkpointable: Any) -> bool:
        """Returns whether the checkpointable is ``Embeddings``."""
        return isinstance(checkpointable, (Embeddings, PendingSave))

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Returns whether the abstract checkpointable is ``AbstractEmbeddings``."""
        return isinstance(abstract_checkpointable, AbstractEmbeddings)
