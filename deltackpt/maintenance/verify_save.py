# SPDX-License-Identifier: Apache-2.0
"""Verification of one save: its records, files against digests, rows against groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from deltackpt.errors import Damaged, RestoreError, StorageError
from deltackpt.format import naming
from deltackpt.format.manifest import Manifest, SaveInfo
from deltackpt.ledger.steps import Steps
from deltackpt.maintenance.structure import structure_problems
from deltackpt.reading import inventory, stored_saves
from deltackpt.reading.inventory import Inventory
from deltackpt.reading.shard_arrays import is_of_dense_segment, layer_of
from deltackpt.reading.stored_saves import StoredSave
from deltackpt.storage import digests
from deltackpt.storage.store import DirIdentity, StorePath

#: What a problem prevents from being restored: the save and every chain through it, only the step,
#: recovery points, or nothing, because no restore reads the object.
Stops = Literal["chain", "step", "points", "nothing"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A damaged object; its name is its relative path in the checkpoint directory."""

    object_name: str
    expected: str
    found: str
    stops: Stops

    @classmethod
    def from_damage(cls, error: Damaged, stops: Stops) -> Problem:
        """Returns the problem of a damaged object."""
        return cls(error.object_name, error.expected, error.found, stops)

    def __str__(self) -> str:
        return f"{self.object_name}: expected {self.expected}, found {self.found}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveVerdict:
    """Result for one save: a step, or a compacted base."""

    name: str  #: ``120``, or ``compacted/120``.
    kind: str | None  #: None if its manifest cannot be read.
    file_count: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]  #: What was not checked, and why.

    def stops(self, *what: Stops) -> bool:
        """Returns whether one of its problems has one of these effects."""
        return any(problem.stops in what for problem in self.problems)


@dataclasses.dataclass(frozen=True, eq=False)
class CommittedSave:
    """A committed step or compacted base, as it was when it was listed."""

    name: str
    item: str
    step_dir: StorePath  #: Or ``compacted/<step>``, which may contain bases of several items.
    folder: StorePath  #: Of its files: the step, or the item of a compacted base.
    dir_identity: DirIdentity

    @property
    def step(self) -> int:
        """The step; -1 for a compacted base whose name is not a step."""
        return int(self.step_dir.name) if self.step_dir.name.isdecimal() else -1

    @property
    def is_base(self) -> bool:
        """Whether it is a compacted base."""
        return "/" in self.name

    @property
    def exists(self) -> bool:
        """Returns whether the save still exists."""
        return self.dir_identity.same(self.folder.dir_identity())

    def nbytes(self) -> int:
        """Returns the bytes of all its files; some may be removed concurrently."""
        return self.folder.tree_bytes()

    def read(self) -> StoredSave:
        """Reads and checks its manifests."""
        if not self.is_base:
            return stored_saves.read_save(self.step_dir, self.item)
        root = self.step_dir.parent.parent
        return stored_saves.read_base(root / self.step_dir.name, self.item)


def committed_saves(root: Steps) -> Iterator[CommittedSave]:
    """Yields the steps of a directory, ascending, then its compacted bases."""
    at, item = root.store_path, root.item
    for step in sorted(root.steps()):
        folder = at / str(step)
        identity = folder.dir_identity()
        if identity is not None:
            yield CommittedSave(str(step), item, folder, folder, identity)
    for name, identity in sorted(stored_saves.compacted_bases(at, item).items()):
        folder = naming.compacted_dir(at / name, item)
        yield CommittedSave(f"{naming.COMPACTED}/{name}", item, folder.parent, folder, identity)


def verify_save(
    save: CommittedSave, on_bytes: Callable[[int], None]
) -> tuple[SaveVerdict, SaveInfo | None]:
    """Checks everything in a save; also returns what chains need, or None without a manifest."""
    found = inventory.read_inventory(save.step_dir, save.item, shown=save.name, unreadable=True)
    damage = list(found.damage)
    damage += digests.check_files(
        save.step_dir, found.files, shown=save.name, unreadable=True, on_bytes=on_bytes
    )
    damage = [one for error in damage for one in _within_layer(save, found, error)]
    problems = [problem_of(save, error) for error in damage]
    problems += _unknown_files(save, found)
    info = None
    head = found.records[0] if found.records and found.records[0].process == 0 else None
    if head is not None:
        info = SaveInfo.from_manifest(head, save.step_dir.name)
        problems += _misplaced(save, head)
        if not any(problem.stops == "chain" for problem in problems):
            problems += _structure(save)
    notes = ()
    if head is not None and found.scope and not save.is_base:
        notes = ("committed by another manager: Orbax's files have no digests, not checked",)
    return (
        SaveVerdict(
            name=save.name,
            kind=head.kind if head else None,
            file_count=len(found.files),
            problems=once(problems),
            notes=notes,
        ),
        info,
    )


