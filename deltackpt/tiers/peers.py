# SPDX-License-Identifier: Apache-2.0
"""Bundles in the memory of other nodes: complete copies, or erasure-coded fragments.

A bundle is split into segments of 16 MiB, and each into k + m fragments (a copy has k = 1) for k +
m other nodes, which rendezvous hashing selects. There is no index: a reader queries all peer agents
for keys, and any k fragments of each segment suffice. Each is verified before its bytes are used.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import numpy as np

from deltackpt.errors import ClosedError, Damaged, StorageError
from deltackpt.storage import striping
from deltackpt.storage.digests import crc32c
from deltackpt.storage.node_client import Node
from deltackpt.tiers import bundles, erasure
from deltackpt.tiers.bundles import Bundle, BundleRef, Reader, SegmentReader
from deltackpt.tiers.staging import PeerGroup

#: Concurrent connections that transfer fragments.
_THREADS = 8
#: How long an unresponsive node is avoided while there are others.
_PASSED_OVER_SECS = 30.0
#: How long the nodes' answers about their contents are cached.
_LISTED_SECS = 30.0
_Result = TypeVar("_Result")


class Survey(NamedTuple):
    """Bundles on peers: ``whole`` ones have k fragments of each segment, ``complete`` ones all."""

    complete: set[BundleRef]
    whole: set[BundleRef]
    every: set[BundleRef]


class PeerTier:
    """Other nodes' memory as a ``Tier``; one thread at a time writes and drops bundles."""

    name = "peers"

    def __init__(self, group: PeerGroup):
        self._group = group
        self._code = erasure.code_of(group.k, group.m)
        self._racks = {one.node: one.rack for one in group.others if one.rack}
        self._others = [one.node for one in group.others]
        #: Includes this node: it may hold another trainer's saves as that trainer's peer.
        self._nodes = {
            one.node: Node(one.address, group.token, deadline_secs=group.deadline_secs)
            for one in group.nodes
        }
        #: When nodes last failed, and how; affects only the order in which they are tried.
        self._failed: dict[str, tuple[float, str]] = {}
        #: Nodes that let a request time out, and the last probe of each. Until one answers, a push
        #: treats them as lost: waiting for each would delay it by the deadline.
        self._silent: dict[str, Future[list[str]]] = {}
        #: When a fragment last timed out at a node, which may still answer short requests.
        self._slow: dict[str, float] = {}
        #: The last result of ``refs``, and its time.
        self._listed: tuple[float, dict[erasure.FragmentCoding, erasure.Where]] = (0.0, {})
        self._lock = threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "deltackpt-peers")
        self._prober = concurrent.futures.ThreadPoolExecutor(_THREADS, "deltackpt-probe")

    def refs(self) -> list[BundleRef]:
        """See ``Tier``: those of which responding nodes hold enough fragments of each segment."""
        every = self._found()
        self._listed = time.monotonic(), every
        return sorted({one.ref for one, where in every.items() if erasure.is_whole(one, where)})

    def silent(self) -> str:
        """Returns the nodes that did not answer the last request, with the error; "" if none."""
        with self._lock:
            return "; ".join(f"{node} ({why})" for node, (_, why) in sorted(self._failed.items()))

    def survey(self) -> Survey:
        """Queries every node once for what it holds, except silent ones."""
        found, mine = self._found(waits=False), (self._code.k, self._code.m)
        complete = {
            one.ref
            for one, where in found.items()
            if (one.k, one.m) == mine and erasure.is_complete(one, where, self._group.own)
        }
        whole = {one.ref for one, where in found.items() if erasure.is_whole(one, where)}
        return Survey(complete, whole, {one.ref for one in found})

    def open(self, ref: BundleRef) -> Reader:
        """See ``Tier``; if too few fragments exist, StorageError names them and the nodes."""
        since, listed = self._listed
        if time.monotonic() - since > _LISTED_SECS:
            listed = {}
        every = {one: where for one, where in listed.items() if one.ref == ref}
        whole = [one for one in every if erasure.is_whole(one, every[one])]
        if not whole:
            every = {one: where for one, where in self._found(ref).items() if one.ref == ref}
            whole = [one for one in every if erasure.is_whole(one, every[one])]
        if not whole:
            raise self._too_few(ref, every)
        # Fragments that are pieces of the bundle need no decoding: k = 1 first.
        coding = min(whole, key=lambda one: (one.k, one.m))
        where, first = every[coding], erasure.segment_bytes(ref, 0)
        buffer = memoryview(bytearray(erasure.padded_bytes(coding.k, first)))

        def load(segment: int) -> memoryview:
            nbytes = erasure.segment_bytes(ref, segment)
            padded = buffer[: erasure.padded_bytes(coding.k, nbytes)]
            self.segment_into(coding, segment, where[segment], padded)
            return padded[:nbytes]

        return SegmentReader(ref, erasure.SEGMENT_BYTES, load)

    def put(self, bundle: Bundle) -> None:
        """See ``Tier``: returns once k + m other nodes have acknowledged each segment."""
        ref, mine = bundle.ref, erasure.FragmentCoding(bundle.ref, self._code.k, self._code.m)
        where = self._found(ref, self._others, waits=False).get(mine, {})
        refused: dict[str, str] = {}
        buffer = memoryview(bytearray(erasure.padded_bytes(mine.k, erasure.segment_bytes(ref, 0))))
        pending, total = [*range(erasure.segments(ref.nbytes))], 0
        is_first = True
        while pending:
            before = len(refused)
            for segment in pending:
                padded = _read_segment(bundle, segment, self._code.k, buffer)
                if is_first:
                    total = _crc([padded[: erasure.segment_bytes(ref, segment)]], total)
                self._put_segment(ref, segment, padded, where.get(segment, {}), refused)
            if is_first and total != ref.crc32c:
                self.delete([ref])
                bundles.require_crc32c(ref, total)
            is_first = False
            if len(refused) == before:
                return
            # Fragments sent to a node that died mid-push are lost; query placement again.
            where = self._found(ref, self._others, waits=False).get(mine, {})
            pending = [
                segment
                for segment in range(erasure.segments(ref.nbytes))
                if len(erasure.placed_of(where.get(segment, {}))) < mine.k + mine.m
            ]

    def delete(self, refs: Collection[BundleRef]) -> None:
        """See ``Tier``; a later survey shows what is left on nodes that do not answer."""
        gone = set(refs)

        def delete(node: str) -> None:
            keys = [
                key
                for key in self._nodes[node].keys(self._group.root)
                if (one := erasure.Fragment.parse(key)) is not None and one.ref in gone
            ]
            self._nodes[node].delete(keys)

        self._asked(delete, self._nodes, waits=False)

    def close(self) -> None:
        """See ``Tier``."""
        self._prober.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)
        for node in self._nodes.values():
            node.close()

    # Placement.

    def _found(
        self,
        ref: BundleRef | None = None,
        nodes: Iterable[str] | None = None,
        *,
        waits: bool = True,
    ) -> dict[erasure.FragmentCoding, erasure.Where]:
        """What responding nodes hold, of one bundle or all; queries all nodes by default."""
        folder = self._group.root if ref is None else f"{self._group.root}/{ref.key}"
        asked = [*(self._nodes if nodes is None else nodes)]
        listed = self._asked(lambda node: self._nodes[node].keys(folder), asked, waits=waits)
        found: dict[erasure.FragmentCoding, erasure.Where] = {}
        for node in asked:
            for key in listed.get(node, ()):
                one = erasure.Fragment.parse(key)
                if one is not None:
                    where = found.setdefault(erasure.FragmentCoding(one.ref, one.k, one.m), {})
                    sources = where.setdefault(one.segment, {})
                    sources.setdefault(one.number, []).append((one, node))
        return found

    def _asked(
        self, ask: Callable[[str], _Result], nodes: Iterable[str], *, waits: bool
    ) -> dict[str, _Result]:
        """Answers of nodes, queried in parallel; failed ones are omitted, silent ones optional."""
        asked = {node: self._submit(ask, node) for node in nodes if waits or self._answers(node)}
        found = {}
        for node, future in asked.items():
            try:
                found[node] = _result(future)
            except StorageError as error:
                self._note_failed(node, error)
            else:
                self._note_answered(node)
        return found

    def _answers(self, node: str) -> bool:
        """Whether a node is not silent; probes a silent one in the background."""
        with self._lock:
            probe = self._silent.get(node)
            if probe is not None and probe.done():
                del self._silent[node]
                if probe.cancelled() or _is_timeout(probe.exception()):
                    self._start_probe(node)
            return node not in self._silent

    def _start_probe(self, node: str) -> None:
        # If it was closed, or no thread can start, the next request waits for the node again.
        with contextlib.suppress(RuntimeError):
            probe = self._prober.submit(self._nodes[node].keys, self._group.root)
            self._silent[node] = probe

    def _submit(self, work: Callable[..., _Result], *given: object) -> Future[_Result]:
        try:
            return self._pool.submit(work, *given)
        except RuntimeError as error:
            raise _closed() from error

    def _note_failed(self, node: str, error: Exception) -> None:
        with self._lock:
            self._failed[node] = (time.monotonic(), str(error))
            if _is_timeout(error) and node not in self._silent:
                self._start_probe(node)

    def _note_answered(self, node: str) -> None:
        with self._lock:
            self._failed.pop(node, None)
            self._silent.pop(node, None)

    def _in_order(self, ref: BundleRef) -> list[str]:
        """All other nodes: preferred ones for the bundle first, recently failed ones last."""
        now = time.monotonic()
        found = striping.ranked(ref.key, self._others, racks=self._racks)
        never = (float("-inf"), "")
        with self._lock:
            late = {
                node
                for node in found
                if node in self._silent
                or now - self._failed.get(node, never)[0] < _PASSED_OVER_SECS
                or now - self._slow.get(node, never[0]) < _PASSED_OVER_SECS
            }
        return [node for node in found if node not in late] + [n for n in found if n in late]

    # Sending.

    def _put_segment(
        self,
        ref: BundleRef,
        segment: int,
        padded: memoryview,
        there: erasure.Sources,
        refused: dict[str, str],
    ) -> None:
        """Sends missing fragments of a segment to distinct nodes; adds errors to ``refused``."""
        placed = erasure.placed_of(there)
        missing = [n for n in range(self._code.k + self._code.m) if n not in placed]
        if not missing:
            return
        every = erasure.fragments(self._code, padded)
        # The first node in order gets the first fragment, so a changed order moves few of them.
        while missing:
            free = [
                node
                for node in self._in_order(ref)
                if node not in refused and node not in placed.values()
            ]
            if len(free) < len(missing):
                raise self._no_room(ref, placed, refused)
            sent = {
                number: (node, self._submit(self._send, ref, segment, number, every[number], node))
                for number, node in zip(missing, free)
            }
            for number, (node, future) in sent.items():
                try:
                    _result(future)
                except StorageError as error:
                    refused[node] = str(error)
                    self._note_failed(node, error)
                    if _is_timeout(error):
                        self._slow[node] = time.monotonic()
                else:
                    placed[number] = node
            missing = [number for number in missing if number not in placed]

    def _send(
        self, ref: BundleRef, segment: int, number: int, pieces: list[memoryview], node: str
    ) -> None:
        code = self._code
        one = erasure.Fragment(ref, code.k, code.m, segment, number, _crc(pieces))
        self._nodes[node].put(one.key(self._group.root), pieces)

    def _no_room(
        self, ref: BundleRef, placed: Mapping[int, str], refused: Mapping[str, str]
    ) -> StorageError:
        needed = self._code.k + self._code.m
        said = "; ".join(f"{node}: {why}" for node, why in sorted(refused.items()))
        return StorageError(
            f"{ref.key}: expected {needed} other nodes that accept a fragment each, found "
            f"{len(placed)} of {len(self._others)} ({said or 'there are no more'}); add nodes, "
            "give their peer agents more memory, or restart lost nodes"
        )

    # Reading.

    def segment_into(
        self,
        coding: erasure.FragmentCoding,
        segment: int,
        there: erasure.Sources,
        out: memoryview,
    ) -> None:
        """Fills a buffer with a segment's padded bytes from nodes that hold its fragments."""
        code = self._code
        if (coding.k, coding.m) != (code.k, code.m):
            code = erasure.code_of(coding.k, coding.m)
        sources = {number: [*found] for number, found in there.items()}
        problems: list[str] = []
        further: dict[int, memoryview] = {}
        pieces = [
            [erasure.piece(code.k, stripe, i) for stripe in erasure.stripes(code.k, out)]
            for i in range(code.k)
        ]
        got: set[int] = set()
        while len(got) < code.k:
            wanted = [number for number in sorted(sources) if number not in got]
            asked = {}
            for number in wanted[: code.k - len(got)]:
                one, node = sources[number].pop(0)
                if not sources[number]:
                    del sources[number]
                if number < code.k:
                    buffers = pieces[number]
                else:
                    further[number] = memoryview(bytearray(len(out) // code.k))
                    buffers = [further[number]]
                asked[number] = (node, self._submit(self._fetch, one, node, buffers))
            if not asked:
                raise self._unreadable(coding, segment, problems, len(got))
            for number, (node, future) in asked.items():
                try:
                    _result(future)
                    got.add(number)
                except (StorageError, Damaged) as error:
                    problems.append(f"fragment {number} on {node}: {error}")
                    further.pop(number, None)
        lost = set(range(code.k)) - got
        if lost:
            erasure.restore(code, out, further, lost)

    def _fetch(self, one: erasure.Fragment, node: str, buffers: list[memoryview]) -> None:
        key = one.key(self._group.root)
        self._nodes[node].read_into(key, 0, buffers, whole=True)
        found = _crc(buffers)
        if found != one.crc32c:
            raise Damaged(key, f"bytes with crc32c {one.crc32c:08x}", f"{found:08x}")

    def _too_few(
        self, ref: BundleRef, every: Mapping[erasure.FragmentCoding, erasure.Where]
    ) -> StorageError:
        problems = []
        for coding, where in every.items():
            for segment in range(erasure.segments(ref.nbytes)):
                held = erasure.placed_of(where.get(segment, {}))
                if len(held) < coding.k:
                    gone = [n for n in range(coding.k + coding.m) if n not in held]
                    problems.append(
                        f"segment {segment} lacks fragments {', '.join(map(str, gone))} and needs "
                        f"{coding.k} of {coding.k + coding.m}"
                    )
                    break
        return StorageError(
            f"{ref.key}: expected a complete bundle on {len(self._nodes)} nodes, found "
            f"{'; '.join(problems) or 'no fragment'} (nodes that do not answer: "
            f"{self.silent() or 'none'}); reconnect those nodes if their memory is intact, or "
            "resume from the checkpoint directory"
        )

    def _unreadable(
        self, coding: erasure.FragmentCoding, segment: int, problems: Iterable[str], got: int
    ) -> StorageError:
        return StorageError(
            f"{coding.ref.key}: expected {coding.k} fragments of segment {segment}, found {got} "
            f"({'; '.join(problems) or 'no others'}); resume from the checkpoint directory"
        )


def _result(future: Future[_Result]) -> _Result:
    try:
        return future.result()
    except concurrent.futures.CancelledError as error:  # Closed while it was queued.
        raise _closed() from error


def _is_timeout(error: BaseException | None) -> bool:
    return error is not None and isinstance(error.__cause__, TimeoutError)


def _closed() -> ClosedError:
    return ClosedError(
        "peers: expected open connections, found them closed because other peers were found; retry"
    )


def _read_segment(bundle: Bundle, segment: int, k: int, buffer: memoryview) -> memoryview:
    nbytes = erasure.segment_bytes(bundle.ref, segment)
    padded = buffer[: erasure.padded_bytes(k, nbytes)]
    bundle.read_into(segment * erasure.SEGMENT_BYTES, padded[:nbytes])
    padded[nbytes:] = bytes(len(padded) - nbytes)
    return padded


def _crc(buffers: Iterable[memoryview], total: int = 0) -> int:
    for buffer in buffers:
        total = crc32c(np.frombuffer(buffer, np.uint8), total)
    return total
