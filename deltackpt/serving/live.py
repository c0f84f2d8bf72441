# SPDX-License-Identifier: Apache-2.0
"""Live: the newest intact version of the followed leaves, in the memory of this process."""

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
    DamagedLog,
    DeltackptError,
    RestoreError,
    ServiceUnavailable,
    WaitTimeout,
    without_frames,
)
from deltackpt.format.manifest import path_name
from deltackpt.ledger.opening import open_steps
from deltackpt.reading import chains, removal, saves
from deltackpt.reading.saves import StoredSave
from deltackpt.reading.stretches import LogPoint, Way
from deltackpt.serving.version import Held, Version
from deltackpt.serving.weights import Weights
from deltackpt.standby import work
from deltackpt.standby.candidates import Candidates
from deltackpt.standby.marks import Marks
from deltackpt.state import nesting
from deltackpt.storage.store import Spot

_logger = logging.getLogger(__name__)

#: Longest rest between two looks at a root that cannot be used.
_REST_SECS = 5.0
_STOP_SECS = 10.0


class Staleness(NamedTuple):
    """How far a version is behind.

    Attributes:
      steps: training steps to the newest that was committed, as far as is known, intact or not.
      secs: since the version's step was committed, or its point taken.
    """

    steps: int
    secs: float


class DeviceWeights(NamedTuple):
    """A version on devices.

    Attributes:
      step: the training step.
      point: the point of the log; None where it is a step.
      tree: ``jax.Array``s in nested dicts and lists, as they stand in the state.
    """

    step: int
    point: LogPoint | None
    tree: Any


def follow(
    root: str | os.PathLike[str],
    leaves: str | Sequence[str] = "**",
    *,
    log: bool = True,
    poll_secs: float | None = 1.0,
    item: str | None = None,
    endpoint: str | None = None,
) -> Live:
    """Keeps dense leaves of a run fresh in the memory of this process.

    Args:
      root: of the steps: a path, or the URL of a bucket. It is only read.
      leaves: globs over the '/'-joined paths of the leaves (``*`` stays within one step of a path,
        ``**`` crosses them). Tables, and leaves that are no arrays or have no elements, are left
        out.
      log: whether the marks of a log above the newest step are followed, too.
      poll_secs: how often a thread looks for what is new; None: whoever calls ``advance`` does.
      item: name of the tables' item in the steps; found in the newest step by default.
      endpoint: address of the server of a bucket, where it is not the service's own.

    Returns:
      What shows the leaves, empty at first; to be closed.

    Raises:
      StorageError, ForeignDirectory, UnsupportedRoot: the root cannot be used.
    """
    opened = open_steps(root, item=item, endpoint=endpoint)
    patterns = (leaves,) if isinstance(leaves, str) else tuple(leaves)
    marks = Marks(opened, opened.item, soft=False) if log else None
    holder = _Holder(opened.item, Weights(patterns))
    return Live(holder, Candidates(opened, marks), poll_secs)


