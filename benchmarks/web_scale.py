# SPDX-License-Identifier: Apache-2.0
"""Web scale in simulation: 1,000 hosts, 10 TB of tables, a failure every 10 minutes.

Discrete events (saves, durable saves, failures, recoveries) on a simulated clock. Intervals come
from ``advise_regime`` and ``advise_interval``, bases and deltas from the policies, peers from
rendezvous hashing: the project's own functions. The costs are inputs: see ``Inputs`` and ``Job``.
Nothing is written, and no network is used.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import report as reports
from report import Report, Sample, megabytes, percent, secs

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
ORBAX = "Orbax, continuous"
CNR, CNR_DALY = "Check-N-Run, every 30 min", "Check-N-Run, Daly's interval"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Costs of operations; measured figures are in docs/project/benchmarks.md."""

    # Measured: 11 ms for 4,000 rows; 27 ms of training for 52 MB on a GPU.
    delta_stall_secs: float = 0.011
    delta_stall_per_gb: float = 0.31
    # Measured on a GPU: 75.4 ms of training for 1.04 GB, and 38.7 ms by Orbax.
    base_stall_per_gb: float = 0.0725
    orbax_stall_per_gb: float = 0.0372
    cnr_stall_secs: float = 7.0  # Snapshot stall that Check-N-Run reports (NSDI 2022).
    # Measured bytes per second: writes with fsync, and a cold restore (1.56 GB in 1.8 s).
    disk_write: float = 1.0 * GB
    disk_read: float = 0.87 * GB
    memory_read: float = 2.6 * GB  # The same restore from the page cache: 601 ms.
    standby_secs_per_gb: float = 0.106  # Measured: a hot standby returns 1.04 GB in 0.11 s.
    # Bytes of a stored row (64 float32 values, one slot) as a fraction of a raw row.
    int4_share: float = 0.16
    int8_share: float = 74 / 260
    # All below but `parse_secs` is assumed. Bytes per second between hosts (25 Gbit/s), and of
    # each host to and from the store while all hosts use it.
    network: float = 3.1 * GB
    store: float = 0.2 * GB
    store_secs: float = 0.03  # Latency of a request to the store.
    puts_per_sec: float = 50_000  # Total that the store accepts.
    readers: int = READS  # Files that process 0 reads at the same time, as in this version.
    message_secs: float = 100e-6  # Latency of the coordination service for up to 64 KiB.
    parse_secs: float = 0.7e-3  # Measured: decoding a manifest with 800 tables, warm.
    broker: float = 0.2 * GB  # Bytes per second into a Kafka broker as leader of two replicas.
    record_secs: float = 0.05  # Time until a broker acknowledges a WAL record.
    spread: float = 0.2  # Standard deviation of the logarithm of a host's time for a save.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A training job: every host has the same share of the rows and of the dense leaves."""

    hosts: int = 1000  # With one process each.
    rows: float = 38e6  # Per host.
    row_bytes: float = 260  # With slots.
    dense_bytes: float = 10e6  # Per host.
    tables: int = 800
    step_secs: float = 1.0
    # k steps touch `step_rows * k ** growth` distinct rows of each host. From published curves:
    # 0.12 % of the rows after 2,560 samples, 3 % after 192,000.
    step_rows: float = 79e3
    growth: float = 0.745
    failure_secs: float = 600  # Mean time between failures of the job, each of one host.
    restart_secs: float = 0  # Time until all processes, one of them on a new host, can restore.
    k: int = 4  # Erasure code of the peers: k + m fragments.
    m: int = 2
    rack_hosts: int = 20

    @property
    def base_bytes(self) -> float:
        return self.rows * self.row_bytes + self.dense_bytes

    def delta_bytes(self, steps: float, share: float = 1.0) -> float:
        """Returns the bytes that a host changes in some steps; ``share`` scales the raw rows."""
        rows = min(self.rows, self.step_rows * steps**self.growth)
        return rows * self.row_bytes * share + self.dense_bytes


# --- What a save and a restore cost --------------------------------------------------------------


