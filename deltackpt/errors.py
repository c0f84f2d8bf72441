# SPDX-License-Identifier: Apache-2.0
"""Errors: one class for each case that a caller would handle differently.

Each class has a stable ``code`` for programs. Each message names the object, what was expected,
what was found and what to do next.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class DeltackptError(Exception):
    """Base class of every error that deltackpt raises on purpose."""

    code: ClassVar[str] = "deltackpt"
    #: Whether it is uncertain, after a save failed with it, which rows were touched. If so, the
    #: next save is a base.
    leaves_doubt: bool = False


class OptionError(DeltackptError, ValueError):
    """An option or argument has an invalid value."""

    code = "option"


class TableSelectionError(DeltackptError, ValueError):
    """The requested tables or slots cannot be selected from the state."""

    code = "table-selection"


class UnsupportedLeaf(DeltackptError, TypeError):
    """The state contains a leaf that cannot be stored; nothing was written."""

    code = "unsupported-leaf"


class TrackingError(DeltackptError):
    """Changed rows are not marked as touched, or the ``TouchState`` does not fit the tables."""

    code = "tracking"
    leaves_doubt = True


class VocabularyFull(DeltackptError, ValueError):
    """There are more new ids than free rows; nothing was assigned."""

    code = "vocabulary-full"


class ClosedError(DeltackptError, RuntimeError):
    """The manager was closed, or is used in a forked child or in its own event handler."""

    code = "closed"


class SaveFailed(DeltackptError):
    """A background save failed; the previous step is intact and no touched row is lost."""

    code = "save-failed"
    #: The ``Saved`` of the call that raised this, which did save; None from
    #: ``wait_until_finished()``.
    saved: object = None


class TrackingFailed(SaveFailed, TrackingError):
    """A background save was abandoned because changed rows were not marked; the next is a base."""

    code = "tracking-failed"


class ErrorBudgetExceeded(DeltackptError):
    """Encoding would change rows by more than ``max_error``; nothing was committed."""

    code = "error-budget"


class WaitTimeout(DeltackptError, TimeoutError):
    """A wait timed out; the message names what was awaited."""

    code = "timeout"


class ProcessMissing(WaitTimeout):
    """Another process did not complete its shard of a save in time; ``processes`` lists which."""

    code = "process-missing"

    def __init__(self, message: str, processes: tuple[int, ...] = ()):
        self.processes = processes
        super().__init__(message)


class ProcessFailed(DeltackptError):
    """Another process failed in its shard of a save and reported why; nothing was committed."""

    code = "process-failed"

    def __init__(self, message: str, *, leaves_doubt: bool = False):
        self.leaves_doubt = leaves_doubt
        super().__init__(message)


class Disagreement(DeltackptError):
    """Processes called ``save()`` with different states or arguments; nothing was committed."""

    code = "disagreement"
    leaves_doubt = True


class FencedError(DeltackptError):
    """Another trainer took over the checkpoint directory, or the directory was replaced."""

    code = "fenced"


class StorageError(DeltackptError, OSError):
    """The store failed: it is full, read-only or unreachable."""

    code = "storage"


class OutOfSpace(StorageError):
    """There is too little free space for the requested save."""

    code = "out-of-space"


class UnsupportedRoot(DeltackptError, ValueError):
    """deltackpt cannot commit on the scheme or file system of the checkpoint directory."""

    code = "unsupported-root"


class TargetExists(DeltackptError, FileExistsError):
    """The target of an export or import already exists; nothing was changed."""

    code = "target-exists"


class AlreadyCompacting(DeltackptError):
    """Another process is compacting the checkpoint directory."""

    code = "already-compacting"


class InUse(DeltackptError):
    """A trainer, a copy or a garbage collection uses the directory, or may be using it."""

    code = "in-use"


class TargetDiffers(DeltackptError):
    """The target of a copy has a different save under the name of a copied one."""

    code = "target-differs"


class RestoreError(DeltackptError):
    """Base class of errors about a stored step."""

    code = "restore"
    #: Whether restoring an older step may succeed.
    another_step_may_do: ClassVar[bool] = True


class StepNotFound(RestoreError, LookupError):
    """The step was never committed."""

    code = "step-not-found"


class StepGone(RestoreError):
    """The step, or a parent of it, was removed while it was being read."""

    code = "step-gone"


class ForeignDirectory(RestoreError):
    """The directory was not written by deltackpt."""

    code = "foreign-directory"


class FormatMismatch(RestoreError):
    """Another version of deltackpt wrote the data: ``FormatTooNew`` or ``FormatTooOld``."""

    code = "format-mismatch"
    another_step_may_do = False


class FormatTooNew(FormatMismatch):
    """The step needs a newer version of deltackpt."""

    code = "format-too-new"


class FormatTooOld(FormatMismatch):
    """A development version of deltackpt wrote the data; this version cannot read it."""

    code = "format-too-old"


class Damaged(RestoreError):
    """A stored object is missing, truncated or altered; ``object_name`` names it."""

    code = "damaged"

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

    code = "damaged-keys"


class DamagedWal(Damaged):
    """A WAL record is missing or altered; ``record`` is the save id of the one that needs it."""

    code = "damaged-wal"

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

    code = "append-failed"


class WalBehind(DeltackptError):
    """Processes lag behind with their WAL; ``processes`` lists which. Reported, never raised."""

    code = "wal-behind"

    def __init__(self, message: str, processes: tuple[int, ...] = ()):
        self.processes = processes
        super().__init__(message)


class BrokenChain(RestoreError):
    """A delta's parent is missing, or is not the save that the delta was made against."""

    code = "broken-chain"


class NoIntactStep(RestoreError):
    """Steps were committed, but none of them is intact."""

    code = "no-intact-step"


class TemplateMismatch(RestoreError, ValueError):
    """The abstract state does not match the step."""

    code = "template-mismatch"
    another_step_may_do = False


class MissingExtra(DeltackptError, ImportError):
    """A feature needs a package that is not installed; the message names the extra."""

    code = "missing-extra"


class ServiceError(DeltackptError):
    """Base class of errors of a hot standby; storage is not affected."""

    code = "service"


class ServiceUnavailable(ServiceError):
    """No hot standby with the step answered in time."""

    code = "service-unavailable"


class ServiceMismatch(ServiceError):
    """The hot standby serves another directory or run, or has another version or other options."""

    code = "service-mismatch"


class VersionExpired(ServiceError):
    """A version of served rows was kept open for too long and has been replaced."""

    code = "version-expired"


class TooLittleMemory(ServiceError):
    """The rows of a replica do not fit into its memory."""

    code = "too-little-memory"


class PatchMismatch(DeltackptError, ValueError):
    """A patch is for another version, or for other tensors."""

    code = "patch-mismatch"


def without_frames(error: _Error) -> _Error:
    """Removes the tracebacks of an error and its causes, whose frames keep buffers alive."""
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
    return error