class Live:
    """One whole version after the other; every method may be called from any thread.

    A version is never changed, so that a reader sees one only, and neither waits for the next nor
    holds it up. That costs memory: leaves that change are there twice, and once more for each
    further version that somebody still refers to; leaves that do not are there once.

    Attributes:
      problem: why something newer than what is shown is not; None where nothing is wrong.
    """

    def __init__(self, holder: _Holder, candidates: Candidates, poll_secs: float | None):
        """Made by ``follow``."""
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
        """Looks at the root once, and shows what is new there.

        What is not intact is passed over, with a warning in the log of the program: the newest that
        is, is shown, and the next one taken when it comes.

        Returns:
          Whether another version is shown than before.

        Raises:
          RestoreError: no step is intact; what was shown still is.
          OptionError: two of the leaves have one path, since a key holds a slash.
          StorageError: the root cannot be read; likewise.
          ClosedError: it was closed.
        """
        with self._advancing:
            if self._closing.is_set():
                raise ClosedError("serving: expected to be open, found it closed; follow() again")
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
        """Waits until a version is shown.

        Args:
          timeout_secs: longest wait.
          step: of this training step at least.

        Raises:
          WaitTimeout: there was none in time.
          ClosedError: it was closed meanwhile.
        """
        end = time.monotonic() + timeout_secs
        with self._changed:
            while self._shown is None or self._shown.step < step:
                if self._closing.is_set():
                    raise ClosedError("serving: expected a version, found that it was closed")
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    found = "none" if self._shown is None else f"step {self._shown.step}"
                    raise WaitTimeout(
                        f"serving: expected a version of step {step} at least within "
                        f"{timeout_secs:g} s, found {found}; "
                        f"{self.problem or 'wait for the next save, or look at the trainer'}"
                    )

    @contextlib.contextmanager
    def version(self) -> Iterator[Version]:
        """The newest version; within, and for as long as it is referred to, it stays what it is.

        Raises:
          ServiceUnavailable: there is none yet.
        """
        yield self._version()

    def staleness(self) -> Staleness:
        """How far the newest version is behind, as of the last look at the root.

        Raises:
          ServiceUnavailable: there is none yet.
        """
        shown = self._version()
        newest = shown.step if self._newest is None else self._newest
        return Staleness(max(0, newest - shown.step), max(0.0, time.time() - shown.unix_secs))

    def on_device(self, shardings: Any | Mapping[str, Any] = None) -> DeviceWeights:
        """The newest version as ``jax.Array``s; only leaves that changed are placed again.

        The arrays of the last call are kept; they must not be donated.

        Args:
          shardings: of all leaves, or by their paths; a device will do. The default device where
            there is none.

        Raises:
          ServiceUnavailable: there is no version yet.
          MissingExtra: jax cannot be imported.
        """
        # Whoever does not ask for it needs no jax.
        jax = importlib.import_module("jax")
        shown = self._version()
        with self._placing:
            placed: dict[str, tuple[Any, Any]] = {}
            for path in shown:
                sharding = shardings.get(path) if isinstance(shardings, Mapping) else shardings
                content = shown.content(path), sharding
                known = self._on_device.get(path)
                if known is None or known[0] != content:
                    known = content, jax.device_put(shown[path], sharding)
                placed[path] = known
            self._on_device = placed
        tree = nesting.nested_at((path, placed[path_name(path)][1]) for path in shown.paths)
        return DeviceWeights(shown.step, shown.point, tree)

    def close(self) -> None:
        """Ends following; versions that somebody refers to stay. Safe to call again."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_SECS)
        with self._changed:
            self._changed.notify_all()

    def _version(self) -> Version:
        shown = self._shown
        if shown is None:
            problem = self.problem or "wait_ready() waits for the first"
            raise ServiceUnavailable(f"serving: expected a version, found none yet; {problem}")
        return shown

    def _tell(self, problem: DeltackptError | None) -> None:
        if problem is not None and str(problem) != str(self.problem):
            _logger.warning("something newer is not shown: %s", problem)
        self.problem = problem

    def _follow(self, poll_secs: float) -> None:
        rest = 0.0
        while not self._closing.wait(rest):
            try:
                self.advance()
                rest = poll_secs
            except ClosedError:
                return
            except DeltackptError:
                # It was told; a later look may find it mended.
                rest = min(max(_REST_SECS, poll_secs), 2 * rest + poll_secs)
            except Exception:
                _logger.exception("the root could not be followed")
                rest = min(max(_REST_SECS, poll_secs), 2 * rest + poll_secs)


class _Holder:
    """What is shown next; see ``candidates.Holder``.

    Beside a point the step that was held last is kept: the next step's deltas go on from it.
    """

    def __init__(self, item: str, weights: Weights):
        self.held: Held | None = None
        self._step: Held | None = None
        self._item, self._weights = item, weights

    def is_at(self, way: Way | None) -> bool:
        """See ``Holder``."""
        held = self.held
        if held is None or way is None:
            return held is not None and held.point is None
        return held.is_at(way.step, way.point)

    def take(self, step_dir: Spot, way: Way | None) -> bool:
        """See ``Holder``."""
        newest = saves.read_save(step_dir, self._item)
        save_id = newest.info.save_id
        if way is not None and way.step != save_id:
            raise removal.gone(step_dir)
        held = self.held
        if held is not None and held.is_at(save_id, None if way is None else way.point):
            return False
        if way is not None:
            self.held = self._weights.of_point(newest, way, held)
        elif self._step is not None and self._step.is_at(save_id, None):
            self.held = self._step
        else:
            self.held = self._step = self._after(newest) or self._whole(newest, held)
        return True

    def _after(self, newest: StoredSave) -> Held | None:
        """A step by what is new since the one before; None where it cannot be had so."""
        held = self._step
        if held is None:
            return None
        further = work.since(newest, held)
        if not further:
            return None
        try:
            return self._weights.after(held, further)
        except DamagedLog:
            raise
        except RestoreError as error:
            chains.raise_if_removed(further, error)
            base = chains.read_chain(newest.step_dir, self._item)[0]
            if base.info.save_id.step <= held.save.save_id.step:
                raise
            # A base was compacted meanwhile that stands for what is damaged.
            return None

    def _whole(self, newest: StoredSave, held: Held | None) -> Held:
        return self._weights.of_step(chains.read_chain(newest.step_dir, self._item), held)