class Traffic(NamedTuple):
    """Coordination cost of one save, over all processes."""

    messages: int  # Through the coordination service.
    puts: int  # Files of payload, manifests and digests.
    gets: int  # By process 0.
    nbytes: float  # Manifests and digests.
    pieces: int  # Messages needed to send these bytes instead.
    seconds: float  # From the last file of the slowest process until the commit.


def coordination(job: Job, inputs: Inputs, kind: Kind, nbytes: float, *, readers: int) -> Traffic:
    """Returns what the commit of a save of ``nbytes`` per host costs beside its payload.

    Each process sends one message and gets one answer. Process 0 reads the manifests and digests of
    all processes from storage, ``readers`` at a time. Sizes are those of docs/project/design.md.
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
    """One way to checkpoint the job."""

    name: str
    policy: BaseOrDelta | None  # Decides between bases and deltas; None for full saves only.
    where: Literal["peers", "store"]  # A local disk and fragments on peers, or the store.
    share: float = 1.0  # Bytes of the rows of a delta, of raw ones.
    base_share: float = 1.0
    fixed_stall_secs: float | None = None  # Of each save, instead of deltackpt's stalls.
    full_stall_per_gb: float = 0.0
    wal_share: float | None = None  # Bytes of a WAL record's rows; None without a WAL.
    standby: bool = False  # Survivors keep their share in memory.
    base_every: int | None = None  # Steps between them; None for never.
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

        ``nbytes`` are a host's share of the base and its deltas, ``tail_bytes`` its later records.
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

    Useful time, rework (training after the point from which a failure resumed), stalls and
    recoveries add up to the simulated time.
    """

    useful_secs: float = 0.0
    rework_secs: float = 0.0
    stall_secs: float = 0.0
    recovery_secs: float = 0.0
    # Durable saves and their bytes.
    saves: collections.Counter[Kind] = dataclasses.field(default_factory=collections.Counter)
    written: dict[Kind, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    wasted: float = 0.0  # Bytes of saves that a failure interrupted.
    begun: float = 0.0  # Bytes of all saves that were begun.
    pending: float = 0.0  # Bytes of a save in flight at the end.
    puts: int = 0
    recoveries: list[float] = dataclasses.field(default_factory=list)  # Without the restarts.
    lost_secs: list[float] = dataclasses.field(default_factory=list)  # Training lost by failures.
    most_read: float = 0.0  # The most bytes of a host that a restore would have read.

    @property
    def total_secs(self) -> float:
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
        """Starts with a durable base; ``failures`` are ascending, ``seed`` is of hosts' speeds."""
        self._job, self._way, self._inputs, self._load = job, way, inputs, load
        self._failures = iter(failures)
        self._rng = np.random.default_rng(seed)
        self._events: list[tuple[float, int, str, int, _Saved | None]] = []
        self._order = itertools.count()
        self._life = 0  # Events of an earlier life of the job are void.
        base_bytes = job.base_bytes * way.base_share
        self._chain = _Chain(base=base_bytes, read=base_bytes)
        self._replaces = isinstance(way.policy, Intermittent)
        self._done = 0  # Steps at the time `_since`, from which training continues.
        self._since = 0.0
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
        self.outcome.pending = self._unfinished_bytes()
        return self.outcome

    def _at(self, when: float, what: str, saved: _Saved | None = None) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, self._life, saved))

    def _fail_next(self) -> None:
        when = next(self._failures, None)
        if when is not None:
            self._at(when, "failure")

    def _all_bytes(self, saved: _Saved) -> float:
        return saved.nbytes * self._job.hosts

    def _unfinished_bytes(self) -> float:
        flying = [self._flying] if self._flying is not None else []
        return sum(map(self._all_bytes, [*flying, *self._records]))

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
            self._since = now + stall
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
        return float(median * np.max(speeds)) + self._commit(saved).seconds

    def _commit(self, saved: _Saved) -> Traffic:
        job, inputs = self._job, self._inputs
        return coordination(job, inputs, saved.kind, saved.nbytes, readers=inputs.readers)

    def _durable(self, saved: _Saved) -> None:
        outcome = self.outcome
        outcome.saves[saved.kind] += 1
        outcome.written[saved.kind] += self._all_bytes(saved)
        if saved.kind == "wal":
            self._records.remove(saved)
        else:
            self._flying = None
            outcome.puts += self._commit(saved).puts
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
        outcome.wasted += self._unfinished_bytes()
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


