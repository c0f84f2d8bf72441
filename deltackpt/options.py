# SPDX-License-Identifier: Apache-2.0
"""Options of the manager: frozen dataclasses, validated when they are created."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import threading
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal, get_args

from deltackpt.errors import OptionError
from deltackpt.format.row_blocks import LOSSLESS
from deltackpt.lazy_import import LazyModule
from deltackpt.policies import BaseOrDelta, BitWidthPolicy, CodecChoice, Consecutive
from deltackpt.policies.save_policies import (
    PreservationPolicy,
    SaveDecisionPolicy,
    is_at_least_zero,
)
from deltackpt.storage import posix, redaction

if TYPE_CHECKING:
    from deltackpt.codecs import block_codecs
    from deltackpt.storage import kafka
else:  # The defaults need neither.
    block_codecs = LazyModule("deltackpt.codecs.block_codecs")
    kafka = LazyModule("deltackpt.storage.kafka")

Durability = Literal["power", "process"]
WhenBusy = Literal["wait", "skip", "coalesce"]
BaseSnapshot = Literal["block", "hold"]
Bases = Literal["periodic", "compacted"]
Tracking = Literal["auto", "touched", "fingerprints"]
Access = Literal["write", "read"]
DenseDeltas = Literal["whole", "blocks"]
WhenFull = Literal["wait", "coalesce"]
LoggedDense = Literal["whole", "delta", "soft"]
OnFailure = Literal["save", "raise"]
WaitFor = Literal["remote", "peers", "staging"]

#: Shorter messages are mostly overhead.
_LEAST_CHUNK_BYTES = 4096
_PATH = (str, os.PathLike)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Limits of every wait of the manager, in seconds.

    Attributes:
      save_secs: how long the next ``save()`` waits for a save in flight.
      close_secs: how long ``wait_until_finished()`` and ``close()`` wait for saves in flight, also
        if a program ends without ``close()`` or the same process opens the directory again.
      processes_secs: how long another process may be silent while this one waits for it. A process
        that works or waits shows several times within this limit that it is alive; if it does not
        do its part, it is waited for at most ten times as long.
      service_secs: how long a restore waits for a hot standby to have the step, and for each of its
        responses, before it reads from storage.
      store_secs: how long to wait for each response of an object store before an upload retries or
        a restore fails.
    """

    save_secs: float = 1800.0
    close_secs: float = 3600.0
    processes_secs: float = 60.0
    service_secs: float = 10.0
    store_secs: float = 60.0

    def __post_init__(self) -> None:
        names = (field.name for field in dataclasses.fields(self))
        _check_positive(self, *names, what="number of seconds", most=threading.TIMEOUT_MAX)


def _wrong(options: object, name: str, expected: str) -> OptionError:
    found = getattr(options, name)
    return OptionError(f"{type(options).__name__}.{name}: expected {expected}, found {found!r}")


def _check_known(options: object, **kinds: object) -> None:
    for name, kind in kinds.items():
        if getattr(options, name) not in (known := get_args(kind)):
            raise _wrong(options, name, f"one of {known}")


def _check_positive(
    options: object, *attributes: str, what: str = "number", most: float = math.inf
) -> None:
    for name in attributes:
        found = getattr(options, name)
        is_number = isinstance(found, numbers.Real) and not isinstance(found, bool)
        if not (is_number and 0 < float(found) <= most):
            limit = "" if most == math.inf else f" of at most {most:g}"
            raise _wrong(options, name, f"a positive {what}{limit}")


