# SPDX-License-Identifier: Apache-2.0
"""Options of the manager: frozen, validated when they are built."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Literal

from deltackpt.codecs import of_blocks
from deltackpt.errors import OptionError
from deltackpt.policy import BaseOrDelta, BitWidthPolicy, CodecChoice, Consecutive, Rolling
from deltackpt.policy.bit_width import is_at_least_zero
from deltackpt.policy.decision import SaveDecisionPolicy
from deltackpt.policy.retention import PreservationPolicy

Durability = Literal["power", "process"]
WhenBusy = Literal["wait", "skip", "coalesce"]
BaseSnapshot = Literal["block", "hold"]
Bases = Literal["periodic", "compacted"]
Tracking = Literal["marks", "fingerprints"]
Access = Literal["write", "read", "read alone"]
DenseDeltas = Literal["orbax", "own"]
WhenFull = Literal["wait", "coalesce"]
LoggedDense = Literal["whole", "delta", "soft"]
OnFailure = Literal["save", "raise"]
WaitFor = Literal["root", "neighbours", "stage"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Every wait of the manager, in seconds.

    Attributes:
      save_secs: for a save in flight, at the next ``save()`` that waits.
      close_secs: for the saves in flight at ``wait()`` and ``close()``, when a program ends without
        ``close()``, and when another manager of the process is opened on the directory.
      processes_secs: for other processes, when a manager is made or a step restored, and in the
        background of a save: process 0 waits so long for their parts once its own is done, the
        others twice as long for process 0.
      service_secs: for a restore service to hold the step, and for each of its answers; storage
        takes over afterwards.
      store_secs: for each answer of a bucket. What is asked for again and again, as a promotion
        is, goes on afterwards; what a restore asks for fails.
    """

    save_secs: float = 1800.0
    close_secs: float = 3600.0
    processes_secs: float = 300.0
    service_secs: float = 10.0
    store_secs: float = 60.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise OptionError(
                    f"Timeouts.{field.name}: expected a positive number of seconds, found "
                    f"{getattr(self, field.name)!r}"
                )


