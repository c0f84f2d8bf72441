# SPDX-License-Identifier: Apache-2.0
"""Web scale in simulation: 1,000 hosts, 10 TB of tables, a failure every 10 minutes.

Discrete events (saves, durable saves, failures, recoveries) on a simulated clock. Intervals come
from ``advise_regime`` and ``advise_interval``, bases and deltas from the policies, peers from
rendezvous hashing: the project's own functions. The costs are inputs: see ``Inputs`` and ``Job``.
Nothing is written, and no network is used.

python benchmarks/web_scale.py --json web_scale.json
python benchmarks/web_scale.py --hosts 10 --hours 1      # a small job with the same bytes per host
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from report import Report, Sample, arguments, megabytes, percent, secs

from deltackpt.format.row_blocks import CHUNK_BYTES
from deltackpt.policies import (
    Consecutive,
    Cost,
    Intermittent,
    SaveHistory,
    advise_interval,
    advise_regime,
)
from deltackpt.policies.save_policies import BaseOrDelta, too_large
from deltackpt.resources.runtime import READS
from deltackpt.storage.striping import ranked

GB = 1e9
#: The claim under test: effective training time, with the restart of the job left out.
CLAIM = 0.97
#: Limit of a message of the coordination service.
MESSAGE_BYTES = 64 << 10
#: Detection and restart of a job, in seconds, until its processes could restore.
RESTARTS = (10, 30, 60)
Kind = Literal["base", "delta", "wal"]
KINDS: tuple[Kind, ...] = ("base", "delta", "wal")
#: The ways that the claim is about.
CLAIMED = "deltackpt, peers and standby"
WITH_WAL = "deltackpt, peers, standby and int8 WAL"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """What operations cost; measured figures are in docs/project/benchmarks.md.

    Attributes:
      delta_stall_secs, delta_stall_per_gb: measured: 11 ms for 4,000 rows; 27 ms of training for
        52 MB on a GPU (table 11).
      base_stall_per_gb: measured: 75.4 ms of training for 1.04 GB on a GPU (table 11).
      orbax_stall_per_gb: measured: 38.7 ms of training for 1.04 GB on a GPU (table 11).
      cnr_stall_secs: stall of a snapshot that Check-N-Run reports (NSDI 2022).
      disk_write, disk_read: bytes per second of a host: measured writes with fsync, and a cold
        restore of a base and ten deltas (1.56 GB in 1.8 s, table 3).
      memory_read: bytes per second of the same restore from the page cache (601 ms).
      standby_secs_per_gb: measured: a hot standby returns 1.04 GB in 0.11 s.
      int4_share, int8_share: bytes of a stored row of 64 float32 values and one slot, of raw ones.
      network: assumed: bytes per second between hosts, 25 Gbit/s.
      store: assumed: bytes per second of each host to and from the store, with all hosts at once.
      store_secs: assumed: latency of a request to the store.
      puts_per_sec: assumed: PUTs per second that the store accepts in all.
      readers: files that process 0 reads at the same time, as in this version.
      message_secs: assumed: time of the coordination service for a message of at most 64 KiB.
      parse_secs: measured: decoding a manifest with 800 tables (0.7 ms, warm).
      broker: assumed: bytes per second into a Kafka broker as leader, with two replicas.
      record_secs: assumed: until a broker has acknowledged a WAL record.
      spread: assumed: standard deviation of the logarithm of a host's time for a save.
    """

    delta_stall_secs: float = 0.011
    delta_stall_per_gb: float = 0.31
    base_stall_per_gb: float = 0.0725
    orbax_stall_per_gb: float = 0.0372
    cnr_stall_secs: float = 7.0
    disk_write: float = 1.0 * GB
    disk_read: float = 0.87 * GB
    memory_read: float = 2.6 * GB
    standby_secs_per_gb: float = 0.106
    int4_share: float = 0.16
    int8_share: float = 74 / 260
    network: float = 3.1 * GB
    store: float = 0.2 * GB
    store_secs: float = 0.03
    puts_per_sec: float = 50_000
    readers: int = READS
    message_secs: float = 100e-6
    parse_secs: float = 0.7e-3
    broker: float = 0.2 * GB
    record_secs: float = 0.05
    spread: float = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A training job: every host has the same share of the rows and of the dense leaves.

    Attributes:
      hosts: number of hosts, one process each.
      rows: rows of each host.
      row_bytes: bytes of a row with its slots.
      dense_bytes: bytes of dense leaves of each host.
      tables: number of tables.
      step_secs: duration of a step.
      step_rows: distinct rows of each host that a step touches.
      growth: k steps touch ``step_rows * k ** growth`` distinct rows. From published curves: 0.12 %
        of the rows after 2,560 samples, 3 % after 192,000.
      failure_secs: mean time between failures of the job, each of one host.
      restart_secs: from a failure until all processes, one on a new host, could restore.
      k, m: erasure code of the peers.
      rack_hosts: hosts in a rack.
    """

    hosts: int = 1000
    rows: float = 38e6
    row_bytes: float = 260
    dense_bytes: float = 10e6
    tables: int = 800
    step_secs: float = 1.0
    step_rows: float = 79e3
    growth: float = 0.745
    failure_secs: float = 600
    restart_secs: float = 0
    k: int = 4
    m: int = 2
    rack_hosts: int = 20

    @property
    def base_bytes(self) -> float:
        """Bytes of a host's share of a base, raw."""
        return self.rows * self.row_bytes + self.dense_bytes

    def delta_bytes(self, steps: float, share: float = 1.0) -> float:
        """Bytes of a host's share of the changes of some steps; ``share`` of the raw rows."""
        rows = min(self.rows, self.step_rows * steps**self.growth)
        return rows * self.row_bytes * share + self.dense_bytes