def problem_of(save: CommittedSave, error: Damaged) -> Problem:
    """Converts damage of a save to a problem, with its effect on restores."""
    # Errors of layers name the row group after the file.
    name, _, row_group = error.object_name.partition(": ")
    inside = name.removeprefix(f"{save.name}/").removeprefix(f"{save.item}/")
    ours = inside != name.removeprefix(f"{save.name}/")
    stops: Stops = "step"
    if ours and (inside.endswith("/zarr.json") or row_group == "header"):
        stops = "nothing"  # Restores do not read it.
    elif ours and _is_of_complete_dense(save, inside, row_group):
        pass  # Later steps with changed blocks may need it: ``verify`` checks their chains.
    elif ours and (
        naming.is_of_shard(inside)
        # In a compacted base, which readers then ignore.
        or inside.startswith(f"{naming.DENSE_ITEM}/")
        or inside in (naming.manifest_name(0), naming.digests_name(0))
    ):
        stops = "chain"
    return Problem.from_damage(error, stops)


def _within_layer(save: CommittedSave, found: Inventory, error: Damaged) -> list[Damaged]:
    """Returns damage of a file; of a layer file, that of each damaged chunk."""
    for record in found.records:
        if record.layer is not None:
            name = naming.layer_name(record.process)
            if error.object_name == f"{save.name}/{save.item}/{name}":
                item_dir = save.step_dir / save.item
                try:
                    layer = layer_of(item_dir, record, record.layer)
                    return [*layer.damage()] or [error]
                except Damaged as of_footer:
                    return [of_footer]
                except StorageError:
                    break
    return [error]


def _unknown_files(save: CommittedSave, found: Inventory) -> Iterator[Problem]:
    """Files without a digest; none if the digests themselves are damaged."""
    if found.damage:
        return
    for key in save.folder.keys():
        name = (save.folder / key).below(save.step_dir)
        if name.startswith(found.scope) and name not in found.files:
            name, expected = f"{save.name}/{name}", "only files with a digest"
            yield Problem(name, expected, "a file without one", "nothing")


def _is_of_complete_dense(save: CommittedSave, inside: str, row_group: str) -> bool:
    """Returns whether a file or row group of a shard has dense leaves that need no older save."""
    if not is_of_dense_segment(f"{inside}: {row_group}"):
        return False
    try:
        record = save.read().head.dense_blocks
    except (RestoreError, StorageError):
        return False
    return record is not None and record.complete


def _misplaced(save: CommittedSave, head: Manifest) -> Iterator[Problem]:
    """Finds a save in another step's directory; its chain shows whether it can be restored."""
    wanted = f"a {'base' if save.is_base else head.kind} of step {save.step_dir.name}"
    found = f"a {head.kind} of step {head.save_id.step}"
    if wanted != found:
        name = f"{save.name}/{save.item}/{naming.manifest_name(0)}"
        yield Problem(name, wanted, found, "chain" if save.is_base else "nothing")
    if not save.is_base:
        try:
            stored_saves.check_dense(save.read())
        except Damaged as error:
            yield problem_of(save, error)
        except (RestoreError, StorageError):
            return  # Committed by another manager, or unreadable: see below.


def _structure(save: CommittedSave) -> Iterator[Problem]:
    """Inconsistencies between records that are intact by themselves."""
    item = f"{save.name}/{save.item}"
    try:
        for name, expected, found in structure_problems(save.read()):
            yield Problem(f"{item}/{name}", expected, found, "chain")
    except Damaged as error:
        yield problem_of(save, error)
    except (RestoreError, StorageError) as error:
        yield Problem(item, "a save that this deltackpt can read", str(error), "chain")


def once(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Keeps the first problem of each object."""
    found: dict[str, Problem] = {}
    for problem in problems:
        found.setdefault(problem.object_name, problem)
    return tuple(found.values())
