# SPDX-License-Identifier: Apache-2.0
"""The commit: Orbax's finalisation, made to survive a power cut.

Stock Orbax 0.12.8 renames a step's directory into place without an fsync, and a power cut then
leaves a step that is listed and cannot be read. Here everything is on disk before the rename,
and the rename before ``wait()`` returns.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deltackpt import processes
from deltackpt.format import names
from deltackpt.handlers.orbax_private import (
    COMMIT_SUCCESS_FILE,
    TMP_DIR_SUFFIX,
    AtomicRenameTemporaryPath,
    step_metadata_file_path,
)
from deltackpt.storage import digests, files
from deltackpt.storage.digests import Digest, Digests

#: Where Orbax's PyTree handler keeps a file of each process, in its item.
_ARRAY_METADATA = "array_metadatas"


def temporary_path_class(
    *,
    fsync: bool,
    item: str = names.EMBEDDINGS_ITEM,
    begun: Callable[[], None] | None = None,
    check: Callable[[], None] | None = None,
    committed: Callable[[], None] | None = None,
    failed: Callable[[BaseException], None] | None = None,
) -> type[AtomicRenameTemporaryPath]:
    """A class for Orbax's ``temporary_path_class`` option.

    Args:
      fsync: whether the step survives a power cut once it is committed.
      item: name of our item, whose files its own digests cover.
      begun: called when everything is written: before each item is finalised, and the step.
      check: called before each commit; what it raises prevents the commit.
      committed: called after each commit.
      failed: called with what prevented a commit.
    """

    class DigestedTemporaryPath(AtomicRenameTemporaryPath):
        """Metadata, commit file, digests, fsync of the tree, rename, fsync of the parent."""

        async def create(self) -> Any:
            # What a failed save of this step left: all processes know of that by now.
            await asyncio.to_thread(files.remove_tree, Path(self.get()))
            created = await super().create()
            if processes.count() > 1 and Path(created).name.startswith(names.DENSE_ITEM):
                # Else the other processes look for it every 250 ms, until Orbax's primary has made
                # it: half of the time of a small save.
                Path(created, _ARRAY_METADATA).mkdir()
            return created

        async def finalize(self) -> None:
            if begun is not None:
                begun()
            try:
                await asyncio.to_thread(self._finalize)
            except BaseException as error:
                if failed is not None:
                    failed(error)
                raise

        def _finalize(self) -> None:
            directory, final = Path(self.get()), Path(self.get_final())
            store = self._checkpoint_metadata_store
            if store is not None:
                store.wait_until_finished()
                store.update(
                    file_path=step_metadata_file_path(self.get()),
                    commit_timestamp_nsecs=time.time_ns(),
                )
                store.wait_until_finished()
            with files.typed_errors(directory, "write"):
                # Orbax would record the absolute path here, of a temporary directory even.
                (directory / COMMIT_SUCCESS_FILE).write_text(
                    f"Checkpoint commit was successful to {final.name}"
                )
            if TMP_DIR_SUFFIX in directory.parent.name:
                # An item: the step around it is digested, synced and checked as a whole.
                files.rename(directory, final, fsync=False)
                return
            write_step_digests(directory, item, fsync=fsync)
            if fsync:
                sync_step(directory, item)
            if check is not None:
                check()
            files.rename(directory, final, fsync=fsync)
            if committed is not None:
                committed()

    return DigestedTemporaryPath


def write_process_digests(step_dir: Path, process: int, *, fsync: bool) -> None:
    """Digests of the dense files that a process wrote; called on each before the commit.

    Process 0 then need not read what all the others wrote.
    """
    found: dict[str, Digest] = {}
    for folder in _dense_folders(step_dir):
        if names.dense_process(folder.name) != process:
            continue
        if fsync:
            files.fsync_tree(folder)
        inside = folder.parent.name
        # The item has another name until it is finished.
        item, _, _ = inside.partition(TMP_DIR_SUFFIX)
        for name, digest in digests.digest_tree(step_dir, below=folder).items():
            found[item + name.removeprefix(inside)] = digest
    path = step_dir / names.step_digests_name(process)
    digests.write_digests(path, Digests.of(found), fsync=fsync)


def write_step_digests(step_dir: Path, item: str, *, fsync: bool) -> None:
    """Digests of everything in a step that the item's own digests and its index do not cover."""
    shared = _digested(step_dir)

    def covered(name: str) -> bool:
        inner = name.removeprefix(f"{item}/")
        if name == names.STEP_DIGESTS or (inner != name and names.is_of_part(inner)):
            return True
        return names.dense_process(name.rpartition("/")[2]) in shared

    found = Digests.of(digests.digest_tree(step_dir, skip=covered))
    digests.write_digests(step_dir / names.STEP_DIGESTS, found, fsync=fsync)


def sync_step(step_dir: Path, item: str) -> None:
    """Forces a step to disk; each process has done so with what is its part."""
    shared = _digested(step_dir)
    with files.typed_errors(step_dir, "force to disk"):
        for folder, folders, here in os.walk(step_dir):
            inside = Path(folder).relative_to(step_dir)
            if inside == Path(item):
                folders[:] = [name for name in folders if not names.is_of_part(name)]
                here = [name for name in here if not names.is_of_part(name)]
            folders[:] = [name for name in folders if names.dense_process(name) not in shared]
            for name in here:
                files.fsync_path(Path(folder, name))
            files.fsync_path(Path(folder))


def _dense_folders(step_dir: Path) -> Iterator[Path]:
    for item in step_dir.iterdir():
        if item.is_dir():
            yield from item.glob("ocdbt.process_*")


def _digested(step_dir: Path) -> set[int]:
    """The processes that have digested their dense files themselves."""
    found = (names.step_digests_process(name) for name in os.listdir(step_dir))
    return {process for process in found if process is not None}
