# SPDX-License-Identifier: Apache-2.0
"""The position of a data iterator, saved as an additional item of a step.

Each process has its own iterator and stores its position in its own file, named and written like
those of grain's ``CheckpointHandler``, so that each can read the other's. Grain's handler writes
during ``save()``, which must then wait for the step's directories; and its restore moves the
iterator before the rest of the step is known to be intact. Here the position is captured as bytes
before the save and applied after the restore.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import orbax.checkpoint as ocp
from etils import epath

from deltackpt import coordination
from deltackpt.errors import OptionError, TemplateMismatch
from deltackpt.format import naming
from deltackpt.handlers.orbax_private import (
    AsyncCheckpointHandler,
    CommitFutureAwaitingContractedSignals,
)
from deltackpt.storage import posix
from deltackpt.storage.store import store_path


@runtime_checkable
class DataIterator(Protocol):
    """The protocol of an iterator over batches whose position can be saved; grain's have it."""

    def get_state(self) -> Any:
        """Returns the position after the last batch returned: bytes, or a JSON value."""
        ...

    def set_state(self, state: Any) -> None:
        """Moves to a position: the next batch is the one that followed it."""
        ...


def position_of(iterator: DataIterator) -> bytes:
    """Returns the current position of an iterator, as it is stored.

    Raises:
      OptionError: its state is neither bytes nor a JSON value.
    """
    state = iterator.get_state()
    if isinstance(state, bytes):
        return state
    problem: object = "it comes back from JSON as another value"
    try:
        position = json.dumps(state, indent=4)
        if json.loads(position) == state:
            return position.encode()
    except TypeError as error:
        problem = error
    raise OptionError(
        f"{type(iterator).__name__}.get_state(): expected bytes or a JSON value, found that "
        f"{problem}; wrap the iterator in one that turns its state into bytes"
    )


def move_to(iterator: DataIterator, position: bytes) -> None:
    """Moves an iterator to a stored position.

    Raises:
      TemplateMismatch: the iterator rejects it.
    """
    try:
        as_bytes = isinstance(iterator.get_state(), bytes)
        iterator.set_state(position if as_bytes else json.loads(position))
    except (ValueError, TypeError, LookupError) as error:
        raise TemplateMismatch(
            f"{type(iterator).__name__}: expected it to resume from the step's position, found "
            f"that it rejects it: {error}; build the same pipeline as the run that was saved"
        ) from error


class IteratorHandler(AsyncCheckpointHandler):
    """Saves and restores positions of data iterators under Orbax v0. Stateless."""

    async def async_save(self, directory: epath.Path, args: IteratorSave) -> list[Any]:
        """The future writes the position."""
        path = Path(
            directory,
            naming.position_name(coordination.process_index(), coordination.process_count()),
        )

        async def write() -> None:
            with posix.typed_errors(path, "write"):
                await asyncio.to_thread(path.write_bytes, args.position)

        return [CommitFutureAwaitingContractedSignals(write(), name="deltackpt-iterator")]

    def save(self, directory: epath.Path, args: IteratorSave) -> None:
        """Saves, and waits until the position is written."""
        for future in asyncio.run(self.async_save(directory, args)):
            future.result()

    def restore(self, directory: epath.Path, args: IteratorRestore | None = None) -> bytes:
        """Reads the position of this process.

        Raises:
          TemplateMismatch: the step was saved by another number of processes.
        """
        folder, count = Path(directory), coordination.process_count()
        path = folder / naming.position_name(coordination.process_index(), count)
        if not path.exists():
            found = sorted(file.name for file in folder.iterdir())
            raise TemplateMismatch(
                f"{posix.object_name(path)}: expected the position of the data iterator of one of "
                f"{count} processes, found those of others: {', '.join(found) or 'none'}; resume "
                "with the number of processes that saved, or leave the data out of the restore "
                "and place the iterators yourself"
            )
        return store_path(path).read()


@ocp.args.register_with_handler(IteratorHandler, for_save=True)
@dataclasses.dataclass
class IteratorSave(ocp.args.CheckpointArgs):
    """Save arguments: a position from ``position_of``."""

    position: bytes


@ocp.args.register_with_handler(IteratorHandler, for_restore=True)
@dataclasses.dataclass
class IteratorRestore(ocp.args.CheckpointArgs):
    """Restore arguments; the result is a position for ``move_to``."""