# --- The ways that are compared ------------------------------------------------------------------


def ways(job: Job, inputs: Inputs, load: float) -> list[Way]:
    """Returns the ways, with their intervals for the job."""
    ours = Way(
        name="deltackpt, deltas on peers",
        policy=Consecutive(),
        where="peers",
        full_stall_per_gb=inputs.base_stall_per_gb,
    )
    replace, int4 = dataclasses.replace, inputs.int4_share
    stored = replace(ours, name="deltackpt, deltas in the store", where="store")
    coded = replace(stored, name="deltackpt, int4 in the store", share=int4, base_share=int4)
    warm = replace(ours, name=CLAIMED, standby=True)
    wal = replace(warm, name=WITH_WAL, wal_share=inputs.int8_share)
    orbax = Way(name=ORBAX, policy=None, where="store", full_stall_per_gb=inputs.orbax_stall_per_gb)
    cnr = Way(
        name=CNR,
        policy=Intermittent(),
        where="store",
        fixed_stall_secs=inputs.cnr_stall_secs,
        delta_every=round(1800 / job.step_secs),
        share=int4,
        base_share=int4,
    )
    often = advise_interval(
        stall_secs=inputs.cnr_stall_secs,
        persist_secs=_cost(cnr, job, inputs, "base", load).persist_secs,
        mtbr_secs=job.failure_secs + job.restart_secs,
        max_overhead=0.2,
    )
    daly = replace(
        cnr, name=CNR_DALY, delta_every=max(1, round(often.interval_secs / job.step_secs))
    )
    chosen = (advised(one, job, inputs, load) for one in (stored, coded, ours, warm, wal))
    return [*chosen, orbax, cnr, daly]


def simulated(job: Job, way: Way, inputs: Inputs, hours: float, seed: int, load: float) -> Outcome:
    """Simulates one run; every way sees the same failures for the same seed."""

    def failures() -> Iterator[float]:
        rng, now = np.random.default_rng(seed), 0.0
        while True:
            now += float(rng.exponential(job.failure_secs))
            yield now

    run = Simulation(job, way, inputs, failures=failures(), load=load, seed=seed)
    return run.run(hours * 3600)


def web_scale(report: Report, options: argparse.Namespace, _: Path) -> None:
    inputs = Inputs(store=options.store_gb * GB, readers=options.readers)
    job = Job(hosts=options.hosts, failure_secs=options.failure_secs)
    report.sizes = (
        f"{job.hosts} hosts, {job.base_bytes * job.hosts / 1e12:.2f} TB, a failure every "
        f"{job.failure_secs:g} s; {options.repeats} simulated runs of {options.hours:g} h each; "
        f"{inputs.store / GB:g} GB/s from each host to the store"
    )
    _show_ways(report, options, job, inputs, peers(job))
    _show_protocol(report, job, inputs)


