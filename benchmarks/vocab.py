# SPDX-License-Identifier: Apache-2.0
"""Ids of a vocabulary that changes: lookups per second, and eviction beside published rules.

Speeds are CPU time of one thread, for batches of 200,000 ids, at 90 % of the capacity; half of the
new ids are duplicates. Eviction replays one stream of ids, in which old ones fade and new ones
appear, with the rules of TorchRec's managed collision modules and of dynamicemb, in numpy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import report as reports
from report import Figures, Report, percent

from deltackpt import vocab

BATCH = 200_000
CAPACITIES = (1_000_000, 10_000_000)
#: At most so many nanoseconds of CPU for each id: 5 million ids a second and core.
BAR_NS = 200.0
#: Rows, ids of a batch, and batches of the replayed stream.
ROWS, STREAM_BATCH, STREAM_BATCHES = 20_000, 8192, 300
#: TorchRec's modules evict every so many batches here; a bucket of dynamicemb has so many rows.
INTERVAL, BUCKET = 10, 128
#: Our rules, and those of others that rank ids alike.
LAST_USE, USES = "deltackpt, last use", "deltackpt, uses, then last use"
COMPARED = {
    LAST_USE: ("TorchRec LRU", "dynamicemb STEP"),
    USES: ("TorchRec LFU", "TorchRec DistanceLFU", "dynamicemb LFU"),
}


class Outcome(NamedTuple):
    """What a rule did with a stream."""

    hits: float  # Share of the lookups whose id had a row before its batch.
    own: float  # Share of the lookups that read a row of their id alone.
    evictions: int


def cpu_ns(call: Callable[[np.ndarray], object], ids: np.ndarray) -> float:
    """Nanoseconds of CPU that a call takes for each id."""
    started = time.process_time_ns()
    call(ids)
    return (time.process_time_ns() - started) / len(ids)


def speeds(capacity: int, batch: int, repeats: int) -> Figures:
    """Nanoseconds of CPU for each id of a batch, by what is done."""
    random, found = np.random.default_rng(0), Figures()
    held = random.integers(0, 1 << 62, capacity * 9 // 10)
    column = np.full(capacity, vocab.NO_ID)
    column[: len(held)] = held
    for number in range(repeats):
        if number < 2:
            # It takes long, and depends little on what else the machine does.
            started = time.process_time_ns()
            keys = vocab.RowKeys.index(column)
            found.add("", {"index": (time.process_time_ns() - started) / len(held)})
        uniform = held[random.integers(0, len(held), batch)]
        skewed = held[np.minimum(random.zipf(1.07, batch), len(held)) - 1]
        distinct = random.integers(0, 1 << 62, batch // 2)
        new = np.concatenate([distinct, random.permutation(distinct)])
        for name, call, ids in (
            ("known, uniform", keys.assign, uniform),
            ("known, Zipf", keys.assign, skewed),
            ("new", keys.assign, new),
            ("evict", keys.evict, distinct),
        ):
            found.add("", {name: cpu_ns(call, ids)})
    return found


def stream(batches: int, size: int, rows: int) -> Iterator[np.ndarray]:
    """Yields batches of ids by Zipf's law; each batch, a thousandth of the ranks gets new ids."""
    random, window = np.random.default_rng(1), 8 * rows
    of_rank = random.permutation(window)
    for number in range(batches):
        yield of_rank[(window ** random.random(size)).astype(np.int64) - 1]
        renewed = random.choice(window, max(1, window // 1000), replace=False)
        of_rank[renewed] = window * (number + 1) + np.arange(len(renewed))


def ours(batches: Iterator[np.ndarray], rows: int, *, by_uses: bool) -> Outcome:
    """Evicts as many of the lowest rows as a batch needs, none of its own."""
    keys, last_used, uses = vocab.RowKeys(rows), np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    hits = total = evictions = 0
    for step, ids in enumerate(batches):
        known, distinct = keys.find(ids), np.unique(ids)
        held = keys.find(distinct)
        scores = (uses, last_used) if by_uses else (last_used,)
        missing = int((held < 0).sum()) - keys.free
        evicted = keys.evict(rows=vocab.lowest(keys.column(), missing, *scores, keep=held))
        uses[evicted] = 0
        found, _ = keys.assign(ids)
        last_used[found] = step
        np.add.at(uses, found, 1)
        hits, total = hits + int((known >= 0).sum()), total + len(ids)
        evictions += len(evicted)
    return Outcome(hits / total, 1.0, evictions)


def torchrec(batches: Iterator[np.ndarray], rows: int, rule: str) -> Outcome:
    """``MCHManagedCollisionModule``: candidates of an interval compete with the residents.

    The ids with the highest scores stay: counts, the last batch, or counts over the distance of the
    last batch. All other ids share the last row.
    """
    none = np.iinfo(np.int64).max
    resident = np.full(rows - 1, none)
    counts, last = np.zeros(rows - 1, np.int64), np.zeros(rows - 1, np.int64)
    seen: list[tuple[np.ndarray, int]] = []
    hits = total = evictions = 0
    for step, ids in enumerate(batches):
        hits, total = hits + int(np.isin(ids, resident).sum()), total + len(ids)
        seen.append((ids, step))
        if len(seen) < INTERVAL:
            continue
        every = np.concatenate([one for one, _ in seen])
        when = np.concatenate([np.full(len(one), at) for one, at in seen])
        distinct, places, found = np.unique(every, return_inverse=True, return_counts=True)
        newest = np.zeros(len(distinct), np.int64)
        np.maximum.at(newest, places, when)
        at = np.minimum(np.searchsorted(distinct, resident), len(distinct) - 1)
        match = distinct[at] == resident
        counts[match] += found[at[match]]
        last[match] = newest[at[match]]
        # Ties: residents by id, then new ids by frequency.
        fresh = np.argsort(-found, kind="stable")
        fresh = fresh[~np.isin(distinct[fresh], resident)]
        merged = np.concatenate([resident, distinct[fresh]])
        counts, last = np.append(counts, found[fresh]), np.append(last, newest[fresh])
        score = {"LFU": counts, "LRU": last, "DistanceLFU": counts / (step - last + 1)}[rule]
        stay = np.argsort(-score, kind="stable")[: rows - 1]
        stay = stay[np.argsort(merged[stay])]
        evictions += int((resident != none).sum() - (resident[stay[stay < rows - 1]] != none).sum())
        resident, counts, last, seen = merged[stay], counts[stay], last[stay], []
    return Outcome(hits / total, hits / total, evictions)


def dynamicemb(batches: Iterator[np.ndarray], rows: int, rule: str) -> Outcome:
    """dynamicemb: a new key evicts the key with the lowest score of its bucket."""
    buckets = max(1, rows // BUCKET)
    resident, score = np.empty(0, np.int64), np.empty(0, np.int64)
    hits = own = total = evictions = 0
    for step, ids in enumerate(batches):
        known = np.isin(ids, resident)
        distinct, found = np.unique(ids, return_counts=True)
        at = np.minimum(np.searchsorted(distinct, resident), len(distinct) - 1)
        match = distinct[at] == resident
        score[match] = step if rule == "STEP" else score[match] + found[at[match]]
        fresh = ~np.isin(distinct, resident)
        merged = np.concatenate([resident, distinct[fresh]])
        added = np.full(fresh.sum(), step) if rule == "STEP" else found[fresh]
        score = np.concatenate([score, added])
        bucket = (merged.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)) % buckets
        # Keys of the batch come before all others of their bucket.
        order = np.lexsort((-score, ~np.isin(merged, distinct), bucket))
        first = np.searchsorted(bucket[order], np.arange(buckets))
        place = np.arange(len(order)) - first[bucket[order].astype(np.int64)]
        stay = np.sort(order[place < BUCKET])
        evictions += len(resident) - int((stay < len(resident)).sum())
        resident, score = merged[stay], score[stay]
        hits, total = hits + int(known.sum()), total + len(ids)
        own += int(np.isin(ids, resident).sum())
    return Outcome(hits / total, own / total, evictions)


def nanoseconds(value: float) -> str:
    """Nanoseconds for each id, and millions of ids a second."""
    return f"{value:.0f} ns ({1e3 / value:.1f} M/s)"


def vocabularies(report: Report, options: argparse.Namespace, _: Path) -> None:
    scale = options.scale
    rows, size = max(2000, int(ROWS * scale)), max(500, int(STREAM_BATCH * scale))
    batch = max(1000, int(BATCH * scale))
    report.sizes = f"batches of {batch:,} ids"
    known = ("known, uniform", "known, Zipf")
    table, order = [], (*known, "new", "evict", "index")
    for capacity in (max(10_000, int(capacity * scale)) for capacity in CAPACITIES):
        found = speeds(capacity, batch, options.repeats)
        cells = [f"{1e3 / found('', name).median:.2g}" for name in order]
        table.append([f"{capacity / 1e6:g} million", *cells])
        for name in ("index", *order[:-1]):
            bar = BAR_NS if name in (*known, "new") else None
            what = f"{name}, capacity {capacity:,}"
            report.state(what, found("", name), nanoseconds, bar=bar)
    columns = ("capacity", *known, "new, each twice", "evict", "`index`")
    report.publish("speeds", columns, table)
    report.section()
    batches = max(3 * INTERVAL, int(STREAM_BATCHES * min(1.0, scale)))
    replays: dict[str, Callable[[Iterator[np.ndarray]], Outcome]] = {
        LAST_USE: lambda ids: ours(ids, rows, by_uses=False),
        USES: lambda ids: ours(ids, rows, by_uses=True),
    }
    for rule in ("LRU", "LFU", "DistanceLFU"):
        replays[f"TorchRec {rule}"] = lambda ids, rule=rule: torchrec(ids, rows, rule)
    for rule in ("STEP", "LFU"):
        replays[f"dynamicemb {rule}"] = lambda ids, rule=rule: dynamicemb(ids, rows, rule)
    outcomes = {name: replay(stream(batches, size, rows)) for name, replay in replays.items()}
    misses = Figures()
    for name, outcome in outcomes.items():
        misses.add(name, {"misses": 1 - outcome.hits})
    for name, others in COMPARED.items():
        report.against(f"misses, {name}", misses, "misses", name, others, percent)
    columns = ("rule", "hits", "lookups of a row of their own", "evictions")
    cells = [
        [name, f"{one.hits:.1%}", f"{one.own:.1%}".replace(".0%", "%"), f"{one.evictions:,}"]
        for name, one in outcomes.items()
    ]
    report.publish("eviction", columns, cells)
    report.note(f"stream: {batches} batches of {size:,} ids, {rows:,} rows")


if __name__ == "__main__":
    reports.main("vocabularies: CPU for each id", vocabularies)
