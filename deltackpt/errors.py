# SPDX-License-Identifier: Apache-2.0
"""One error tree: a class per thing that a caller would do differently.

Each class has a stable ``code`` for programs; each message names the object, what was
expected, what was found and what to do next.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class DeltackptError(Exception):
    """Base of every error that deltackpt raises on purpose."""

    code: ClassVar[str] = "deltackpt"
    #: Whether a save that fails with it leaves doubt about which rows were touched: the next save
    #: is a base then.
    leaves_doubt: bool = False


class OptionError(DeltackptError, ValueError):
    """An option or an argument has a value that cannot work."""

    code = "option"


class TableSelectionError(DeltackptError, ValueError):
    """Tables or slots cannot be chosen from the state as asked."""

    code = "table-selection"


class UnsupportedLeaf(DeltackptError, TypeError):
    """The state holds a leaf that cannot be stored; nothing was begun."""

    code = "unsupported-leaf"


class TrackingError(DeltackptError):
    """The touched rows do not cover what changed, or the tracking does not fit the tables."""

    code = "tracking"
    leaves_doubt = True


class ClosedError(DeltackptError, RuntimeError):
    """The manager was closed, or is used in a forked child."""

    code = "closed"


class SaveFailed(DeltackptError):
    """A background save failed; the previous step is intact and no touched row is lost."""

    code = "save-failed"
    #: The ``Saved`` of the save that was taken while this was raised; None in ``wait()``.
    taken: object = None


class TrackingFailed(SaveFailed, TrackingError):
    """A background save was given up because the touched rows are wrong; the next is a base."""

    code = "tracking-failed"


class ErrorBudgetExceeded(DeltackptError):
    """Encoding rows would change them more than was allowed; nothing was committed."""

    code = "error-budget"


class WaitTimeout(DeltackptError, TimeoutError):
    """A bounded wait ran out; the message names what was waited for."""

    code = "timeout"


class ProcessMissing(WaitTimeout):
    """Another process did not do its part of a save in time; ``processes`` says which."""

    code = "process-missing"

    def __init__(self, message: str, processes: tuple[int, ...] = ()):
        self.processes = processes
        super().__init__(message)


class ProcessFailed(DeltackptError):
    """Another process could not do its part of a save, and said why; nothing was committed."""

    code = "process-failed"

    def __init__(self, message: str, *, leaves_doubt: bool = False):
        self.leaves_doubt = leaves_doubt
        super().__init__(message)


class Disagreement(DeltackptError):
    """Processes take one save for different things; nothing was committed."""

    code = "disagreement"
    leaves_doubt = True


class FencedError(DeltackptError):
    """Another trainer has taken over the directory, or another directory stands in its place."""

    code = "fenced"


class StorageError(DeltackptError, OSError):
    """The store refused: full, read-only, unreachable."""

    code = "storage"


class OutOfSpace(StorageError):
    """Too little free space for the save that was asked for."""

    code = "out-of-space"


class UnsupportedRoot(DeltackptError, ValueError):
    """The directory's scheme or file system is not one that deltackpt can commit on."""

    code = "unsupported-root"


class TargetExists(DeltackptError, FileExistsError):
    """What an export or an import would make is there already; nothing was touched."""

    code = "target-exists"


class AlreadyCompacting(DeltackptError):
    """Another process compacts the directory at the moment."""

    code = "already-compacting"


class InUse(DeltackptError):
    """A trainer is, or may be, at work in the directory, or a copy or a collection is."""

    code = "in-use"


class TargetDiffers(DeltackptError):
    """The target of a copy holds another save under the name of one that is copied."""

    code = "target-differs"


class RestoreError(DeltackptError):
    """Base of what can be wrong with a stored step."""

    code = "restore"
    #: Whether an older step may do where this one does not.
    another_step_may_do: ClassVar[bool] = True


class StepNotFound(RestoreError, LookupError):
    """No such step was committed."""

    code = "step-not-found"


class StepGone(RestoreError):
    """The step, or a parent of it, was removed while it was being read."""

    code = "step-gone"


class ForeignDirectory(RestoreError):
    """The directory is not one that deltackpt wrote."""

    code = "foreign-directory"


class FormatTooNew(RestoreError):
    """The step needs a newer deltackpt."""

    code = "format-too-new"
    another_step_may_do = False


class Damaged(RestoreError):
    """A stored object is missing, truncated or altered; ``object_name`` names it."""

    code = "damaged"

    def __init__(self, object_name: str, expected: str, found: str, action: str = ""):
        self.object_name = object_name
        self.expected = expected
        self.found = found
        self.action = action or "restore an older step: restore_latest() falls back by itself"
        super().__init__(f"{object_name}: expected {expected}, found {found}; {self.action}")

    def __reduce__(self):
        return type(self), (self.object_name, self.expected, self.found, self.action)


class DamagedLog(Damaged):
    """A frame of a log is missing or altered; ``mark`` is the save id of the mark that needs it."""

    code = "damaged-log"

    def __init__(
        self, object_name: str, expected: str, found: str, action: str = "", mark: object = None
    ):
        self.mark = mark
        super().__init__(object_name, expected, found, action)

    @classmethod
    def of(cls, error: Damaged, mark: object) -> DamagedLog:
        """What is said of a mark that needs something damaged."""
        action = "restore_latest() falls back to the point before by itself"
        return cls(error.object_name, error.expected, error.found, action, mark)

    def __reduce__(self):
        return type(self), (self.object_name, self.expected, self.found, self.action, self.mark)


class LogFailed(DeltackptError):
    """What was logged could not be made durable; no touched row is lost."""

    code = "log-failed"


class LogBehind(DeltackptError):
    """Processes lack marks that others had long ago; ``processes`` says which. Told, not raised."""

    code = "log-behind"

    def __init__(self, message: str, processes: tuple[int, ...] = ()):
        self.processes = processes
        super().__init__(message)


class BrokenChain(RestoreError):
    """A delta's parent is missing, or is not the save that the delta was taken against."""

    code = "broken-chain"


class NoIntactStep(RestoreError):
    """Steps were committed, and none of them is intact."""

    code = "no-intact-step"


class TemplateMismatch(RestoreError, ValueError):
    """The abstract state asks for something else than the step holds."""

    code = "template-mismatch"
    another_step_may_do = False


class MissingExtra(DeltackptError, ImportError):
    """A part of deltackpt needs a package that is not installed; the message says which extra."""

    code = "missing-extra"


class ServiceError(DeltackptError):
    """Base of what can be wrong with a restore service; storage is not concerned."""

    code = "service"


class ServiceUnavailable(ServiceError):
    """No service answers, or none that holds the step, within the time that was given."""

    code = "service-unavailable"


class ServiceMismatch(ServiceError):
    """The service is of another directory, another run, another version or other options."""

    code = "service-mismatch"


class TooLittleMemory(ServiceError):
    """The rows that a member of the service should hold do not fit into its memory."""

    code = "too-little-memory"


def without_frames(error: _Error) -> _Error:
    """An error that is kept, without the frames that raised it: they keep their buffers alive."""
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
    return error