def _check_known(options: object, **known: tuple[str, ...]) -> None:
    for name, values in known.items():
        if (found := getattr(options, name)) not in values:
            raise OptionError(
                f"{type(options).__name__}.{name}: expected one of {values}, found {found!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaOptions:
    """What a save holds: all rows, or those that changed.

    Attributes:
      tracking: how touched rows are known: ``"marks"``: by a ``TouchState`` in the state, or given
        to ``save()``; ``"fingerprints"``: the manager itself hashes each row with its slots at
        every save, and compares; 12 bytes per row on the devices, and no line in the training step.
      sampled_proof: whether each save looks again at some 1,536 rows that its parent sampled: a
        row that changed without being marked makes the save a base (with several processes: fails
        it, and makes the next one a base) instead of a wrong delta. Less than 2 ms.
      policy: base or delta.
      bases: ``"periodic"``: the policy's bounds make the trainer write a base now and then;
        ``"compacted"``: later bases are left to compaction, by the service or ``deltackpt
        compact``, and the trainer takes one only where it must, or where nothing was compacted
        for four times the bounds.
      base_snapshot: a base holds the tables until it is written. ``"hold"`` returns from
        ``save()`` at once, and a step that donates the tables meanwhile pays a copy of them;
        ``"block"`` returns when the tables have been written, and needs no memory; so does
        ``"hold"`` where one of them is a numpy array, which may change in place.
    """

    tracking: Tracking = "marks"
    sampled_proof: bool = True
    policy: BaseOrDelta = dataclasses.field(default_factory=Consecutive)
    bases: Bases = "periodic"
    base_snapshot: BaseSnapshot = "hold"

    def __post_init__(self) -> None:
        _check_known(
            self,
            tracking=("marks", "fingerprints"),
            bases=("periodic", "compacted"),
            base_snapshot=("block", "hold"),
        )
        if self.bases == "compacted" and isinstance(self.policy, Rolling):
            raise OptionError(
                'DeltaOptions.policy: expected another than Rolling with bases="compacted", found '
                f'{self.policy}; its saves need no bases: leave bases="periodic"'
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How saves are written in the background.

    Attributes:
      durability: ``"power"``: a step for which ``wait()`` has returned survives a power cut;
        ``"process"``: it survives the end of the process, not of the machine.
      when_busy: what ``save()`` does while a save is in flight: ``"wait"`` for it; ``"skip"``
        this one; or ``"coalesce"``: make it due, to be taken by the first ``save_if_due()`` or
        ``save()`` that finds the writer free. None of them loses a row: the next save covers
        whatever was touched since its parent. With several processes the last two ask process 0
        whether it is free, and so wait for it on the training thread.
      staging_bytes: host memory for the rows of deltas in flight. A delta that needs more is
        held like a base.
    """

    durability: Durability = "power"
    when_busy: WhenBusy = "wait"
    staging_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        _check_known(self, durability=("power", "process"), when_busy=("wait", "skip", "coalesce"))
        if self.staging_bytes <= 0:
            raise OptionError(
                f"WriteOptions.staging_bytes: expected at least 1, found {self.staging_bytes}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extents:
    """A file of fixed size on a disk of the node, in which whole saves are held durably.

    Its space is taken when it is made, and written again in place: one write and one ``fdatasync``
    a save, and no full disk in the middle of a run. With a stage in memory this is what survives a
    power cut.

    Attributes:
      directory: where the file is; of this root alone.
      nbytes: its size: at least two bases and four deltas, so that none of those before is written
        over.
      extent_bytes: what is handed out at once; a save takes a whole number of them.
    """

    directory: str
    nbytes: int
    extent_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        block = 4096
        if self.extent_bytes < 2 * block or self.extent_bytes % block:
            raise OptionError(
                f"Extents.extent_bytes: expected a multiple of {block} of at least {2 * block}, "
                f"found {self.extent_bytes!r}"
            )
        if self.nbytes < 6 * self.extent_bytes:
            raise OptionError(
                f"Extents.nbytes: expected at least six extents of {self.extent_bytes:,} bytes "
                f"(two bases and four deltas), found {self.nbytes!r}"
            )


@dataclasses.dataclass(frozen=True)
class Copies:
    """Neighbours that each hold whole copies of a node's saves in memory.

    Attributes:
      copies: on how many other nodes: so many nodes beside one's own may be lost at once.
      memory_bytes: the most that each node holds of others.
    """

    copies: int = 1
    memory_bytes: int = dataclasses.field(default=8 << 30, kw_only=True)

    def __post_init__(self) -> None:
        _check_at_least_one(self, "copies", "memory_bytes")


@dataclasses.dataclass(frozen=True)
class Erasure:
    """Neighbours that hold fragments of a node's saves in memory, of which some may be lost.

    Attributes:
      k: fragments that a save is cut into: any so many restore it.
      m: further ones: so many of the nodes that hold them may be lost. With 1 they are sums by
        XOR; with more, Reed-Solomon codes (the extra ``erasure``).
      memory_bytes: the most that each node holds of others.
    """

    k: int
    m: int
    memory_bytes: int = dataclasses.field(default=8 << 30, kw_only=True)

    def __post_init__(self) -> None:
        _check_at_least_one(self, "k", "m", "memory_bytes")


def _check_at_least_one(options: object, *attributes: str) -> None:
    for name in attributes:
        if not (isinstance(found := getattr(options, name), int) and found >= 1):
            raise OptionError(
                f"{type(options).__name__}.{name}: expected at least 1, found {found!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiers:
    """What stands between the training and a root that is far: a bucket, or ``nodes://``.

    Saves are made in a directory of the node, the stage, and brought to the root in the background
    by a process of their own, the promoter, which ends what a killed trainer has left. An outage of
    the bucket is a growing lag, and no failed save.

    Attributes:
      stage: the directory: fast, such as a disk of the node or ``/dev/shm/run``, and of this root
        alone; by default one for each root below ``$XDG_CACHE_HOME/deltackpt``, or
        ``~/.cache/deltackpt``. What a power cut leaves is what ``WriteOptions.durability`` says of
        it, and nothing of a stage in memory.
      stage_bytes: the most bytes of saves that are not at the root yet. A save that does not fit
        beside those is not written before there is room, so that the next ``save()`` waits for it;
        one that never fits goes alone, with a warning.
      extents: where each save is held beside the stage as soon as it is made, so that it survives
        a power cut; such as for a stage in memory.
      neighbours: how other nodes of a Ray cluster hold each save in memory, so that it survives the
        node. For a single process, or ``shared=False``.
      wait_for: what ``wait()`` and ``close()`` wait for: that the saves are at the ``"root"``, at
        the ``"neighbours"``, or in the ``"stage"``, and in the extents where there are such.
      keep_local: how many of the newest chains stay in the stage, so that a restart on the node
        reads nothing from the bucket. Others leave it once they are at the root.
      bytes_per_sec: the most that promotion sends; None for all that the network takes.
      shared: whether all processes of a job see the one stage. If not, each has a stage of its
        own, ``process-<number>`` below that, such as on a disk of its node; it is promoted from
        there, and restores read the root.
      endpoint: address of the service, where it is not the provider's own.
    """

    stage: str | None = None
    stage_bytes: int = 8 << 30
    extents: Extents | None = None
    neighbours: Copies | Erasure | None = None
    wait_for: WaitFor = "root"
    keep_local: int = 2
    bytes_per_sec: float | None = None
    shared: bool = True
    endpoint: str | None = None

    def __post_init__(self) -> None:
        _check_known(self, wait_for=("root", "neighbours", "stage"))
        _check_at_least_one(self, "stage_bytes", "keep_local")
        for name, kinds in (("extents", (Extents,)), ("neighbours", (Copies, Erasure))):
            found = getattr(self, name)
            if not (found is None or isinstance(found, kinds)):
                expected = " or ".join(f"a deltackpt.{kind.__name__}" for kind in kinds)
                raise OptionError(
                    f"Tiers.{name}: expected {expected}, or None, found {type(found).__name__}"
                )
        if self.wait_for == "neighbours" and self.neighbours is None:
            raise OptionError(
                "Tiers.wait_for: expected neighbours to wait for, found none; give "
                "neighbours=Copies(copies=1)"
            )
        if self.bytes_per_sec is not None and not self.bytes_per_sec > 0:
            raise OptionError(
                "Tiers.bytes_per_sec: expected a positive number of bytes per second, or None for "
                f"no bound, found {self.bytes_per_sec!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Background:
    """What the background work of a manager may take, for hosts with cores or disks to spare.

    Of a host whose cores all train none of it makes training faster: what training loses there are
    the cycles that background work takes, wherever and however slowly it takes them.

    Attributes:
      cpus: where the threads that write, encode and force saves run, and the promoter: such as
        those that input pipelines leave free. None for wherever the process may run.
      bytes_per_sec: the most that saves write in the background, of each process; bytes that are
        compressed later count as they are before. Not while ``save()`` itself waits for what is
        written, as with ``base_snapshot="block"``. What goes to a bucket is bounded by
        ``Tiers.bytes_per_sec``.
      threads: how many threads write arrays, and how many encode them; two of each by default.
    """

    cpus: Collection[int] | None = None
    bytes_per_sec: float | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.cpus is not None:
            if not self.cpus or not all(isinstance(cpu, int) and cpu >= 0 for cpu in self.cpus):
                raise OptionError(
                    "Background.cpus: expected numbers of CPUs, at least one, or None for all, "
                    f"found {self.cpus!r}"
                )
            object.__setattr__(self, "cpus", frozenset(self.cpus))
        if self.bytes_per_sec is not None and not self.bytes_per_sec > 0:
            raise OptionError(
                "Background.bytes_per_sec: expected a positive number of bytes per second, or None "
                f"for no bound, found {self.bytes_per_sec!r}"
            )
        if self.threads is not None and not (isinstance(self.threads, int) and self.threads >= 1):
            raise OptionError(f"Background.threads: expected at least 1, found {self.threads!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalLog:
    """Keeps the log in files of a directory that all processes of a job see.

    Attributes:
      directory: where the frames go; by default ``log`` in the root, or in its stage. The heads,
        which say what counts, are always there. Several roots may have one directory.
      segment_bytes: how long a file grows before the next one is begun; at each step, too.
    """

    directory: str | None = None
    segment_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        _check_at_least_one(self, "segment_bytes")
        if self.directory is not None:
            # Heads bear it, and who reads them stands elsewhere.
            object.__setattr__(self, "directory", os.path.abspath(self.directory))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogOptions:
    """How ``CheckpointManager.log`` keeps what changes between steps.

    Attributes:
      backend: where the log is.
      dense: what becomes of dense leaves in a full mark: ``"whole"``; ``"delta"``: what changed
        since the full mark before, by the codecs of ``ManagerOptions.dense``, and all of them at
        the first mark of a file and at every 16th; ``"soft"``: there are no full marks but those
        that are asked for by ``full=True``.
      dense_every: every so many marks one is full, and can be restored; the others hold rows.
      codec: of the rows of the log; None for that of the deltas. An error budget holds here, too.
      buffer_bytes: the most bytes that wait in memory until they are durable.
      when_full: what ``log()`` does when that is full: ``"wait"``, for at most ``deadline_secs``;
        ``"coalesce"``: take nothing, so that the next call takes these rows too.
      on_failure: what the next ``log()`` does once a mark could not be made durable: ``"save"``:
        goes on in a new file with all rows since the last durable mark, and where that fails as
        well saves the step; ``"raise"`` ``LogFailed``.
      deadline_secs: of waiting for room, and of ``wait_logged()`` where it is given no other; how
        far a process may be behind the others before that is told, as ``log-behind``.
      most_bytes: how long the log of all processes may grow beyond the last step before ``log()``
        saves a step by itself, in bases (of 16 MiB at least, and dense leaves on top): what a
        restore replays takes its time.

    Of several processes all save at the same call, one that they have agreed on in the background.
    """

    backend: LocalLog = LocalLog()
    dense: LoggedDense = "whole"
    dense_every: int = 1
    codec: str | BitWidthPolicy | CodecChoice | None = None
    buffer_bytes: int = 1 << 30
    when_full: WhenFull = "wait"
    on_failure: OnFailure = "save"
    deadline_secs: float = 120.0
    most_bytes: float = 1.0

    def __post_init__(self) -> None:
        _check_known(
            self,
            dense=("whole", "delta", "soft"),
            when_full=("wait", "coalesce"),
            on_failure=("save", "raise"),
        )
        _check_at_least_one(self, "dense_every", "buffer_bytes")
        if not isinstance(self.backend, LocalLog):
            raise OptionError(
                "LogOptions.backend: expected a deltackpt.LocalLog, found "
                f"{type(self.backend).__name__}; give e.g. LocalLog(directory='/nvme/log')"
            )
        if self.codec is not None:
            CodecChoice.of(self.codec)
        for name in ("deadline_secs", "most_bytes"):
            if not getattr(self, name) > 0:
                raise OptionError(
                    f"LogOptions.{name}: expected a positive number, found {getattr(self, name)!r}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
    """How the leaves that are neither tables nor slots are saved.

    Bases always hold them exactly, in Orbax's layout, which stock Orbax reads.

    Attributes:
      deltas: ``"orbax"``: deltas hold all of them, as bases do; ``"own"``: deltas hold what changed
        since the parent, as blocks of 256 numbers in the item of the tables.
      codec: of deltas that are ``"own"``: one for all leaves, or by glob over their paths (``*``
        stays within one step of a path, ``**`` crosses them; the first that matches counts, and
        leaves that none matches are exact). ``"exact"``: bit for bit, each block by what is
        smallest. Lossy ones, for floats of 16 and 32 bits: ``"ef8"`` and ``"ef4"``, the difference
        to what the parent decodes to, whose errors do not add up; ``"int8"``; for second moments
        ``"log8"`` and, as a difference, ``"log4"``. Lossy ones are taken only where asked for.
      max_error: most relative l2 error that a save may put into a leaf; one that would exceed it is
        stored by the next more precise codec, at last exactly. So is a leaf without negative
        numbers of which a linear code (``ef8``, ``ef4``, ``int8``) would lose more than one in a
        hundred, by ``log8``. None for no bound.
      skip_unchanged: whether blocks whose bits are those of the parent are left out.
      max_reference_bytes: host memory of each process for what the last save decodes to, from which
        the next delta takes the difference. Of leaves for which there is no room a 128-bit hash of
        each 64 KiB is kept: blocks of 64 KiB that did not change are left out, others are whole, by
        ``int8`` and ``log8`` where these are named, exact in the place of ``ef8``, ``ef4`` and
        ``log4``. Between saves a process keeps the bytes of its dense leaves twice, as references
        and for the copies of the next save; at the peak of a delta that is the same for exact
        leaves, and 3.5 times the bytes for lossy ones (measured: 2.1 and 3.5, and for lossy leaves
        3.4 between saves, too). Without room it is 2.1 at the peak and 0.1 between saves, and
        hashing takes a pass over the leaves. Leaves on accelerators that have ``ef8`` or ``ef4``
        keep their references there: their bytes once more, twice while a save is written.

    Example:
      >>> Dense(deltas="own", codec={"params/**": "ef4", "opt_state/**/nu/**": "log8"}).max_error
      0.05
    """

    deltas: DenseDeltas = "orbax"
    codec: str | Mapping[str, str] = "exact"
    max_error: float | None = 0.05
    skip_unchanged: bool = True
    max_reference_bytes: int = 16 << 30

    def __post_init__(self) -> None:
        _check_known(self, deltas=("orbax", "own"))
        _check_at_least_one(self, "max_reference_bytes")
        given = [self.codec] if isinstance(self.codec, str) else list(self.codec.values())
        for name in given:
            if name not in of_blocks.names():
                raise OptionError(
                    f"Dense.codec: expected one of {of_blocks.names()}, found {name!r}; "
                    "choose one of them"
                )
        if self.max_error is not None and not is_at_least_zero(self.max_error):
            raise OptionError(
                "Dense.max_error: expected None or a finite number of at least 0, found "
                f"{self.max_error!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """How a CheckpointManager works.

    Attributes:
      deltas: what a save holds.
      writes: how it is written.
      dense: how leaves that are neither tables nor slots are saved.
      retention: which committed steps stay: a number of newest steps, an Orbax
        ``PreservationPolicy``, or None for all. A kept step always keeps its chain.
      decision: which steps ``save()`` takes of those that it is called for: those that a number
        divides, those that an Orbax ``SaveDecisionPolicy`` takes, or None for all.
      timeouts: limits of all waits.
      tiers: how saves come to a root that is a bucket; None for the defaults of ``Tiers``, and for
        a root that is a directory, which needs none.
      background: what the work in the background may take.
      log: how ``log()`` keeps what changes between steps; None where it is not used.
      access: ``"write"``: the manager saves and restores, and holds the directory's lease;
        ``"read"``: it restores only: no lease, no collection, no directory is made; ``"read
        alone"``: and of a job of several processes this one only uses it, where otherwise all
        processes make and use a manager.
    """

    deltas: DeltaOptions = DeltaOptions()
    writes: WriteOptions = WriteOptions()
    dense: Dense = Dense()
    retention: int | PreservationPolicy | None = None
    decision: int | SaveDecisionPolicy | None = None
    timeouts: Timeouts = Timeouts()
    tiers: Tiers | None = None
    background: Background = Background()
    log: LogOptions | None = None
    access: Access = "write"

    def __post_init__(self) -> None:
        for name, kind in (
            ("deltas", DeltaOptions),
            ("writes", WriteOptions),
            ("dense", Dense),
            ("timeouts", Timeouts),
            ("background", Background),
        ):
            if not isinstance(found := getattr(self, name), kind):
                raise OptionError(
                    f"ManagerOptions.{name}: expected a deltackpt.{kind.__name__}, found "
                    f"{type(found).__name__}; give e.g. {name}={_EXAMPLES[kind]}"
                )
        if not (self.tiers is None or isinstance(self.tiers, Tiers)):
            raise OptionError(
                "ManagerOptions.tiers: expected a deltackpt.Tiers or None, found "
                f"{type(self.tiers).__name__}; give e.g. tiers=Tiers(stage='/dev/shm/run')"
            )
        if not (self.log is None or isinstance(self.log, LogOptions)):
            raise OptionError(
                "ManagerOptions.log: expected a deltackpt.LogOptions or None, found "
                f"{type(self.log).__name__}; give e.g. log=LogOptions(dense_every=16)"
            )
        _check_known(self, access=("write", "read", "read alone"))
        for name in ("retention", "decision"):
            if isinstance(found := getattr(self, name), int) and found < 1:
                raise OptionError(f"ManagerOptions.{name}: expected at least 1 step, found {found}")

    @property
    def read_only(self) -> bool:
        """Whether nothing is ever saved."""
        return self.access != "write"

    @property
    def alone(self) -> bool:
        """Whether this process takes no notice of the others of its job."""
        return self.access == "read alone"


_EXAMPLES = {
    DeltaOptions: "DeltaOptions(bases='compacted')",
    WriteOptions: "WriteOptions(when_busy='skip')",
    Dense: "Dense(deltas='own')",
    Timeouts: "Timeouts(save_secs=600)",
    Background: "Background(threads=1)",
}