def _check_kind(options: object, kinds: tuple[type, ...], expected: str, *attributes: str) -> None:
    for name in attributes:
        if not isinstance(found := getattr(options, name), kinds):
            raise OptionError(
                f"{type(options).__name__}.{name}: expected {expected}, found "
                f"{type(found).__name__}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaOptions:
    """What a save contains: all rows, or the rows that changed.

    Attributes:
      tracking: how the manager finds touched rows. ``"touched"``: from a ``TouchState`` in the
        state or passed to ``save()``. ``"fingerprints"``: by hashing each row with its slots at
        every save; this needs 12 bytes per row on the devices (about 24 at the peak of a save).
        ``"auto"``: ``"touched"`` if there is a ``TouchState``, else ``"fingerprints"``.
      tracking_audit: whether each save checks about 1,536 rows that its parent sampled, in less
        than 2 ms. If an unmarked row changed, the save becomes a base. With several processes, the
        save fails and the next one is a base.
      policy: decides between a base and a delta.
      bases: ``"periodic"``: the trainer writes a base when the policy's limits require it.
        ``"compacted"``: the standby or ``deltackpt compact`` writes later bases; the trainer writes
        a base only if no delta is possible, or if nothing was compacted for four times the limits.
      base_snapshot: ``"hold"``: ``save()`` returns at once, and the manager keeps references to the
        tables until the base is written. A step that donates the tables before then copies them.
        ``"block"``: ``save()`` returns when the tables are written, without extra memory. A save
        of numpy arrays, which can change in place, always blocks.
    """

    tracking: Tracking = "auto"
    tracking_audit: bool = True
    policy: BaseOrDelta = dataclasses.field(default_factory=Consecutive)
    bases: Bases = "periodic"
    base_snapshot: BaseSnapshot = "hold"

    def __post_init__(self) -> None:
        _check_known(self, tracking=Tracking, bases=Bases, base_snapshot=BaseSnapshot)
        _check_kind(self, (bool,), "bool", "tracking_audit")
        if not callable(getattr(self.policy, "decide", None)) or isinstance(self.policy, type):
            raise _wrong(self, "policy", "a base-or-delta policy such as Consecutive()")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How saves are written in the background.

    Attributes:
      durability: ``"power"``: a step survives a power cut once ``wait_until_finished()`` has
        returned. ``"process"``: a step survives the end of the process, but not of the machine.
      when_busy: what ``save()`` does while another save is in flight. ``"wait"``: wait for it.
        ``"skip"``: skip this save. ``"coalesce"``: save at the first later ``save_if_due()`` or
        ``save()`` that finds the writer free. No row is lost: the next save contains all rows
        touched since its parent. With several processes, ``"skip"`` and ``"coalesce"`` make the
        training thread wait for process 0.
      staging_bytes: host memory for the rows of deltas in flight, and for dense leaves with
        ``Dense(deltas="whole")``. A larger delta keeps references to the tables, like a base; dense
        leaves are always copied.
    """

    durability: Durability = "power"
    when_busy: WhenBusy = "wait"
    staging_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        _check_known(self, durability=Durability, when_busy=WhenBusy)
        _check_at_least_one(self, "staging_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extents:
    """A preallocated file on the node's disk that holds whole saves durably.

    A save costs one write and one ``fdatasync``, and the disk cannot fill up during a run. Use
    extents if the staging directory is in memory: saves then survive a power cut.

    Attributes:
      directory: where the file is. Each checkpoint directory needs its own.
      nbytes: size of the file: at least two bases and four deltas, so that a new save never
        overwrites the newest ones.
      extent_bytes: unit of allocation; a save occupies a whole number of extents.
    """

    directory: str
    nbytes: int
    extent_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        block = 4096
        _check_kind(self, _PATH, "a path", "directory")
        _check_at_least_one(self, "nbytes", "extent_bytes")
        if self.extent_bytes < 2 * block or self.extent_bytes % block:
            raise _wrong(self, "extent_bytes", f"a multiple of {block} of at least {2 * block}")
        if self.nbytes < 6 * self.extent_bytes:
            least = f"six extents of {self.extent_bytes:,} bytes (two bases and four deltas)"
            raise _wrong(self, "nbytes", f"at least {least}")


@dataclasses.dataclass(frozen=True)
class Copies:
    """Peers that each keep complete copies of a node's saves in memory.

    Attributes:
      copies: number of peers with a copy. A save survives the loss of its node and of all but one
        of these peers.
      memory_bytes: memory limit of each node for other nodes' saves.
    """

    copies: int = 1
    memory_bytes: int = dataclasses.field(default=8 << 30, kw_only=True)

    def __post_init__(self) -> None:
        _check_at_least_one(self, "copies", "memory_bytes")


@dataclasses.dataclass(frozen=True)
class Erasure:
    """Peers that hold erasure-coded fragments of a node's saves in memory.

    Attributes:
      k: number of data fragments of a save; any ``k`` fragments restore the save.
      m: number of parity fragments. A save survives the loss of its node and ``m`` peers. Values
        above 1 need the extra ``erasure`` (Reed-Solomon instead of XOR).
      memory_bytes: memory limit of each node for other nodes' saves.
    """

    k: int
    m: int
    memory_bytes: int = dataclasses.field(default=8 << 30, kw_only=True)

    def __post_init__(self) -> None:
        _check_at_least_one(self, "k", "m", "memory_bytes")


def _check_at_least_one(options: object, *attributes: str) -> None:
    for name in attributes:
        found = getattr(options, name)
        if not (isinstance(found, int) and not isinstance(found, bool) and found >= 1):
            raise _wrong(options, name, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiers:
    """How saves get to a remote checkpoint directory: a bucket, or ``nodes://``.

    Saves are written to a staging directory on the node. A separate process, the uploader, copies
    them to the bucket, and finishes the uploads of a killed trainer. While the bucket is
    unavailable, saves still succeed.

    Attributes:
      staging_dir: a fast local directory, such as ``/nvme/run`` or ``/dev/shm/run``. Each
        checkpoint directory needs its own staging directory, by default in
        ``$XDG_CACHE_HOME/deltackpt`` or ``~/.cache/deltackpt``. A power cut loses a staging
        directory in memory; otherwise ``WriteOptions.durability`` applies.
      max_staging_bytes: limit for saves that are not uploaded yet. A save that does not fit, and
        the next ``save()``, wait for room. A save larger than the limit is written alone, with a
        warning.
      extents: a file that also holds each save, so that the save survives a power cut.
      peers: how other nodes of a Ray cluster keep each save in memory, so that the save survives
        the loss of its node. For a single process, or with ``shared=False``.
      wait_for: what ``wait_until_finished()`` and ``close()`` wait for: that the saves are
        ``"remote"``, held by ``"peers"``, or in the ``"staging"`` directory (and any extents).
      keep_local: number of newest chains that stay in the staging directory after upload, so that
        a restart on the same node downloads nothing.
      bytes_per_sec: upload bandwidth limit; None for no limit.
      shared: whether all processes of a job see the same staging directory. If not, each process
        stages in its subfolder ``process-<number>`` and uploads its own shard, and restores read
        the bucket.
      endpoint: address of the object store, if it is not the provider's default.
    """

    staging_dir: str | None = None
    max_staging_bytes: int = 8 << 30
    extents: Extents | None = None
    peers: Copies | Erasure | None = None
    wait_for: WaitFor = "remote"
    keep_local: int = 2
    bytes_per_sec: float | None = None
    shared: bool = True
    endpoint: str | None = None

    def __post_init__(self) -> None:
        _check_known(self, wait_for=WaitFor)
        _check_at_least_one(self, "max_staging_bytes", "keep_local")
        expected = "a deltackpt.tiers.Extents, or None"
        _check_kind(self, (Extents, type(None)), expected, "extents")
        expected = "a deltackpt.tiers.Copies or a deltackpt.tiers.Erasure, or None"
        _check_kind(self, (Copies, Erasure, type(None)), expected, "peers")
        if self.wait_for == "peers" and self.peers is None:
            raise OptionError(
                "Tiers.wait_for: expected peers to wait for, found none; pass "
                "peers=Copies(copies=1)"
            )
        _check_kind(self, (*_PATH, type(None)), "a path or None", "staging_dir")
        _check_kind(self, (bool,), "bool", "shared")
        _check_kind(self, (str, type(None)), "str or NoneType", "endpoint")
        redaction.check_endpoint(self.endpoint)
        if self.bytes_per_sec is not None:
            _check_positive(self, "bytes_per_sec", what="number of bytes per second")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Background:
    """Limits of the background work of a manager, for hosts with spare cores or disks.

    If training uses every core of a host, these limits do not make it faster.

    Attributes:
      cpus: CPU IDs for the threads that encode, write and fsync, and for the uploader. None
        for any CPU of the process.
      bytes_per_sec: limit of background writes of each process, before compression. It does not
        apply while ``save()`` itself waits, as with ``base_snapshot="block"``.
        ``Tiers.bytes_per_sec`` limits uploads.
      threads: number of arrays that are written at the same time, while about as many threads
        encode; four by default. A manager starts the threads that save when it needs them, nine at
        most by default (more if more than eight processes save together), and ends them in
        ``close()``. The WAL, garbage collection and peers have threads of their own.
    """

    cpus: Collection[int] | None = None
    bytes_per_sec: float | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.cpus is not None:
            is_some = isinstance(self.cpus, Collection) and len(self.cpus) > 0
            if not (is_some and all(isinstance(cpu, int) and cpu >= 0 for cpu in self.cpus)):
                raise _wrong(self, "cpus", "at least one CPU number, or None for all")
            object.__setattr__(self, "cpus", frozenset(self.cpus))
        if self.bytes_per_sec is not None:
            _check_positive(self, "bytes_per_sec", what="number of bytes per second")
        if self.threads is not None:
            _check_at_least_one(self, "threads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalWal:
    """A write-ahead log in a directory that all processes of a job see.

    Attributes:
      directory: where the segments are; by default ``log`` in the checkpoint directory or its
        staging directory. Epoch headers are always in this ``log``. Checkpoint directories may
        share a WAL directory.
      segment_bytes: size at which a new segment file begins; each save also begins a segment.
    """

    directory: str | None = None
    segment_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        _check_at_least_one(self, "segment_bytes")
        _check_kind(self, (*_PATH, type(None)), "a path or None", "directory")
        if self.directory is not None:
            # Epoch headers contain it, and are read from other working directories.
            object.__setattr__(self, "directory", os.path.abspath(posix.user_path(self.directory)))


@dataclasses.dataclass(frozen=True)
class KafkaWal:
    """A write-ahead log in a Kafka topic, which no other checkpoint directory uses.

    Process p writes to partition p. The topic must exist; opening the manager checks it. Epoch
    headers stay in the ``log`` of the checkpoint directory, without ``config``.

    Attributes:
      topic: name of the topic. Readers may omit it: epoch headers name it.
      config: settings of librdkafka, such as ``bootstrap.servers`` and those of security, or a
        function that returns them, called whenever a client starts. They appear in no file, log,
        event or error.
      chunk_bytes: maximum length of a message. Longer records are several messages.
    """

    topic: str = ""
    _: dataclasses.KW_ONLY
    config: kafka.Config = dataclasses.field(repr=False, hash=False)
    chunk_bytes: int = 960_000

    def __post_init__(self) -> None:
        if self.topic != "" and not (
            isinstance(self.topic, str) and kafka.TOPIC.fullmatch(self.topic)
        ):
            allowed = "letters, digits, dots, hyphens and underscores"
            raise _wrong(self, "topic", f"up to 249 {allowed}")
        if not callable(self.config):
            kafka.check_config(self.config)
        _check_at_least_one(self, "chunk_bytes")
        if self.chunk_bytes < _LEAST_CHUNK_BYTES:
            raise _wrong(self, "chunk_bytes", f"at least {_LEAST_CHUNK_BYTES}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalOptions:
    """How ``CheckpointManager.append`` keeps the changes between saves.

    Attributes:
      backend: where the WAL is stored.
      dense: which dense leaves a full record contains. ``"whole"``: all of them.
        ``"delta"``: the changes since the last full record, encoded as ``ManagerOptions.dense``
        sets; the first record of a segment and every 16th contain all. ``"soft"``: only records
        appended with ``full=True`` are full.
      dense_every: every Nth record is full and can be restored; the others contain rows only.
      codec: codec of the rows, with its error budget; None for the codec of deltas.
      buffer_bytes: memory limit for records that are not durable yet.
      when_full: what ``append()`` does if the buffer is full. ``"wait"``: wait for at most
        ``deadline_secs``. ``"coalesce"``: append nothing; the next call appends these rows too.
      on_failure: what the next ``append()`` does if a record could not be made durable.
        ``"save"``: begin a new segment with all rows since the last durable record, and if that
        fails too, save the step. ``"raise"``: raise ``AppendFailed``.
      deadline_secs: maximum wait for space, default timeout of ``wait_appended()``, and how far a
        process may lag behind the others before a ``wal-behind`` event is emitted. With
        ``KafkaWal``, also how long a record waits for its acknowledgement before it has failed.
      max_wal_ratio: ``append()`` saves the step once the WAL of all processes since the last save
        reaches this multiple of a full checkpoint (of at least 16 MiB). This limits replay time.
    """

    backend: LocalWal | KafkaWal = LocalWal()
    dense: LoggedDense = "whole"
    dense_every: int = 1
    codec: str | BitWidthPolicy | CodecChoice | None = None
    buffer_bytes: int = 1 << 30
    when_full: WhenFull = "wait"
    on_failure: OnFailure = "save"
    deadline_secs: float = 120.0
    max_wal_ratio: float = 1.0

    def __post_init__(self) -> None:
        _check_known(self, dense=LoggedDense, when_full=WhenFull, on_failure=OnFailure)
        _check_at_least_one(self, "dense_every", "buffer_bytes")
        if not isinstance(self.backend, (LocalWal, KafkaWal)):
            raise OptionError(
                "WalOptions.backend: expected a deltackpt.wal.LocalWal or KafkaWal, found "
                f"{type(self.backend).__name__}; pass e.g. LocalWal(directory='/nvme/log')"
            )
        if self.codec is not None:
            CodecChoice.from_option(self.codec)
        _check_positive(self, "max_wal_ratio")
        _check_positive(self, "deadline_secs", most=threading.TIMEOUT_MAX)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
    """How leaves that are neither tables nor slots are saved.

    Bases always contain them losslessly, in Orbax's layout, which stock Orbax reads. Deltas store
    them in the shards of their tables, which stock Orbax cannot read; ``deltackpt export orbax``
    and compaction convert any step.

    Attributes:
      deltas: ``"whole"``: deltas contain all dense leaves losslessly, and none is kept in memory
        between saves. ``"blocks"``: deltas contain the blocks of 256 elements that changed since
        the parent.
      codec: codec of blocks: one name for all leaves, or a mapping from globs over leaf paths to
        names (``*`` matches within one path component, ``**`` across components; the first match
        applies; leaves without a match are lossless). Lossy codecs apply to floats of 16 and 32
        bits: ``"ef8"`` and ``"ef4"`` encode the difference to the decoded parent, with error
        feedback; ``"int8"`` encodes values; ``"log8"`` and, as a difference, ``"log4"`` suit second
        moments.
      max_error: largest relative L2 error of a leaf in one save; None for no limit. A leaf that
        would exceed the limit is encoded with the next more precise codec, and finally losslessly.
        If ``ef8``, ``ef4`` or ``int8`` would zero more than 1% of a leaf without negative elements,
        ``log8`` is used.
      max_reference_bytes: limit of the references that each process keeps between saves: the
        decoded last save, from which the next delta computes differences. Reused buffers may take
        up to twice as much again; the copy of a save in flight is not limited. For leaves that do
        not fit, changed blocks of 64 KiB are saved whole, as ``int8`` or ``log8`` if these are
        named, else losslessly: ``ef8``, ``ef4`` and ``log4`` need a reference. Measured host
        memory between saves and at the peak of a delta, as multiples of the dense leaves: lossless
        2.1 and 2.1; lossy 3.4 and 3.5; without references 0.1 and 2.1. For leaves on accelerators
        with ``ef8`` or ``ef4``, references stay on the accelerator: the leaves' bytes once more,
        twice while a save is written.

    Examples:
      >>> Dense(deltas="blocks", codec={"params/**": "ef4", "opt_state/**/nu/**": "log8"}).max_error
      0.05
    """

    deltas: DenseDeltas = "whole"
    codec: str | Mapping[str, str] = "lossless"
    max_error: float | None = 0.05
    max_reference_bytes: int = 16 << 30

    def __post_init__(self) -> None:
        _check_known(self, deltas=DenseDeltas)
        _check_at_least_one(self, "max_reference_bytes")
        _check_kind(self, (str, Mapping), "str or Mapping", "codec")
        if not all(isinstance(pattern, str) for pattern in self.codec):
            raise _wrong(self, "codec", "globs over leaf paths")
        for name in _codecs_of(self):
            if name != LOSSLESS and name not in block_codecs.names():
                raise OptionError(
                    f"Dense.codec: expected one of {block_codecs.names()}, found {name!r}; "
                    "choose one of them"
                )
        if self.max_error is not None and not is_at_least_zero(self.max_error):
            raise _wrong(self, "max_error", "None or a finite number of at least 0")


def _codecs_of(dense: Dense) -> list[str]:
    return [dense.codec] if isinstance(dense.codec, str) else list(dense.codec.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """Options of a ``CheckpointManager``.

    Attributes:
      deltas: what a save contains.
      writes: how saves are written.
      dense: how leaves that are neither tables nor slots are saved.
      max_to_keep: number of newest steps to keep; None keeps all. A kept step always keeps its
        chain.
      preservation_policy: an Orbax ``PreservationPolicy`` that decides which steps to keep,
        instead of ``max_to_keep``.
      save_interval_steps: ``save()`` saves only multiples of this; None saves at every call.
      save_decision_policy: an Orbax ``SaveDecisionPolicy`` that decides which steps ``save()``
        saves, instead of ``save_interval_steps``.
      timeouts: limits of all waits.
      tiers: how saves get to a remote checkpoint directory; None for the defaults of ``Tiers``.
      background: limits of the background work.
      wal: how ``append()`` keeps the changes between saves; None for no WAL.
      access: ``"write"``: save and restore, with the directory's lease. ``"read"``: only restore,
        without a lease; nothing is written.
      multiprocess: whether all processes of the job create and use this manager together. With
        ``access="read"``, False lets one process use the manager alone.
    """

    deltas: DeltaOptions = DeltaOptions()
    writes: WriteOptions = WriteOptions()
    dense: Dense = Dense()
    max_to_keep: int | None = None
    preservation_policy: PreservationPolicy | None = None
    save_interval_steps: int | None = None
    save_decision_policy: SaveDecisionPolicy | None = None
    timeouts: Timeouts = Timeouts()
    tiers: Tiers | None = None
    background: Background = Background()
    wal: WalOptions | None = None
    access: Access = "write"
    multiprocess: bool = True

    def __post_init__(self) -> None:
        for name, (kind, example) in _EXAMPLES.items():
            found = getattr(self, name)
            optional = name in ("tiers", "wal")
            if not (isinstance(found, kind) or (optional and found is None)):
                raise OptionError(
                    f"ManagerOptions.{name}: expected a deltackpt.{kind.__name__}"
                    f"{' or None' if optional else ''}, found {type(found).__name__}; pass e.g. "
                    f"{name}={kind.__name__}({example})"
                )
        _check_known(self, access=Access)
        _check_kind(self, (bool,), "bool", "multiprocess")
        if not (self.multiprocess or self.read_only):
            raise OptionError(
                "ManagerOptions.multiprocess: expected True if access is 'write', found False; "
                "all processes of a job save together"
            )
        for number, policy, kind in (
            ("max_to_keep", "preservation_policy", PreservationPolicy),
            ("save_interval_steps", "save_decision_policy", SaveDecisionPolicy),
        ):
            steps, found = getattr(self, number), getattr(self, policy)
            if steps is not None:
                _check_at_least_one(self, number)
            if not (found is None or (isinstance(found, kind) and not isinstance(found, type))):
                raise OptionError(
                    f"ManagerOptions.{policy}: expected an Orbax {kind.__name__} or None, found "
                    f"{found!r}; pass a number of steps as {number}"
                )
            if steps is not None and found is not None:
                raise OptionError(
                    f"ManagerOptions.{policy}: expected None if {number} is given, found both; "
                    "set one of them"
                )
        has_blocks = self.dense.deltas == "blocks" or (self.wal and self.wal.dense == "delta")
        if not has_blocks and {*_codecs_of(self.dense)} - {LOSSLESS}:
            raise OptionError(
                f"Dense.codec: expected blocks to encode, found codec {self.dense.codec!r} and "
                "deltas='whole', which stores dense leaves uncompressed; pass deltas='blocks', or "
                "WalOptions(dense='delta')"
            )

    @property
    def read_only(self) -> bool:
        """Whether the manager never saves."""
        return self.access != "write"

    @property
    def alone(self) -> bool:
        """Whether this process ignores the other processes of its job."""
        return not self.multiprocess


#: Option to its class, and arguments of an example for errors.
_EXAMPLES = {
    "deltas": (DeltaOptions, "bases='compacted'"),
    "writes": (WriteOptions, "when_busy='skip'"),
    "dense": (Dense, "deltas='blocks'"),
    "timeouts": (Timeouts, "save_secs=600"),
    "tiers": (Tiers, "staging_dir='/dev/shm/run'"),
    "background": (Background, "threads=1"),
    "wal": (WalOptions, "dense_every=16"),
}
