# SPDX-License-Identifier: Apache-2.0
"""Errors: one class for each case that a caller would handle differently.

Each class has a stable ``code`` for programs. Each message names the object, what was expected,
what was found and what to do next.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import ClassVar, TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class DeltackptError(Exception):
    """Base class of every error that deltackpt raises on purpose."""

    #: By default the name of the class, without "Error", as words joined by hyphens. Private
    #: subclasses in other modules inherit it.
    code: ClassVar[str] = "deltackpt"
    #: Whether it is uncertain, after a save failed with it, which rows were touched. If so, the
    #: next save is a base.
    leaves_doubt: bool = False

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__ and "code" not in vars(cls):
            words = re.findall("[A-Z][a-z]*", cls.__name__.removesuffix("Error"))
            cls.code = "-".join(words).lower()


class OptionError(DeltackptError, ValueError):
    """An option or argument has an invalid value."""


class TableSelectionError(DeltackptError, ValueError):
    """The requested tables or slots cannot be selected from the state."""


class UnsupportedLeaf(DeltackptError, TypeError):
    """The state contains a leaf that cannot be stored; nothing was written."""


class TrackingError(DeltackptError):
    """Changed rows are not marked as touched, or the ``TouchState`` does not fit the tables."""

    leaves_doubt = True


class VocabularyFull(DeltackptError, ValueError):
    """There are more new ids than free rows; nothing was assigned."""


class ClosedError(DeltackptError, RuntimeError):
    """The manager was closed, or is used in a forked child, or inside a call of the same thread."""


class SaveFailed(DeltackptError):
    """A background save failed; the previous step is intact and no touched row is lost."""

    #: The ``Saved`` of the call that raised this, which did save; None from
    #: ``wait_until_finished()``.
    saved: object = None


class TrackingFailed(SaveFailed, TrackingError):
    """A background save was abandoned because changed rows were not marked; the next is a base."""


class ErrorBudgetExceeded(DeltackptError):
    """Encoding would change rows by more than ``max_error``; nothing was committed."""

    code = "error-budget"


class WaitTimeout(DeltackptError, TimeoutError):
    """A wait timed out; the message names what was awaited."""

    code = "timeout"


class ProcessMissing(WaitTimeout):
    """Another process did not complete its shard of a save in time; ``processes`` lists which."""

    def __init__(self, message: str, processes: tuple[int, ...] = ()):
        self.processes = processes
        super().__init__(message)


class ProcessFailed(DeltackptError):
    """Another process failed in its shard of a save and reported why; nothing was committed."""

    def __init__(self, message: str, *, leaves_doubt: bool = False):
        self.leaves_doubt = leaves_doubt
        super().__init__(message)


class Disagreement(DeltackptError):
    """Processes made different calls or saved different states; nothing was committed."""

    leaves_doubt = True


class FencedError(DeltackptError):
    """Another trainer took over the checkpoint directory, or the directory was replaced."""


class StorageError(DeltackptError, OSError):
    """The store failed: it is full, read-only or unreachable."""


class OutOfSpace(StorageError):
    """There is too little free space for the requested save."""


class UnsupportedRoot(DeltackptError, ValueError):
    """deltackpt cannot use the scheme, file system or path of the checkpoint directory."""


class TargetExists(DeltackptError, FileExistsError):
    """The target of an export or import already exists; nothing was changed."""


class AlreadyCompacting(DeltackptError):
    """Another process is compacting the checkpoint directory."""


class InUse(DeltackptError):
    """A trainer, a copy or a garbage collection uses the directory, or may be using it."""


class TargetDiffers(DeltackptError):
    """The target of a copy has a different save under the name of a copied one."""


class RestoreError(DeltackptError):
    """Base class of errors about a stored step."""

    #: Whether restoring an older step may succeed.
    another_step_may_do: ClassVar[bool] = True


class StepNotFound(RestoreError, LookupError):
    """The step was never committed."""


class StepGone(RestoreError):
    """The step, or a parent of it, was removed while it was being read."""


class ForeignDirectory(RestoreError):
    """The directory was not written by deltackpt."""


class FormatMismatch(RestoreError):
    """Another version of deltackpt wrote the data: ``FormatTooNew`` or ``FormatTooOld``."""

    another_step_may_do = False


class FormatTooNew(FormatMismatch):
    """The step needs a newer version of deltackpt."""


class FormatTooOld(FormatMismatch):
    """A development version of deltackpt wrote the data; this version cannot read it."""


class Damaged(RestoreError):
    """A stored object is missing, truncated or altered; ``object_name`` names it."""

    def __init__(self, object_name: str, expected: str, found: str, action: str = ""):
        self.object_name = object_name
        self.expected = expected
        self.found = found
        self.action = action or "restore an older step: restore_latest() falls back automatically"
        super().__init__(f"{object_name}: expected {expected}, found {found}; {self.action}")

    def __reduce__(self):
        return type(self), (self.object_name, self.expected, self.found, self.action)


class DamagedKeys(Damaged):
    """An id has two rows in the key column of a table."""


class DamagedWal(Damaged):
    """A WAL record is missing or altered; ``record`` is the save id of the one that needs it."""

    def __init__(
        self, object_name: str, expected: str, found: str, action: str = "", record: object = None
    ):
        self.record = record
        super().__init__(object_name, expected, found, action)

    @classmethod
    def from_damage(cls, error: Damaged, record: object) -> DamagedWal:
        """Returns the error of the WAL record whose data is damaged."""
        action = "restore_latest() falls back automatically to the previous recovery point"
        return cls(error.object_name, error.expected, error.found, action, record)

    def __reduce__(self):
        return type(self), (self.object_name, self.expected, self.found, self.action, self.record)


class AppendFailed(DeltackptError):
    """WAL records could not be made durable; no touched row is lost."""


class WalBehind(DeltackptError):
    """Processes lag behind with their WAL; ``processes`` lists which. Reported, never raised."""

    def __init__(self, message: str, processes: tuple[int, ...] = ()):
        self.processes = processes
        super().__init__(message)


class BrokenChain(RestoreError):
    """A delta's parent is missing, or is not the save that the delta was made against."""


class NoIntactStep(RestoreError):
    """Steps were committed, but none of them is intact."""


class TemplateMismatch(RestoreError, ValueError):
    """The abstract state does not match the step."""

    another_step_may_do = False


class MissingExtra(DeltackptError, ImportError):
    """A feature needs a package that is not installed; the message names the extra."""


class ServiceError(DeltackptError):
    """Base class of errors of a hot standby; storage is not affected."""


class ServiceUnavailable(ServiceError):
    """No hot standby with the step answered in time."""


class ServiceMismatch(ServiceError):
    """The hot standby serves another directory or run, or has another version or other options."""


class VersionExpired(ServiceError):
    """A version of served rows was kept open for too long and has been replaced."""


class TooLittleMemory(ServiceError):
    """The rows of a replica do not fit into its memory."""


class PatchMismatch(DeltackptError, ValueError):
    """A patch is for another version, or for other tensors."""


def without_frames(error: _Error) -> _Error:
    """Removes the tracebacks of an error and its causes, whose frames keep buffers alive."""
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
    return error


@contextlib.contextmanager
def chained(error: BaseException | None) -> Iterator[None]:
    """Lets the traceback of a failure show an earlier error, which a cause would hide."""
    try:
        yield
    except BaseException as failure:
        shown: BaseException | None = failure
        while shown is not None and shown is not error:
            last = shown
            shown = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if shown is None and error is not None:
            last.__context__, last.__suppress_context__ = error, False
        raise