# --- What a save and a restore cost --------------------------------------------------------------


class Traffic(NamedTuple):
    """What the coordination of one save takes, over all processes.

    Attributes:
      messages: through the coordination service.
      puts: files of payload, manifests and digests.
      gets: of process 0.
      nbytes: manifests and digests.
      pieces: messages that they would be instead.
      seconds: from the last file of the slowest process until the commit.
    """

    messages: int
    puts: int
    gets: int
    nbytes: float
    pieces: int
    seconds: float


def coordination(job: Job, inputs: Inputs, kind: Kind, nbytes: float, *, readers: int) -> Traffic:
    """Returns what the commit of a base or delta costs beside its payload.

    Each process sends one message and gets one answer. Process 0 reads the manifests and digests of
    all processes from storage. Sizes are those of docs/project/design.md.

    Args:
      job: the job.
      inputs: costs of operations.
      kind: base or delta.
      nbytes: bytes of a host's share.
      readers: requests of process 0 at a time; 1 reads the files in turn.
    """
    chunks = math.ceil(nbytes / CHUNK_BYTES) if kind == "base" else 0
    files = 2 if kind == "delta" else 9 * (1 + math.ceil(chunks / 9)) + 2
    described = 47 * job.tables + 100 * chunks + 32 * nbytes / 2**20
    gets = (1 if kind == "delta" else 2) * job.hosts
    reading = gets * inputs.store_secs / readers + job.hosts * described / inputs.network
    messages = 2 * job.hosts
    return Traffic(
        messages=messages,
        puts=files * job.hosts,
        gets=gets,
        nbytes=job.hosts * described,
        pieces=job.hosts * math.ceil(described / MESSAGE_BYTES),
        seconds=messages * inputs.message_secs + reading + job.hosts * inputs.parse_secs,
    )


class Peers(NamedTuple):
    """What rendezvous hashing gives: the most fragments on one host, relative to the mean."""

    load: float
    most_in_rack: int


