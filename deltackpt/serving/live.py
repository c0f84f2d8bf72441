# SPDX-License-Identifier: Apache-2.0
"""The newest intact version of dense leaves, kept in the memory of this process."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from deltackpt.errors import (
    ClosedError,
    DeltackptError,
    OptionError,
    ServiceUnavailable,
    WaitTimeout,
    without_frames,
)
from deltackpt.format.manifest import path_name
from deltackpt.ledger.opening import open_steps
from deltackpt.reading.wal_index import RecoveryPoint
from deltackpt.serving.holder import Holder
from deltackpt.serving.version import Version
from deltackpt.standby.candidates import Candidates
from deltackpt.standby.wal import FollowedWal
from deltackpt.state import nesting

_logger = logging.getLogger(__name__)

#: Longest pause between attempts to read a checkpoint directory that fails.
_REST_SECS = 5.0
_STOP_SECS = 10.0


class Staleness(NamedTuple):
    """How far a version lags behind training.

    Attributes:
      steps: number of training steps behind the newest committed step, intact or not, at the last
        poll.
      secs: seconds since the version's step was committed, or its recovery point appended.
    """

    steps: int
    secs: float


class DeviceWeights(NamedTuple):
    """A version on devices.

    Attributes:
      step: the training step.
      point: the recovery point; None for a step.
      tree: ``jax.Array``s in nested dicts and lists, with the structure of the state.
    """

    step: int
    point: RecoveryPoint | None
    tree: Any


def follow(
    directory: str | os.PathLike[str],
    leaves: str | Sequence[str] = "**",
    *,
    wal: bool = True,
    poll_secs: float | None = 1.0,
    item: str | None = None,
    endpoint: str | None = None,
) -> Live:
    """Follows the newest dense leaves of a run.

    Args:
      directory: the checkpoint directory: a path, or a bucket URL. It is only read.
      leaves: globs over the '/'-joined paths of the leaves, at least one of which must match.
        ``*`` matches within a path component, ``**`` across components. Tables, leaves that are
        not arrays, and arrays without elements are ignored.
      wal: whether to also follow recovery points above the newest step.
      poll_secs: seconds between polls by a background thread; None polls only in ``advance``.
      item: name of deltackpt's item in the steps; detected in the newest step by default.
      endpoint: address of a bucket's server, if it is not the provider's own.

    Returns:
      A ``Live``, initially without a version; close it after use.

    Raises:
      StorageError, ForeignDirectory, UnsupportedRoot: the directory cannot be used.
    """
    opened = open_steps(directory, item=item, endpoint=endpoint)
    patterns = (leaves,) if isinstance(leaves, str) else tuple(leaves)
    followed = FollowedWal(opened, opened.item, soft=False) if wal else None
    return Live(Holder(opened.item, patterns), Candidates(opened, followed), poll_secs)


class Live:
    """Provides the newest version of the followed leaves. Every method is thread-safe.

    Versions are immutable: a reader never sees a mix of two, never waits for the next, and never
    delays it. This costs memory: leaves that change are in memory twice, and once more for each
    older version that is still referenced. Leaves that do not change are in memory once.

    Attributes:
      problem: why a version newer than the current one cannot be read, or None.
    """

    def __init__(self, holder: Holder, candidates: Candidates, poll_secs: float | None):
        """Internal: call ``follow``."""
        self.problem: DeltackptError | None = None
        self._holder, self._candidates = holder, candidates
        self._newest: int | None = None
        self._shown: Version | None = None
        self._on_device: dict[str, tuple[Any, Any]] = {}
        self._advancing, self._placing = threading.Lock(), threading.Lock()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if poll_secs is not None:
            self._thread = threading.Thread(
                target=self._follow, args=(poll_secs,), name="deltackpt-serving", daemon=True
            )
            self._thread.start()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def advance(self) -> bool:
        """Polls the checkpoint directory once and reads new steps and recovery points.

        Steps and recovery points that are not intact are skipped with a logged warning; the newest
        intact one becomes the current version.

        Returns:
          Whether the current version has changed.

        Raises:
          RestoreError: no step is intact; the current version stays.
          OptionError: the patterns match no dense leaf with elements, or two matching leaves have
            the same path because a key contains a slash.
          StorageError: the directory cannot be read; the current version stays.
          ClosedError: this object was closed.
        """
        with self._advancing:
            if self._closing.is_set():
                raise ClosedError("serving: expected an open Live, found it closed; call follow()")
            try:
                self._candidates.give(self._holder)
            except DeltackptError as error:
                self._tell(without_frames(error))
                raise
            self._tell(self._candidates.problem)
            self._newest = self._candidates.newest_step()
            held = self._holder.held
            if held is None or (self._shown is not None and self._shown.is_of(held)):
                return False
            with self._changed:
                self._shown = Version(held)
                self._changed.notify_all()
            return True

    def wait_ready(self, timeout_secs: float, step: int = 0) -> None:
        """Waits for a version.

        Args:
          timeout_secs: maximum time to wait, in seconds.
          step: minimum training step of the version.

        Raises:
          WaitTimeout: no such version appeared in time.
          OptionError: the newest step does not have the requested leaves.
          ClosedError: this object was closed while it waited.
        """
        end = time.monotonic() + timeout_secs
        with self._changed:
            while self._shown is None or self._shown.step < step:
                if self._closing.is_set():
                    raise ClosedError("serving: expected a version, found the Live closed")
                if isinstance(self.problem, OptionError):
                    raise self.problem  # Polling again cannot change the leaves of a step.
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    found = "none" if self._shown is None else f"step {self._shown.step}"
                    raise WaitTimeout(
                        f"serving: expected a version of at least step {step} within "
                        f"{timeout_secs:g} s, found {found}; "
                        f"{self.problem or 'wait for the next save, or check the trainer'}"
                    ) from self.problem

    @contextlib.contextmanager
    def version(self) -> Iterator[Version]:
        """Yields the current version, which never changes.

        Raises:
          ServiceUnavailable: no version is available yet.
        """
        yield self._version()

    def staleness(self) -> Staleness:
        """Returns how far the current version lags behind training, as of the last poll.

        Raises:
          ServiceUnavailable: no version is available yet.
        """
        shown = self._version()
        newest = shown.step if self._newest is None else self._newest
        return Staleness(max(0, newest - shown.step), max(0.0, time.time() - shown.unix_secs))

    def on_device(self, shardings: Any | Mapping[str, Any] = None) -> DeviceWeights:
        """Returns the current version as ``jax.Array``s; transfers only leaves that changed.

        Typed PRNG keys stay typed. The arrays are cached for the next call: do not donate
        them.

        Args:
          shardings: a sharding or device for all leaves, or a mapping from leaf paths to these; by
            default, the default device.

        Raises:
          ServiceUnavailable: no version is available yet.
          MissingExtra: jax cannot be imported.
        """
        # Imported here: other methods need no jax.
        jax = importlib.import_module("jax")
        contexts = importlib.import_module("deltackpt.state.contexts")
        shown = self._version()
        with self._placing, contexts.neutral():
            placed: dict[str, tuple[Any, Any]] = {}
            for path in shown:
                sharding = shardings.get(path) if isinstance(shardings, Mapping) else shardings
                content = shown.content(path), shown.prng_impls.get(path), sharding
                known = self._on_device.get(path)
                if known is None or known[0] != content:
                    value = shown[path]
                    if (impl := shown.prng_impls.get(path)) is not None:
                        value = jax.random.wrap_key_data(value, impl=impl)
                    known = content, jax.device_put(value, sharding)
                placed[path] = known
            self._on_device = placed
        tree = nesting.nested_at((path, placed[path_name(path)][1]) for path in shown.paths)
        return DeviceWeights(shown.step, shown.point, tree)

    def close(self) -> None:
        """Stops following. Versions that are still referenced stay valid. Idempotent."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECS)
        with self._changed:
            self._changed.notify_all()

    def _version(self) -> Version:
        shown = self._shown
        if shown is None:
            problem = self.problem or "wait_ready() waits for the first"
            raise ServiceUnavailable(
                f"serving: expected a version, found none yet; {problem}"
            ) from self.problem
        return shown

    def _tell(self, problem: DeltackptError | None) -> None:
        if problem is not None and str(problem) != str(self.problem):
            _logger.warning("a newer version cannot be read: %s", problem)
        with self._changed:
            self.problem = problem
            self._changed.notify_all()

    def _follow(self, poll_secs: float) -> None:
        rest = 0.0
        while not self._closing.wait(rest):
            try:
                self.advance()
                rest = poll_secs
            except ClosedError:
                return
            except DeltackptError:
                # advance() has reported it; it may be fixed at a later poll.
                rest = min(max(_REST_SECS, poll_secs), 2 * rest + poll_secs)
            except Exception as error:
                _logger.exception("cannot follow the checkpoint directory")
                self.problem = ServiceUnavailable(
                    "serving: expected to follow the checkpoint directory, found "
                    f"{type(error).__name__}: {error}; retrying"
                )
                self.problem.__cause__ = without_frames(error)
                rest = min(max(_REST_SECS, poll_secs), 2 * rest + poll_secs)