def _show_ways(
    report: Report, options: argparse.Namespace, job: Job, inputs: Inputs, placed: Peers
) -> None:
    """Adds the figures of every way, without a restart in detail, then with restarts."""

    def simulate(name: str, job: Job) -> list[Outcome]:
        [way] = [one for one in ways(job, inputs, placed.load) if one.name == name]
        seeds = range(options.repeats)
        return [simulated(job, way, inputs, options.hours, s, placed.load) for s in seeds]

    def each(found: list[Outcome], value: Callable[[Outcome], float]) -> Sample:
        return Sample(tuple(map(value, found)))

    def lost(found: list[Outcome]) -> Sample:
        return each(found, lambda one: 1 - one.effective)

    figures: dict[str, Callable[[Outcome], float]] = {
        "stalls": lambda one: one.stall_secs / one.total_secs,
        "rework": lambda one: one.rework_secs / one.total_secs,
        "recoveries": lambda one: one.recovery_secs / one.total_secs,
        "recovery": lambda one: float(np.mean(one.recoveries or [0])),
        "speed": lambda one: sum(one.written.values()) / one.total_secs / job.hosts,
        "puts": lambda one: one.puts / one.total_secs,
        "brokers": lambda one: one.written["wal"] / one.total_secs / inputs.broker,
        "memory": lambda one: placed.load * (job.k + job.m) / job.k * one.most_read / 1e9,
    }
    losses: dict[str, Sample] = {}
    rows: list[tuple[float, list[str], list[str]]] = []
    for way in ways(job, inputs, placed.load):
        found = simulate(way.name, job)
        losses[way.name] = lost(found)
        bar = 1 - CLAIM if way.name in (CLAIMED, WITH_WAL) else None
        report.state(f"{way.name}: time lost", losses[way.name], percent, bar=bar)
        middle = {name: each(found, figure).median for name, figure in figures.items()}
        restarted = [
            lost(simulate(way.name, dataclasses.replace(job, restart_secs=restart))).median
            for restart in RESTARTS
        ]
        sections = [losses[way.name].median, *list(middle.values())[:3], *restarted]
        every = [f"{kind} {steps}" for kind in KINDS if (steps := getattr(way, f"{kind}_every"))]
        other = [f"{math.ceil(middle['brokers'])} Kafka brokers"] if way.wal_every else []
        other += [f"{middle['memory']:.0f} GB on the fullest peer"] if way.where == "peers" else []
        costs = [
            f"{middle['recovery']:.1f} s",
            megabytes(middle["speed"]),
            f"{middle['puts']:,.0f}",
        ]
        shares = [
            ", ".join(every) or "as short as possible",
            *(f"{section:.1%}" for section in sections),
        ]
        rows.append((sections[0], [way.name, *shares], [way.name, *costs, "; ".join(other)]))
    for name in (ORBAX, CNR, CNR_DALY):
        mine, theirs = losses[CLAIMED], losses[name]
        report.compare(f"time lost: {CLAIMED}", mine, name, theirs, percent, bar=1.0)
    report.note(
        f"peers: the host with most fragments has {placed.load:.2f} times the mean; at most "
        f"{placed.most_in_rack} fragments of a save are in one rack"
    )
    rows.sort()
    restarts = [f"restart {restart} s" for restart in RESTARTS]
    columns = [
        "method",
        "steps between saves",
        "lost, restart 0 s",
        "stalls",
        "rework",
        "recoveries",
    ]
    report.publish("lost", [*columns, *restarts], [row for _, row, _ in rows])
    columns = ["method", "a recovery", "written per second and host", "PUTs per second", "other"]
    report.publish("costs", columns, [row for _, _, row in rows])


def _show_protocol(report: Report, job: Job, inputs: Inputs) -> None:
    """Adds what the commit of one save costs beside its payload."""
    rows: dict[str, list[str]] = collections.defaultdict(list)
    saves: dict[Kind, float] = {"base": job.base_bytes, "delta": job.delta_bytes(30)}
    for kind, nbytes in saves.items():
        cost = coordination(job, inputs, kind, nbytes, readers=inputs.readers)
        figures = {
            "PUTs": f"{cost.puts:,}",
            "messages to and from process 0": f"{cost.messages:,}",
            "manifests and digests, which process 0 reads from storage": megabytes(cost.nbytes),
            "messages of 64 KiB, if they were sent to process 0": f"{cost.pieces:,}",
            "files that process 0 reads": f"{cost.gets:,}",
        }
        for readers in (1, 8, 32):
            took = coordination(job, inputs, kind, nbytes, readers=readers).seconds
            figures[f"commit, {readers} of these files at once"] = secs(took)
        for what, value in figures.items():
            rows[what].append(value)
    table = [[what, *row] for what, row in rows.items()]
    report.publish("commit", ("", "a base", "a delta"), table)


if __name__ == "__main__":
    reports.main(
        "Web scale in simulation",
        web_scale,
        hosts=Job.hosts,
        hours=24.0,
        failure_secs=float(Job.failure_secs),
        store_gb=Inputs.store / GB,
        readers=Inputs.readers,
    )