def peers(job: Job) -> Peers:
    """Returns how evenly one save's fragments are spread, by the project's own placement."""
    if job.hosts <= job.k + job.m:
        return Peers(1.0, 1)
    nodes = [f"host-{number}" for number in range(job.hosts)]
    racks = {node: f"rack-{number // job.rack_hosts}" for number, node in enumerate(nodes)}
    counts: collections.Counter[str] = collections.Counter()
    most = 0
    for node in nodes:
        others = [other for other in nodes if other != node]
        chosen = ranked(f"save-0/{node}", others, racks=racks)[: job.k + job.m]
        counts.update(chosen)
        most = max(most, *collections.Counter(racks[one] for one in chosen).values())
    return Peers(max(counts.values()) * job.hosts / sum(counts.values()), most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to checkpoint the job.

    Attributes:
      name: shown in the table.
      policy: decides between bases and deltas; None for full saves only.
      where: of saves: a local disk and fragments on peers, or the store.
      share: bytes of a delta's rows, of raw ones.
      base_share: the same for bases.
      fixed_stall_secs: stall of each save instead of those of deltackpt; None for those.
      full_stall_per_gb: stall of a full save, by its bytes.
      wal_share: bytes of a WAL record's rows, of raw ones; None without a WAL.
      standby: whether survivors keep their share in memory.
      base_every, delta_every, wal_every: steps between them; None for never.
    """

    name: str
    policy: BaseOrDelta | None
    where: Literal["peers", "store"]
    share: float = 1.0
    base_share: float = 1.0
    fixed_stall_secs: float | None = None
    full_stall_per_gb: float = 0.0
    wal_share: float | None = None
    standby: bool = False
    base_every: int | None = None
    delta_every: int | None = None
    wal_every: int | None = None

    @property
    def save_every(self) -> int:
        """Returns the steps between saves; 1 if one begins as soon as the last is durable."""
        return self.delta_every or self.base_every or 1

    def stall(self, inputs: Inputs, kind: Kind, nbytes: float) -> float:
        """Returns the training time that a save or record of a host's bytes costs."""
        if self.fixed_stall_secs is not None:
            return self.fixed_stall_secs
        if kind == "base":
            return inputs.delta_stall_secs + self.full_stall_per_gb * nbytes / GB
        fixed = inputs.delta_stall_secs if kind == "delta" else 0.0
        return fixed + inputs.delta_stall_per_gb * nbytes / GB

    def write(self, job: Job, inputs: Inputs, kind: Kind, nbytes: float, load: float) -> float:
        """Returns the seconds until a host's bytes are written, on a host of median speed."""
        if kind == "wal":
            return inputs.record_secs + nbytes / inputs.network
        if self.where == "store":
            puts = coordination(job, inputs, kind, nbytes, readers=1).puts
            return inputs.store_secs + max(nbytes / inputs.store, puts / inputs.puts_per_sec)
        sent = nbytes * (job.k + job.m) / job.k
        return max(nbytes / inputs.disk_write, load * sent / inputs.network)

    def restore(self, job: Job, inputs: Inputs, nbytes: float, tail_bytes: float) -> float:
        """Returns the seconds of a restore after one host was lost.

        Args:
          job: the job.
          inputs: costs of operations.
          nbytes: bytes of a host's share of the base and its deltas.
          tail_bytes: bytes of a host's WAL records since.
        """
        if self.where == "store":
            held = inputs.store_secs + nbytes / inputs.store
        else:
            lost = nbytes / inputs.network  # The peers have the fragments in memory.
            if self.standby:
                kept = nbytes * inputs.standby_secs_per_gb / GB
                held = max(kept, lost + nbytes / inputs.memory_read)
            else:
                held = max(nbytes / inputs.disk_read, lost)
        tails = 0.0
        if self.wal_every is not None:
            # Each process looks for the end of every process's records, several at a time.
            tails = job.hosts * inputs.store_secs / inputs.readers
            tails += tail_bytes / inputs.network + tail_bytes / inputs.memory_read
        # Process 0 reads the manifests of the target, for all.
        return held + tails + job.hosts * inputs.store_secs / inputs.readers


def advised(way: Way, job: Job, inputs: Inputs, load: float) -> Way:
    """Returns a way with the intervals of ``advise_regime``, for the costs at these intervals."""
    found = dataclasses.replace(way, base_every=1200, delta_every=30)
    if way.wal_share is not None:
        found = dataclasses.replace(found, wal_every=4)
    for _ in range(8):
        costs = {kind: _cost(found, job, inputs, kind, load) for kind in _kinds(found)}
        regime = advise_regime(
            base=costs["base"],
            delta=costs.get("delta"),
            wal=costs.get("wal"),
            mtbr_secs=job.failure_secs + job.restart_secs,
            step_secs=job.step_secs,
            max_overhead=0.05,
        ).regime
        found = dataclasses.replace(
            found,
            **{
                f"{kind}_every": None if (one := getattr(regime, kind)) is None else one.every_steps
                for kind in ("base", "delta", "wal")
            },
        )
    return found


def _kinds(way: Way) -> list[Kind]:
    kinds: list[Kind] = ["base", "delta"]
    return [*kinds, "wal"] if way.wal_share is not None else kinds


def _cost(way: Way, job: Job, inputs: Inputs, kind: Kind, load: float) -> Cost:
    """Returns the cost of one save or record at the intervals of a way."""
    if kind == "base":
        nbytes = job.base_bytes * way.base_share
    elif kind == "delta":
        nbytes = job.delta_bytes(way.delta_every or way.base_every or 1, way.share)
    else:
        nbytes = job.delta_bytes(way.wal_every or 1, way.wal_share or 1.0)
    persist = way.write(job, inputs, kind, nbytes, load)
    if kind != "wal":
        slowest = math.exp(inputs.spread * math.sqrt(2 * math.log(max(2, job.hosts))))
        commit = coordination(job, inputs, kind, nbytes, readers=inputs.readers).seconds
        persist = persist * slowest + commit
    base_bytes = job.base_bytes * way.base_share
    restore = way.restore(job, inputs, base_bytes, 0)
    if kind != "base":
        saved, tail = (nbytes, 0.0) if kind == "delta" else (0.0, nbytes)
        restore = way.restore(job, inputs, base_bytes + saved, tail) - restore
    return Cost(
        stall_secs=way.stall(inputs, kind, nbytes), persist_secs=persist, restore_secs=restore
    )


# --- The simulation ------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """What a simulated run did; times in seconds, bytes over all hosts.

    Attributes:
      useful_secs, rework_secs, stall_secs, recovery_secs: they add up to the simulated time.
        Rework is training after the point from which a failure resumed.
      saves: number of durable ones by kind.
      written: durable bytes by kind.
      wasted: bytes of saves that a failure interrupted.
      begun: bytes of all saves that were begun.
      pending: bytes of a save in flight at the end.
      puts: requests of payloads.
      recoveries: seconds of each finished recovery, without the restart.
      lost_secs: training that each failure lost.
      most_read: the most bytes of a host that a restore would have read.
    """

    useful_secs: float = 0.0
    rework_secs: float = 0.0
    stall_secs: float = 0.0
    recovery_secs: float = 0.0
    saves: collections.Counter[Kind] = dataclasses.field(default_factory=collections.Counter)
    written: dict[Kind, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    wasted: float = 0.0
    begun: float = 0.0
    pending: float = 0.0
    puts: int = 0
    recoveries: list[float] = dataclasses.field(default_factory=list)
    lost_secs: list[float] = dataclasses.field(default_factory=list)
    most_read: float = 0.0

    @property
    def total_secs(self) -> float:
        """Returns the simulated time."""
        return self.useful_secs + self.rework_secs + self.stall_secs + self.recovery_secs

    @property
    def effective(self) -> float:
        """Returns the share of the time that was useful training."""
        return self.useful_secs / self.total_secs


class _Saved(NamedTuple):
    """A save or record on its way: its training step, and the bytes of a host."""

    kind: Kind
    step: int
    nbytes: float


@dataclasses.dataclass
class _Chain:
    """Durable saves since the base, in bytes of a host; ``step`` is the newest recovery point."""

    base: float = 0.0
    deltas: tuple[float, ...] = ()
    base_step: int = 0
    save_step: int = 0
    step: int = 0
    read: float = 0.0
    records: tuple[_Saved, ...] = ()

    @property
    def tail(self) -> float:
        """Returns the bytes of the records that are newer than the newest save."""
        return sum(record.nbytes for record in self.records)

    def add(self, saved: _Saved, *, replaces: bool) -> None:
        """Appends what is durable now; ``replaces`` if a delta holds all rows since the base."""
        self.step = max(self.step, saved.step)
        if saved.kind == "wal":
            self.records = (*self.records, saved)
            return
        self.save_step = saved.step
        self.records = tuple(record for record in self.records if record.step > saved.step)
        if saved.kind == "base":
            self.base, self.deltas, self.base_step = saved.nbytes, (), saved.step
            self.read = saved.nbytes
        else:
            self.read = (self.base if replaces else self.read) + saved.nbytes
            self.deltas = (*self.deltas, saved.nbytes)

    def history(self, *, replaces: bool) -> SaveHistory:
        """Returns what a policy decides from."""
        length = min(1, len(self.deltas)) if replaces else len(self.deltas)
        return SaveHistory(
            base_bytes=round(self.base),
            delta_bytes=tuple(map(round, self.deltas)),
            chain_length=length,
            chain_bytes=round(self.read),
        )


class Simulation:
    """One run of a job: events in the order of their times."""

    def __init__(
        self,
        job: Job,
        way: Way,
        inputs: Inputs,
        *,
        failures: Iterable[float],
        load: float,
        seed: int,
    ):
        """Starts with a durable base.

        Args:
          job: the job.
          way: how it is checkpointed.
          inputs: costs of operations.
          failures: times of failures in seconds, ascending.
          load: most fragments of a host, relative to the mean.
          seed: of the speeds of hosts.
        """
        self._job, self._way, self._inputs, self._load = job, way, inputs, load
        self._failures = iter(failures)
        self._rng = np.random.default_rng(seed)
        self._events: list[tuple[float, int, str, int, _Saved | None]] = []
        self._order = itertools.count()
        self._life = 0  # Events of an earlier life of the job are void.
        self._chain = _Chain(
            base=job.base_bytes * way.base_share, read=job.base_bytes * way.base_share
        )
        self._replaces = isinstance(way.policy, Intermittent)
        self._done = 0  # Steps at the time `_since`, from which training continues.
        self._since = 0.0
        self._stall_from = 0.0
        self._flying: _Saved | None = None
        self._records: list[_Saved] = []
        self._recovering_from: float | None = None
        self.outcome = Outcome()

    def run(self, seconds: float) -> Outcome:
        """Simulates until a time, and returns what happened."""
        self._fail_next()
        self._plan_save()
        while self._events and self._events[0][0] < seconds:
            now, _, what, life, saved = heapq.heappop(self._events)
            if what == "failure":
                self._failed(now)
                self._fail_next()
            elif life == self._life:
                if what == "save":
                    self._save(now)
                elif what == "durable":
                    assert saved is not None
                    self._durable(saved)
                else:
                    self._recovered(now)
        self._stop(seconds)
        if self._recovering_from is None:
            self.outcome.useful_secs = self._steps_at(seconds) * self._job.step_secs
        else:
            self.outcome.useful_secs = self._chain.step * self._job.step_secs
        flying = [self._flying] if self._flying is not None else []
        self.outcome.pending = sum(map(self._all_bytes, [*flying, *self._records]))
        return self.outcome

    def _at(self, when: float, what: str, saved: _Saved | None = None) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, self._life, saved))

    def _fail_next(self) -> None:
        when = next(self._failures, None)
        if when is not None:
            self._at(when, "failure")

    def _all_bytes(self, saved: _Saved) -> float:
        return saved.nbytes * self._job.hosts

    def _steps_at(self, now: float) -> float:
        return self._done + max(0.0, now - self._since) / self._job.step_secs

    def _plan_save(self) -> None:
        every = self._way.wal_every or self._way.save_every
        step = (self._done // every + 1) * every
        self._at(self._since + (step - self._done) * self._job.step_secs, "save")

    def _save(self, now: float) -> None:
        """Begins the save or record that is due, unless a save is still in flight."""
        steps = round(self._steps_at(now))
        self._done, self._since = steps, now
        is_save = steps % self._way.save_every == 0
        saved = None
        if is_save and self._flying is None:
            saved = self._flying = self._next_save(steps)
        elif self._way.wal_every is not None:
            newest = self._records[-1].step if self._records else self._chain.step
            share = self._way.wal_share or 1.0
            saved = _Saved("wal", steps, self._job.delta_bytes(steps - newest, share))
            self._records.append(saved)
        if saved is not None:
            self.outcome.begun += self._all_bytes(saved)
            stall = self._way.stall(self._inputs, saved.kind, saved.nbytes)
            self._stall_from, self._since = now, now + stall
            self.outcome.stall_secs += stall
            self._at(now + max(stall, self._persist_secs(saved)), "durable", saved)
        self._plan_save()

    def _next_save(self, step: int) -> _Saved:
        """Decides between a base and a delta, by the intervals and the policy."""
        job, way = self._job, self._way
        base = _Saved("base", step, job.base_bytes * way.base_share)
        if way.policy is None:
            return base
        due = way.base_every is not None and step - self._chain.base_step >= way.base_every
        decided = way.policy.decide(self._chain.history(replaces=self._replaces))
        parent = self._chain.base_step if self._replaces else self._chain.save_step
        delta = _Saved("delta", step, job.delta_bytes(step - parent, way.share))
        large = too_large(way.policy, round(delta.nbytes), round(base.nbytes))
        return base if due or decided.kind == "base" or large is not None else delta

    def _persist_secs(self, saved: _Saved) -> float:
        """Returns how long the slowest host and the commit of all take."""
        job, inputs = self._job, self._inputs
        median = self._way.write(job, inputs, saved.kind, saved.nbytes, self._load)
        if saved.kind == "wal":
            return median
        speeds = self._rng.lognormal(0.0, inputs.spread, job.hosts) if inputs.spread else 1.0
        commit = coordination(job, inputs, saved.kind, saved.nbytes, readers=inputs.readers)
        return float(median * np.max(speeds)) + commit.seconds

    def _durable(self, saved: _Saved) -> None:
        outcome = self.outcome
        outcome.saves[saved.kind] += 1
        outcome.written[saved.kind] += self._all_bytes(saved)
        if saved.kind == "wal":
            self._records.remove(saved)
        else:
            self._flying = None
            traffic = coordination(
                self._job, self._inputs, saved.kind, saved.nbytes, readers=self._inputs.readers
            )
            outcome.puts += traffic.puts
        self._chain.add(saved, replaces=self._replaces)
        outcome.most_read = max(outcome.most_read, self._chain.read)

    def _stop(self, now: float) -> None:
        """Accounts for what a failure, or the end, interrupts: a stall or a recovery."""
        if self._recovering_from is not None:
            self.outcome.recovery_secs += now - self._recovering_from
        elif now < self._since:
            self.outcome.stall_secs -= self._since - now

    def _failed(self, now: float) -> None:
        self._stop(now)
        outcome = self.outcome
        if self._recovering_from is None:
            lost = (self._steps_at(now) - self._chain.step) * self._job.step_secs
            outcome.rework_secs += lost
            outcome.lost_secs.append(lost)
        flying = [self._flying] if self._flying is not None else []
        outcome.wasted += sum(map(self._all_bytes, [*flying, *self._records]))
        self._flying, self._records, self._recovering_from = None, [], now
        self._life += 1
        restore = self._way.restore(self._job, self._inputs, self._chain.read, self._chain.tail)
        self._at(now + self._job.restart_secs + restore, "recovered")

    def _recovered(self, now: float) -> None:
        assert self._recovering_from is not None
        spent = now - self._recovering_from
        self.outcome.recovery_secs += spent
        self.outcome.recoveries.append(spent - self._job.restart_secs)
        self._recovering_from, self._done, self._since = None, self._chain.step, now
        self._plan_save()


def poisson(mean_secs: float, seed: int) -> Iterator[float]:
    """Yields times of failures with exponential gaps, without end."""
    rng, now = np.random.default_rng(seed), 0.0
    while True:
        now += float(rng.exponential(mean_secs))
        yield now


# --- The ways that are compared ------------------------------------------------------------------


def ways(job: Job, inputs: Inputs, load: float) -> list[Way]:
    """Returns the ways, with their intervals for the job."""
    ours = Way(
        name="deltackpt, deltas on peers",
        policy=Consecutive(),
        where="peers",
        full_stall_per_gb=inputs.base_stall_per_gb,
    )
    stored = dataclasses.replace(ours, name="deltackpt, deltas in the store", where="store")
    coded = dataclasses.replace(
        stored,
        name="deltackpt, int4 in the store",
        share=inputs.int4_share,
        base_share=inputs.int4_share,
    )
    warm = dataclasses.replace(ours, name=CLAIMED, standby=True)
    wal = dataclasses.replace(warm, name=WITH_WAL, wal_share=inputs.int8_share)
    orbax = Way(
        name="Orbax, continuous",
        policy=None,
        where="store",
        full_stall_per_gb=inputs.orbax_stall_per_gb,
    )
    cnr = Way(
        name="Check-N-Run, every 30 min",
        policy=Intermittent(),
        where="store",
        share=inputs.int4_share,
        base_share=inputs.int4_share,
        fixed_stall_secs=inputs.cnr_stall_secs,
        delta_every=round(1800 / job.step_secs),
    )
    often = advise_interval(
        stall_secs=inputs.cnr_stall_secs,
        persist_secs=_cost(cnr, job, inputs, "base", load).persist_secs,
        mtbr_secs=job.failure_secs + job.restart_secs,
        max_overhead=0.2,
    )
    return [
        *(advised(one, job, inputs, load) for one in (stored, coded, ours, warm, wal)),
        orbax,
        cnr,
        dataclasses.replace(
            cnr,
            name="Check-N-Run, Daly's interval",
            delta_every=max(1, round(often.interval_secs / job.step_secs)),
        ),
    ]


def simulated(job: Job, way: Way, inputs: Inputs, hours: float, seed: int, load: float) -> Outcome:
    """Simulates one run; every way sees the same failures for the same seed."""
    failures = poisson(job.failure_secs, seed)
    run = Simulation(job, way, inputs, failures=failures, load=load, seed=seed)
    return run.run(hours * 3600)


def main() -> None:
    """Simulates all ways and prints one table."""
    parser = arguments(__doc__)
    parser.add_argument("--hosts", type=int, default=Job.hosts)
    parser.add_argument("--hours", type=float, default=24.0, help="simulated time of each run")
    parser.add_argument("--failure-secs", type=float, default=Job.failure_secs)
    parser.add_argument("--store-gb", type=float, default=Inputs.store / GB, help="GB/s of a host")
    parser.add_argument("--readers", type=int, default=Inputs.readers, help="reads of process 0")
    options = parser.parse_args()
    inputs = Inputs(store=options.store_gb * GB, readers=options.readers)
    job = Job(hosts=options.hosts, failure_secs=options.failure_secs)
    placed = peers(job)
    report = Report(
        "Web scale in simulation",
        sizes=f"{job.hosts} hosts, {job.base_bytes * job.hosts / 1e12:.2f} TB, a failure every "
        f"{job.failure_secs:g} s; {options.repeats} simulated runs of {options.hours:g} h each; "
        f"{inputs.store / GB:g} GB/s from each host to the store",
    )
    _show_ways(report, options, job, inputs, placed)
    _show_protocol(report, job, inputs)
    report.show(options)


def _show_ways(
    report: Report, options: argparse.Namespace, job: Job, inputs: Inputs, placed: Peers
) -> None:
    """Adds the figures of every way, without a restart in detail, then with restarts."""
    runs: dict[str, list[Outcome]] = {}
    rows: list[tuple[float, list[str], list[str]]] = []

    def simulate(name: str, job: Job) -> list[Outcome]:
        [way] = [one for one in ways(job, inputs, placed.load) if one.name == name]
        seeds = range(options.repeats)
        return [simulated(job, way, inputs, options.hours, s, placed.load) for s in seeds]

    def lost(found: list[Outcome]) -> Sample:
        return Sample(tuple(1 - one.effective for one in found))

    for way in ways(job, inputs, placed.load):
        found = runs[way.name] = simulate(way.name, job)

        def each(value: Callable[[Outcome], float], found: list[Outcome] = found) -> Sample:
            return Sample(tuple(map(value, found)))

        bar = 1 - CLAIM if way.name in (CLAIMED, WITH_WAL) else None
        report.state(f"{way.name}: time lost", lost(found), percent, bar=bar)
        parts = [
            each(lambda one, part=part: getattr(one, f"{part}_secs") / one.total_secs)
            for part in ("stall", "rework", "recovery")
        ]
        parts += [
            lost(simulate(way.name, dataclasses.replace(job, restart_secs=restart)))
            for restart in RESTARTS
        ]
        every = [f"{kind} {steps}" for kind in KINDS if (steps := getattr(way, f"{kind}_every"))]
        recovery = each(lambda one: float(np.mean(one.recoveries or [0])))
        speed = each(lambda one: sum(one.written.values()) / one.total_secs / job.hosts)
        puts = each(lambda one: one.puts / one.total_secs)
        other = []
        if way.wal_every is not None:
            brokers = each(lambda one: one.written["wal"] / one.total_secs / inputs.broker)
            other.append(f"{math.ceil(brokers.median)} Kafka brokers")
        if way.where == "peers":
            fragments = placed.load * (job.k + job.m) / job.k
            memory = each(lambda one, by=fragments: by * one.most_read)
            other.append(f"{memory.median / 1e9:.0f} GB on the fullest peer")
        shares = [f"{one.median:.1%}" for one in (lost(found), *parts)]
        costs = [f"{recovery.median:.1f} s", megabytes(speed.median), f"{puts.median:,.0f}"]
        rows.append(
            (
                lost(found).median,
                [way.name, ", ".join(every) or "as short as possible", *shares],
                [way.name, *costs, "; ".join(other)],
            )
        )
    for name in ("Orbax, continuous", "Check-N-Run, every 30 min", "Check-N-Run, Daly's interval"):
        title = f"time lost: {CLAIMED}"
        report.compare(title, lost(runs[CLAIMED]), name, lost(runs[name]), percent, bar=1.0)
    report.note(
        f"peers: the host with most fragments has {placed.load:.2f} times the mean; at most "
        f"{placed.most_in_rack} fragments of a save are in one rack"
    )
    rows.sort()
    restarts = [f"restart {restart} s" for restart in RESTARTS]
    first, second = "lost, restart 0 s", ("stalls", "rework", "recoveries")
    report.publish(
        "lost",
        ["method", "steps between saves", first, *second, *restarts],
        [row for _, row, _ in rows],
    )
    columns = ("method", "a recovery", "written per second and host", "PUTs per second", "other")
    report.publish("costs", columns, [row for _, _, row in rows])


def _show_protocol(report: Report, job: Job, inputs: Inputs) -> None:
    """Adds what the commit of one save costs beside its payload."""
    rows: dict[str, list[str]] = collections.defaultdict(list)
    saves: tuple[tuple[Kind, float], ...] = (
        ("base", job.base_bytes),
        ("delta", job.delta_bytes(30)),
    )
    for kind, nbytes in saves:
        cost = coordination(job, inputs, kind, nbytes, readers=inputs.readers)
        figures = {
            "PUTs": f"{cost.puts:,}",
            "messages to and from process 0": f"{cost.messages:,}",
            "manifests and digests, which process 0 reads from storage": megabytes(cost.nbytes),
            "messages of 64 KiB, if they were sent to process 0": f"{cost.pieces:,}",
        }
        for readers in (1, 8, 32):
            took = coordination(job, inputs, kind, nbytes, readers=readers).seconds
            figures[f"commit, {readers} of the {cost.gets:,} files at once"] = secs(took)
        for what, value in figures.items():
            rows[what].append(value)
    report.publish(
        "commit", ("", "a base", "a delta"), [[what, *row] for what, row in rows.items()]
    )


if __name__ == "__main__":
    main()
