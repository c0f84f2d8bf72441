# SPDX-License-Identifier: Apache-2.0
"""Copies of whole chains: to another directory, to an object store, and back.

A *unit* is what becomes visible at once: a step, or a compacted base. Units are copied one after
the other, what others need first, so that at every moment each step at the target can be restored.
Every byte is checked against its digest when it is read, and again by reading it back. A copy that
is cut anywhere goes on where it was: what is there already and matches is not written again.

A name at the target belongs to one save. What stands there and is not that save, or cannot be told
to be it, is never touched; what is that save and damaged is replaced.

In a directory a unit is put together in ``.copying/`` and appears by one rename. In an object
store nothing can be renamed: there a unit counts only when its marker stands,
``copied/<unit>.msgpack``, which is written last and holds the digests of all its objects. Which
save a name belongs to says its claim, ``copied/<unit>.claim``, which is written first and once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import threading
import time
import urllib.parse
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tensorstore as ts

from deltackpt.errors import (
    BrokenChain,
    Damaged,
    InUse,
    OptionError,
    OutOfSpace,
    RestoreError,
    StepGone,
    StepNotFound,
    StorageError,
    TargetDiffers,
)
from deltackpt.format import chain, manifest
from deltackpt.format import names as layout
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import SaveId
from deltackpt.ledger.directory import Root
from deltackpt.ledger.lease import epochs
from deltackpt.reading import inventory
from deltackpt.reading import saves as stored
from deltackpt.reading.reader import Progress
from deltackpt.storage import digests as integrity
from deltackpt.storage import files
from deltackpt.storage.digests import Digest, Digests
from deltackpt.upkeep import collect

#: Files on their way at a time: enough to hide the latency of an object store.
WORKERS = 8
#: Most bytes on their way at a time; a larger file goes alone.
_MEMORY_BYTES = 256 << 20
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://")


class Unit(NamedTuple):
    """A step, or the compacted base that stands for an item of it."""

    step_dir: str
    item: str | None = None

    @property
    def name(self) -> str:
        """Its path below a root."""
        if self.item is None:
            return self.step_dir
        return f"{layout.COMPACTED}/{self.step_dir}/{self.item}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copied:
    """What a copy did.

    Attributes:
      steps: the steps that can now be restored at the target, as far as they were asked for.
      copied: names of the units that were copied, in order.
      found: names of those that were there already.
      file_count: files that were written.
      bytes_written: bytes of these.
      bytes_found: bytes that were there already.
      seconds: wall time.
    """

    steps: tuple[int, ...]
    copied: tuple[str, ...]
    found: tuple[str, ...]
    file_count: int
    bytes_written: int
    bytes_found: int
    seconds: float


class Place(Protocol):
    """Where units stand, of the steps that have one item of ours: a directory or an object store.

    Methods are called from several threads. ``write`` makes nothing visible: ``publish`` does, by
    one action, and everything before it is on disk by then. All of them may be called again.
    """

    name: str
    item: str

    def __enter__(self) -> Place:
        """Holds it as a target, against other copies to it where these would be in the way."""
        ...

    def __exit__(self, *error: object) -> None:
        """Lets go of it."""
        ...

    def steps(self) -> list[int]:
        """Steps that are whole."""
        ...

    def in_use(self) -> str | None:
        """Why a trainer may be at work there; None where none can be."""
        ...

    def info(self, unit: Unit) -> SaveInfo | None:
        """What chains need to know of a unit; None where there is no such unit."""
        ...

    def digests(self, unit: Unit) -> dict[str, Digest]:
        """Digests of all files of a unit, by their paths below it."""
        ...

    def read(self, unit: Unit, name: str) -> bytes:
        """A file of a unit that is whole."""
        ...

    def holds(self, unit: Unit, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """Whether a unit is there and whole; ``recheck`` reads every byte of it again.

        Raises:
          TargetDiffers: something else has its name.
        """
        ...

    def begin(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """Makes place for a unit.

        Raises:
          TargetDiffers: another save has its name.
        """
        ...

    def discard(self, unit: Unit) -> None:
        """Drops what was written of a unit that is not whole and will not be copied."""
        ...

    def written(self, unit: Unit, name: str, expected: Digest) -> bool:
        """Whether a file of a unit that is not whole yet is there and as expected."""
        ...

    def write(self, unit: Unit, name: str, data: bytes) -> None:
        """Writes a file of a unit that is not whole yet."""
        ...

    def publish(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """Makes a unit visible, of which every file is written.

        Raises:
          TargetDiffers: another save has its name by now.
        """
        ...


def copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    item: str = layout.EMBEDDINGS_ITEM,
    steps: Collection[int] | None = None,
    all_steps: bool = False,
    recheck: bool = False,
    offline: bool = False,
    endpoint: str | None = None,
    workers: int = WORKERS,
    progress: Progress | None = None,
) -> Copied:
    """Copies steps with all that restoring them needs; the copy restores from its new place.

    Args:
      source: a directory, a URL (``file://``, ``gs://``, ``s3://``), or a kvstore spec of
        TensorStore as JSON.
      target: likewise.
      item: name of our item in the steps.
      steps: the steps to copy; by default the newest.
      all_steps: whether to copy all of them.
      recheck: whether what is whole at the target is read again, and copied again where it is
        damaged; by default its records are compared, and that no file is missing.
      offline: the caller's word that no trainer is at work at the target.
      endpoint: address of the server of ``s3://`` URLs, where it is not Amazon's.
      workers: files on their way at a time.
      progress: called with bytes done and bytes in all, from any thread.

    Raises:
      StepNotFound: there is no such step.
      StepGone: a step was removed or replaced while it was copied; nothing of it is visible.
      Damaged, BrokenChain: something at the source is not intact; it is named.
      TargetDiffers: the target holds something else under the name of a save that is copied; or,
        where no steps are named, later steps that the source has not.
      InUse: a trainer may be at work at the target, another process copies to it or collects it.
      ForeignDirectory: the target holds other things than checkpoints.
      OutOfSpace, StorageError: the source or the target refused.
    """
    started = time.perf_counter()
    here, there = _place(source, endpoint, item), _place(target, endpoint, item)
    wanted = _wanted(here, steps, all_steps)
    with there:
        if not offline and (reason := there.in_use()) is not None:
            raise InUse(
                f"{there.name}: expected that no trainer is at work, found {reason}; copy to "
                "another place. Where you know that it has ended, copy with --offline"
            )
        if not steps:
            _require_not_ahead(here, there)
        run = _Run(here, there, workers, recheck, progress)
        _copy_chains(run, here, there, wanted)
    return Copied(
        steps=tuple(wanted),
        copied=tuple(run.copied),
        found=tuple(run.found),
        file_count=run.file_count,
        bytes_written=run.bytes_written,
        bytes_found=run.bytes_found,
        seconds=time.perf_counter() - started,
    )


def _require_not_ahead(source: Place, target: Place) -> None:
    """Checks that the newest step of the source will be that of the target, as of any copy of it.

    After a rollback of the source the target has steps that a restart would go on from.
    """
    standing = source.steps()
    later = [step for step in sorted(target.steps()) if step > max(standing)]
    if later:
        raise TargetDiffers(
            f"{target.name}: expected no step after {max(standing)}, the newest of {source.name}, "
            f"found {later[-5:]}; where they were rolled back at the source move them away, or "
            "copy to an empty place; to mend single steps there name them"
        )


def _copy_chains(run: _Run, source: Place, target: Place, steps: Sequence[int]) -> None:
    """Copies steps with what they need, not through compacted bases that are damaged."""
    unusable: set[Unit] = set()
    units = _units(source, steps, unusable)
    while True:
        try:
            run.copy(units)
            break
        except Damaged as error:
            base = run.damaged
            if base is None or base.item is None or base in unusable:
                raise
            unusable.add(base)
            try:
                units = _units(source, steps, unusable)
            except RestoreError:
                raise error from None
            target.discard(base)
            warnings.warn(
                f"{source.name}/{base.name} is not copied, it is damaged ({error}); the saves that "
                "it stands for are copied instead",
                stacklevel=3,
            )
    try:
        _units(target, steps, set())
    except RestoreError as error:
        raise InUse(
            f"{target.name}: expected all that steps {list(steps)} need to stay while they were "
            f"copied, found that something was removed ({error}); end what removes steps there, "
            "then copy again"
        ) from error


class _Run:
    """The copying of some units."""

    def __init__(
        self,
        source: Place,
        target: Place,
        workers: int,
        recheck: bool,
        progress: Progress | None,
    ):
        self.copied: list[str] = []
        self.found: list[str] = []
        self.file_count = 0
        self.bytes_written = 0
        self.bytes_found = 0
        #: The unit of the source that was found damaged.
        self.damaged: Unit | None = None
        self._source = source
        self._target = target
        self._workers = workers
        self._recheck = recheck
        self._progress = progress
        self._total = 0
        self._lock = threading.Lock()
        self._memory = _Memory(_MEMORY_BYTES)

    def copy(self, units: Mapping[Unit, SaveId]) -> None:
        """Copies units, each of which must be the save that is given; those that are done stay."""
        done = {*self.copied, *self.found}
        expected: dict[Unit, dict[str, Digest]] = {}
        for unit, save_id in units.items():
            if unit.name not in done:
                with self._reading(unit, save_id):
                    expected[unit] = self._source.digests(unit)
        self._total = self.bytes_written + self.bytes_found
        self._total += sum(_nbytes(digests) for digests in expected.values())
        with concurrent.futures.ThreadPoolExecutor(self._workers, "deltackpt-copy") as pool:
            for unit, digests in expected.items():
                if self._target.holds(unit, digests, recheck=self._recheck):
                    self.found.append(unit.name)
                    self._done(0, _nbytes(digests))
                    continue
                self._target.begin(unit, digests)
                with self._reading(unit, units[unit]):
                    self._copy_files(pool, unit, digests)
                self._target.publish(unit, digests)
                self.copied.append(unit.name)

    @contextlib.contextmanager
    def _reading(self, unit: Unit, save_id: SaveId) -> Iterator[None]:
        try:
            with _standing(self._source, unit, save_id):
                yield
        except Damaged:
            self.damaged = unit
            raise

    def _copy_files(
        self, pool: concurrent.futures.Executor, unit: Unit, digests: Mapping[str, Digest]
    ) -> None:
        futures = [
            pool.submit(self._copy_file, unit, name, digest) for name, digest in digests.items()
        ]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            concurrent.futures.wait(futures)
            raise

    def _copy_file(self, unit: Unit, name: str, expected: Digest) -> None:
        with self._memory.taken(expected.length):
            if self._target.written(unit, name, expected):
                self._done(0, expected.length)
                return
            data = self._source.read(unit, name)
            _check(f"{self._source.name}/{unit.name}/{name}", data, expected)
            self._target.write(unit, name, data)
            if not self._target.written(unit, name, expected):
                raise StorageError(
                    f"{self._target.name}/{unit.name}/{name}: expected to read back what was "
                    "written, found other bytes; check the store, then copy again"
                )
            self._done(expected.length, 0)

    def _done(self, written: int, found: int) -> None:
        with self._lock:
            self.file_count += written > 0
            self.bytes_written += written
            self.bytes_found += found
            if self._progress is not None:
                self._progress(self.bytes_written + self.bytes_found, self._total)


class _Memory:
    """Bytes of files on their way."""

    def __init__(self, most: int):
        self._most = most
        self._taken = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Waits until there is room; a file that is larger than all of it goes alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + nbytes <= self._most)
            self._taken += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._taken -= nbytes
                self._changed.notify_all()


class Directory:
    """Units in a directory: a checkpoint root, or one that will be."""

    def __init__(self, path: Path, item: str):
        self.name = str(path)
        self._path = path
        self.item = item
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Directory:
        """Holds the directory against other copies to it, and against collections of it."""
        if self._path.is_dir():
            # Before anything is made there: it may be another's.
            Root.open(self._path, read_only=True).close()
        self._held.enter_context(collect.exclusive(self._path))
        return self

    def __exit__(self, *error: object) -> None:
        """Lets go of it; nothing is left where nothing was cut."""
        self._held.close()

    def steps(self) -> list[int]:
        """See ``Place``."""
        return Root.open(self._path, read_only=True).steps()

    def in_use(self) -> str | None:
        """See ``Place``; without a lease no trainer was ever there."""
        opened = Root.open(self._path, read_only=True)
        return collect.in_use(opened) if any(epochs(self._path)) else None

    def info(self, unit: Unit) -> SaveInfo | None:
        """See ``Place``."""
        step_dir, folder = self._path / unit.step_dir, self._folder(unit)
        if not folder.is_dir():
            return None
        try:
            if unit.item is None:
                return stored.read_save(step_dir, self.item).info
            return stored.read_base(step_dir, unit.item).info
        except RestoreError:
            if not folder.is_dir():  # It was removed meanwhile.
                return None
            raise

    def digests(self, unit: Unit) -> dict[str, Digest]:
        """See ``Place``."""
        folder = self._folder(unit)
        if unit.item is None:
            found = inventory.read_inventory(folder, self.item)
        else:
            found = inventory.read_inventory(folder.parent, unit.item, shown=unit.name)
        for damage in found.damage:
            raise damage
        if unit.item is not None:
            below = f"{unit.item}/"
            return {name.removeprefix(below): digest for name, digest in found.files.items()}
        known = dict(found.files)
        if found.scope:
            # Another manager committed it: Orbax's files have no digests but what they are now.
            known = {**integrity.digest_tree(folder, skip=known.__contains__), **known}
        return known

    def read(self, unit: Unit, name: str) -> bytes:
        """See ``Place``."""
        shown = f"{self.name}/{unit.name}/{name}"
        return files.read_bytes(self._folder(unit) / name, shown, most_bytes=None)

    def holds(self, unit: Unit, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """See ``Place``."""
        folder, aside = self._folder(unit), self._aside(unit)
        if not os.path.lexists(folder):
            if aside.is_dir():  # A copy was cut while it replaced it.
                files.rename(aside, folder, fsync=True)
            else:
                return False
        self._require_same(unit, expected)
        if any(_length(folder / name) != digest.length for name, digest in expected.items()):
            return False
        records = {name: digest for name, digest in expected.items() if name.endswith(".msgpack")}
        return not integrity.check_files(folder, expected if recheck else records)

    def begin(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """See ``Place``."""
        staged = self._staged(unit)
        with files.typed_errors(staged, "make a directory"):
            staged.mkdir(parents=True, exist_ok=True)
            needed = _nbytes(expected) - files.tree_bytes(staged)
        if files.free_bytes(staged) < needed:
            raise OutOfSpace(
                f"{self.name}: expected room for {needed:,} bytes of {unit.name}, found "
                f"{files.free_bytes(staged):,} free; free space, then copy again"
            )

    def discard(self, unit: Unit) -> None:
        """See ``Place``."""
        files.remove_tree(self._staged(unit))

    def written(self, unit: Unit, name: str, expected: Digest) -> bool:
        """See ``Place``."""
        path = self._staged(unit) / name
        return path.is_file() and integrity.digest_file(path)[:3] == expected[:3]

    def write(self, unit: Unit, name: str, data: bytes) -> None:
        """See ``Place``."""
        path = self._staged(unit) / name
        with files.typed_errors(path, "write"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def publish(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """See ``Place``."""
        staged, final = self._staged(unit), self._folder(unit)
        with files.typed_errors(final, "be published"):
            for path in staged.rglob("*"):
                if path.is_file() and path.relative_to(staged).as_posix() not in expected:
                    path.unlink()  # Of another attempt.
            files.fsync_tree(staged, folders_only=True)
            missing = [folder for folder in final.parents if not folder.exists()]
            final.parent.mkdir(parents=True, exist_ok=True)
            for folder in missing:
                files.fsync_path(folder.parent)
        missing = [name for name, of in expected.items() if _length(staged / name) != of.length]
        if missing:
            raise StorageError(
                f"{staged}: expected every file that was written, found {missing[0]} removed; end "
                "what removes files there, then copy again"
            )
        if not os.path.lexists(final):
            files.rename(staged, final, fsync=True)
            return
        self._require_same(unit, expected)  # It is damaged: what mends it takes its place.
        aside = self._aside(unit)
        with files.typed_errors(aside, "make a directory"):
            files.remove_tree(aside)
            aside.parent.mkdir(parents=True, exist_ok=True)
        files.rename(final, aside, fsync=True)
        try:
            files.rename(staged, final, fsync=True)
        except BaseException:
            if not os.path.lexists(final):
                files.rename(aside, final, fsync=True)
            raise
        files.remove_tree(aside)
        with contextlib.suppress(OSError):
            aside.parent.rmdir()

    def _folder(self, unit: Unit) -> Path:
        return self._path / unit.name

    def _staged(self, unit: Unit) -> Path:
        return self._path / layout.COPYING / unit.name.replace("/", ".")

    def _aside(self, unit: Unit) -> Path:
        """Where a damaged unit is while another takes its place; no trainer empties it."""
        return self._path / layout.COPYING / "replaced" / unit.name.replace("/", ".")

    def _require_same(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """Checks that what has the name of a unit is the same save, whole or damaged."""
        head = _head_name(unit, self.item)
        try:
            data = files.read_bytes(self._folder(unit) / head)
        except Damaged as error:
            raise _differs(f"{self.name}/{unit.name}", f"no {head}") from error
        if integrity.digest_bytes(data)[:3] != expected[head][:3]:
            raise _differs(f"{self.name}/{unit.name}", f"another save, or damage, in {head}")


class ObjectStore:
    """Units in a key-value store of TensorStore: S3, Google Cloud Storage and others."""

    def __init__(self, spec: str | Mapping[str, Any], name: str, item: str):
        self.name = name.rstrip("/")
        self.item = item
        with self._refusals("open it"):
            self._store: Any = ts.KvStore.open(spec).result()

    def __enter__(self) -> ObjectStore:
        """Nothing needs to be held: whoever else copies a save writes the same objects.

        Whoever copies another one under its name is refused by its claim.
        """
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was held."""

    def steps(self) -> list[int]:
        """See ``Place``."""
        names = [key.removesuffix(".msgpack") for key in self._keys(f"{layout.COPIED}/")]
        return [int(name) for name in names if layout.step_number(name) is not None]

    def in_use(self) -> str | None:
        """See ``Place``; no trainer commits to an object store."""
        return None

    def info(self, unit: Unit) -> SaveInfo | None:
        """See ``Place``."""
        marker = self._marker(unit)
        if marker is None:
            return None
        name = _head_name(unit, self.item)
        shown = f"{self.name}/{unit.name}/{name}"
        if name not in marker:
            raise Damaged(shown, "a manifest", "none that the marker knows", _OTHER_COPY)
        data = self.read(unit, name)
        _check(shown, data, marker[name])
        head = manifest.from_bytes(data, name=shown)
        return SaveInfo(
            save_id=head.save_id,
            kind=head.kind,
            parent=head.parent,
            step_dir=unit.step_dir,
            nbytes=head.nbytes,
        )

    def digests(self, unit: Unit) -> dict[str, Digest]:
        """See ``Place``."""
        marker = self._marker(unit)
        if marker is None:
            raise _gone(self, unit)
        return marker

    def read(self, unit: Unit, name: str) -> bytes:
        """See ``Place``."""
        data = self._get(f"{unit.name}/{name}")
        if data is None:
            raise Damaged(f"{self.name}/{unit.name}/{name}", "an object", "none", _OTHER_COPY)
        return data

    def holds(self, unit: Unit, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """See ``Place``."""
        marker = self._marker(unit)
        if marker is None:
            return False
        head = _head_name(unit, self.item)
        if head not in marker or marker[head][:3] != expected[head][:3]:
            raise _differs(f"{self.name}/{unit.name}", "the marker of another save")
        present = self._keys(f"{unit.name}/")
        whole = all(name in present for name in expected) and {
            name: digest[:3] for name, digest in expected.items()
        } == {name: digest[:3] for name, digest in marker.items()}
        if whole and recheck:
            whole = all(self._is(unit, name, digest) for name, digest in expected.items())
        return whole

    def begin(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """See ``Place``; the name is claimed before any object is written."""
        key = f"{layout.COPIED}/{unit.name}.claim"
        with self._refusals(f"write {key}"):
            found = self._store.read(key).result()
            if found.state != "value":
                # Of two that come at the same moment one is refused, and reads the other's.
                claim = self._claim(unit, expected)
                self._store.write(key, claim, if_equal=found.stamp.generation).result()
        self._require_claim(unit, expected)
        with self._refusals(f"delete the marker of {unit.name}"):
            self._store.write(self._marker_key(unit), None).result()

    def discard(self, unit: Unit) -> None:
        """See ``Place``: objects without a marker are none."""

    def written(self, unit: Unit, name: str, expected: Digest) -> bool:
        """See ``Place``."""
        return self._is(unit, name, expected)

    def write(self, unit: Unit, name: str, data: bytes) -> None:
        """See ``Place``."""
        self._put(f"{unit.name}/{name}", data)

    def publish(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """See ``Place``."""
        self._require_claim(unit, expected)
        self._put(self._marker_key(unit), integrity.digests_bytes(Digests.of(expected)))

    def _claim(self, unit: Unit, expected: Mapping[str, Digest]) -> bytes:
        """What says which save a name belongs to: the digest of its first manifest."""
        head = _head_name(unit, self.item)
        return integrity.digests_bytes(Digests.of({head: expected[head]}))

    def _require_claim(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        key = f"{layout.COPIED}/{unit.name}.claim"
        if self._get(key) != self._claim(unit, expected):
            raise _differs(f"{self.name}/{unit.name}", f"that {key} claims it for another save")

    def _is(self, unit: Unit, name: str, expected: Digest) -> bool:
        data = self._get(f"{unit.name}/{name}")
        return data is not None and integrity.digest_bytes(data)[:3] == expected[:3]

    def _marker_key(self, unit: Unit) -> str:
        return layout.copied_name(unit.name)

    def _marker(self, unit: Unit) -> dict[str, Digest] | None:
        key = self._marker_key(unit)
        data = self._get(key)
        if data is None:
            return None
        found = integrity.digests_from(data, name=f"{self.name}/{key}")
        return {name: found.digest(name) for name in found.files}

    def _get(self, key: str) -> bytes | None:
        with self._refusals(f"read {key}"):
            found = self._store.read(key).result()
        return bytes(found.value) if found.state == "value" else None

    def _put(self, key: str, data: bytes) -> None:
        with self._refusals(f"write {key}"):
            self._store.write(key, data).result()

    def _keys(self, prefix: str) -> set[str]:
        """Keys that begin so, without the beginning."""
        stop = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        with self._refusals(f"list {prefix}"):
            found = self._store.list(ts.KvStore.KeyRange(prefix, stop)).result()
        return {key.decode().removeprefix(prefix) for key in found}

    @contextlib.contextmanager
    def _refusals(self, action: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError, NotImplementedError, RuntimeError) as error:
            raise StorageError(
                f"{self.name}: expected to {action}, found: {str(error).splitlines()[0]}; check "
                "the URL, the endpoint and the credentials, then copy again"
            ) from error


_OTHER_COPY = "copy it there again from an intact source"


def _place(
    where: str | os.PathLike[str], endpoint: str | None, item: str = layout.EMBEDDINGS_ITEM
) -> Directory | ObjectStore:
    """What a path, a URL or a spec means."""
    text = os.fspath(where)
    if text.startswith("{"):
        try:
            spec = json.loads(text)
        except ValueError as error:
            raise OptionError(
                f"{text}: expected a kvstore spec of TensorStore as JSON, found {error}"
            ) from error
        name = str(spec.get("path") or spec.get("driver", "store"))
        return ObjectStore(_below(spec), name, item)
    url = _SCHEME.match(text)
    if url is None:
        return Directory(Path(text).absolute(), item)
    scheme = url[1].lower()
    # Neither "#" nor "?" ends the name of a directory or of an object.
    host, _, path = text[url.end() :].partition("/")
    if scheme == "file":
        if host not in ("", "localhost"):
            raise OptionError(
                f"{text}: expected file:/// and an absolute path, found the host {host!r}; write "
                "three slashes, or give the path alone"
            )
        return Directory(Path("/", urllib.parse.unquote(path)), item)
    if scheme not in ("s3", "gs"):
        raise OptionError(
            f"{text}: expected a path, or a URL with file://, gs:// or s3://, found {scheme}://;"
            " give a kvstore spec of TensorStore as JSON for other stores"
        )
    spec = {"driver": "gcs" if scheme == "gs" else "s3", "bucket": host}
    if endpoint is not None:
        if scheme != "s3":
            raise OptionError(f"{text}: expected an s3:// URL beside an endpoint; leave that out")
        spec["endpoint"] = endpoint
    return ObjectStore(_below({**spec, "path": path.lstrip("/")}), text, item)


def _below(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A spec whose path is a folder."""
    path = str(spec.get("path", "")).rstrip("/")
    return {**spec, "path": f"{path}/" if path else ""}


def _wanted(source: Place, steps: Collection[int] | None, all_steps: bool) -> list[int]:
    """The steps to copy."""
    standing = sorted(source.steps())
    if not standing:
        raise StepNotFound(f"{source.name}: expected whole steps, found none; check where it is")
    if all_steps:
        return standing
    wanted = sorted(set(steps)) if steps else standing[-1:]
    missing = [step for step in wanted if step not in standing]
    if missing:
        raise StepNotFound(
            f"{source.name}: expected the steps {missing}, found {standing[-5:]} as the newest; "
            "copy steps that stand there whole"
        )
    return wanted


def _units(source: Place, steps: Sequence[int], unusable: Collection[Unit]) -> dict[Unit, SaveId]:
    """What restoring the steps needs and which saves these are, in an order to copy them in."""
    found: dict[Unit, SaveId] = {}
    for step in steps:
        found.update(_chain_units(source, str(step), unusable))
    # A save needs none but of earlier steps, and the base that stands for itself.
    order = sorted(found, key=lambda unit: (int(unit.step_dir), unit.item is None))
    return {unit: found[unit] for unit in order}


def _chain_units(source: Place, step_dir: str, unusable: Collection[Unit]) -> dict[Unit, SaveId]:
    """The units of one chain."""
    own = source.info(Unit(step_dir))
    if own is None:
        raise _gone(source, Unit(step_dir))
    with _standing(source, Unit(step_dir), own.save_id):
        return _chain_of(source, own, unusable)


def _chain_of(source: Place, own: SaveInfo, unusable: Collection[Unit]) -> dict[Unit, SaveId]:
    """The units of the chain of a step."""
    units = {Unit(own.step_dir): own.save_id}
    target = current = own
    saves: dict[str, SaveInfo] = {}
    while True:
        base = _base(source, current.step_dir, current.save_id, unusable)
        if base is not None:
            units[Unit(base.step_dir, source.item)] = base.save_id
            target = base if current is target else target
            current = base
        else:
            units[Unit(current.step_dir)] = current.save_id
        saves[current.step_dir] = current
        parent = current.parent
        if parent is None or parent.step_dir in saves:
            break
        if layout.step_number(parent.step_dir) is None:
            raise Damaged(
                f"{source.name}/{current.step_dir}", "a step as its parent", repr(parent.step_dir)
            )
        below = _base(source, parent.step_dir, parent.save_id, unusable)
        below = below or source.info(Unit(parent.step_dir))
        if below is None:
            break  # restore_chain names what is missing.
        current = below
    chain.restore_chain(target, saves)
    return units


@contextlib.contextmanager
def _standing(source: Place, unit: Unit, save_id: SaveId) -> Iterator[None]:
    """Checks afterwards that a unit of the source is still the save that it was.

    What was read of it meanwhile may be of another save otherwise.

    Raises:
      StepGone: it is not, whatever failed.
    """
    cause: RestoreError | None = None
    try:
        yield
    except (Damaged, BrokenChain) as error:
        cause = error
    try:
        now = source.info(unit)
    except RestoreError as error:
        raise cause or error from None
    if now is None or now.save_id != save_id:
        raise _gone(source, unit) from cause
    if cause is not None:
        raise cause


def _base(
    source: Place, step_dir: str, save_id: SaveId, unusable: Collection[Unit]
) -> SaveInfo | None:
    """The compacted base that stands for a save; one that is damaged stands for nothing."""
    unit = Unit(step_dir, source.item)
    if unit in unusable:
        return None
    try:
        base = source.info(unit)
    except RestoreError:
        return None
    return base if base is not None and base.save_id == save_id else None


def _head_name(unit: Unit, item: str) -> str:
    """Path of the manifest of process 0 in a unit: it says which save it is."""
    name = layout.manifest_name(0)
    return name if unit.item is not None else f"{item}/{name}"


def _gone(source: Place, unit: Unit) -> StepGone:
    return StepGone(
        f"{source.name}/{unit.name}: expected it to stay while it was copied, found it removed or "
        "replaced; copy again: the newest step is another one now"
    )


def _differs(shown: str, found: str) -> TargetDiffers:
    return TargetDiffers(
        f"{shown}: expected the save that is copied, or none, found {found}: it is not touched; "
        "copy to an empty place, or move what has this name away first"
    )


def _check(shown: str, data: bytes, expected: Digest) -> None:
    found = integrity.digest_bytes(data)
    if found[:3] != expected[:3]:
        raise Damaged(
            shown,
            f"{expected.length} bytes, crc32c {expected.crc32c:08x}, tail {expected.tail:08x}",
            f"{found.length} bytes, crc32c {found.crc32c:08x}, tail {found.tail:08x}",
            "copy another step, or mend this one from a backup",
        )


def _length(path: Path) -> int:
    """Bytes of a file, -1 where there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return -1


def _nbytes(digests: Mapping[str, Digest]) -> int:
    return sum(digest.length for digest in digests.values())
