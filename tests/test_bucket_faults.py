# SPDX-License-Identifier: Apache-2.0
"""Real servers behind a faulty network: results are correct, and a journal loses nothing."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import urllib.request
from collections.abc import Callable, Iterable, Iterator

import proxy
import pytest
import servers
from faulty_buckets import chain, faulty, fresh, opened
from proxy import KINDS, Plan, Proxy

from deltackpt.errors import StorageError
from deltackpt.format.manifest import ParentRef, SaveId, SaveInfo
from deltackpt.ledger import entries
from deltackpt.ledger.entries import CatalogEntry, ObjectKey
from deltackpt.ledger.journal import Journal
from deltackpt.ledger.view import JournalView
from deltackpt.storage.store import Exists, Missing, Store, StorePath, Unanswered

#: Deadlines of calls that should time out, by scheme, and of those that should not. Azurite, a
#: single Node.js thread, takes several seconds for some requests on a busy machine.
SHORT_SECS = {"s3": 4.0, "gs": 4.0, "az": 10.0}
LONG_SECS = 60.0


@pytest.fixture(scope="module", params=["s3", "gcs", "azure"])
def network(request, tmp_path_factory) -> Iterator[Proxy]:
    start = getattr(servers, request.param)
    with start(tmp_path_factory.mktemp(request.param)) as server, faulty(server) as found:
        yield found


def together(works: Iterable[Callable[[], object]], most: int = 16) -> None:
    """Runs all of them in threads, since they mostly wait."""
    with concurrent.futures.ThreadPoolExecutor(most) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


@contextlib.contextmanager
def named(what: object) -> Iterator[None]:
    """Adds the case to an exception."""
    try:
        yield
    except BaseException as error:
        error.add_note(str(what))
        raise


# The proxy itself.


def test_a_network_without_faults_carries_large_objects_and_counts(network):
    plan = network.plan(name := fresh(network), proxy.at({}))
    store = opened(network, name, LONG_SECS).store
    data = os.urandom(60_000_000)
    store.put("large", data)
    assert store.get("large") == data and [one.method for one in plan.seen][-1] == "GET"
    assert len(plan.seen) == 2 and all("large" in one.key for one in plan.seen)


def test_chunked_bodies_are_carried_unchanged(network):
    if network.server.scheme != "gs":
        pytest.skip("S3 requests of such a body are signed in a way of their own")
    name = fresh(network)
    where = f"{network.endpoint}/upload/storage/v1/b/{name}/o?uploadType=media&name=run/x"
    buffers = iter([b"abc", b"d" * 100_000, b"e"])
    headers = {"Expect": "100-continue", "Transfer-Encoding": "chunked"}
    asked = urllib.request.Request(where, data=buffers, headers=headers, method="POST")
    urllib.request.urlopen(asked, timeout=30).close()
    root = opened(network, name, LONG_SECS)
    assert root.store.get("x") == b"abc" + b"d" * 100_000 + b"e"


# The store.

_OLD, _NEW = b"old" * 1000, b"new" * 2000


def _read_into(store: Store) -> bytes:
    buffer = bytearray(500)
    store.read_into("a/x", 100, [memoryview(buffer)])
    return bytes(buffer)


@dataclasses.dataclass(frozen=True)
class Operation:
    """A call to a store that holds a/x and a/y, with its result and its changes."""

    ask: Callable[[Store], object]
    gives: object = None
    changes: tuple[tuple[str, bytes | None], ...] = ()


OPERATIONS = {
    "get": Operation(lambda store: store.get("a/x"), _OLD),
    "get of nothing": Operation(lambda store: store.get("a/none"), Missing),
    "read_into": Operation(_read_into, _OLD[100:600]),
    "length": Operation(lambda store: store.length("a/x"), len(_OLD)),
    "version of nothing": Operation(lambda store: store.version("a/none"), Missing),
    "put": Operation(lambda store: store.put("a/x", _NEW), changes=(("a/x", _NEW),)),
    "put absent": Operation(
        lambda store: store.put("a/z", _NEW, absent=True), changes=(("a/z", _NEW),)
    ),
    "put absent of what is there": Operation(
        lambda store: store.put("a/x", _NEW, absent=True), Exists
    ),
    "keys": Operation(lambda store: store.keys("a"), ["a/x", "a/y"]),
    "delete": Operation(lambda store: store.delete(["a/x", "a/none"]), changes=(("a/x", None),)),
}


def _operation(network: Proxy, name: str, fate, deadline_secs: float, *, retries: bool) -> Plan:
    """Runs an operation under faults, and checks its result and its effect."""
    operation = OPERATIONS[name]
    where = fresh(network)
    sure = opened(network, where, LONG_SECS).store
    store = opened(network, where, deadline_secs, retries=retries).store
    before = {"a/x": _OLD, "a/y": _OLD}
    for key, data in before.items():
        sure.put(key, data)
    plan = network.plan(where, fate)
    try:
        told = operation.ask(store)
    except StorageError as error:
        told = type(error)
    plan.tell()
    network.plan(where, proxy.at({}))
    after = dict(before)
    for key, data in operation.changes:
        after.pop(key, None)
        after |= {} if data is None else {key: data}
    found = {key: sure.get(key) for key in sure.keys("")}
    if told is Exists and operation.gives is not Exists:
        # Its own object: the response was lost, and the retry found it.
        assert name == "put absent" and plan.struck and found == after
    elif told is Unanswered:
        assert plan.struck and found in (before, after)
    else:
        assert told == operation.gives and found == after
    return plan


@pytest.mark.parametrize("retries", [True, False], ids=["retried", "once"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_returns_correct_results_whatever_one_fault_does(network, kind, retries):
    deadline_secs = SHORT_SECS[network.server.scheme] if kind == "stall" else LONG_SECS
    whole: dict[str, Plan] = {}

    def learn(name: str) -> None:
        whole[name] = _operation(network, name, proxy.at({}), LONG_SECS, retries=retries)

    def work(name: str, number: int) -> None:
        with named(f"{name}, request {number}: {whole[name].seen[number]}"):
            fate = proxy.at({number: kind})
            plan = _operation(network, name, fate, deadline_secs, retries=retries)
            assert plan.struck == [(number, kind)]

    together([functools.partial(learn, name) for name in OPERATIONS])
    together(
        [
            functools.partial(work, name, number)
            for name, plan in whole.items()
            for number in range(len(plan.seen))
        ]
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("behead", "slow")])
def test_a_network_that_never_works_is_unanswered(network, kind):
    def work(name: str) -> None:
        where = fresh(network)
        deadline_secs = SHORT_SECS[network.server.scheme] if kind == "stall" else LONG_SECS
        store = opened(network, where, deadline_secs).store
        plan = network.plan(where, lambda number: kind)
        try:
            told = OPERATIONS[name].ask(store)
        except StorageError as error:
            told = type(error)
        # A response without a body is cut after its status, which is all that matters.
        true = kind == "cut" and told == OPERATIONS[name].gives
        assert true or told is Unanswered, (name, told)
        plan.tell()

    together([functools.partial(work, name) for name in OPERATIONS], len(OPERATIONS))


@pytest.mark.parametrize("data", [_OLD, b""], ids=["full", "empty"])
def test_a_response_cut_off_in_its_header_is_not_an_empty_object(network, data):
    where = fresh(network)
    store = opened(network, where, LONG_SECS, retries=False).store
    store.put("a/x", data)
    plan = network.plan(where, lambda number: "behead")
    for ask in (store.get, store.length, store.version):
        with pytest.raises(Unanswered):
            ask("a/x")
    assert plan.struck
    plan = network.plan(where, proxy.at({}))
    assert store.get("a/x") == data and len(plan.seen) == 1


# The journal.


class Trainer:
    """A trainer's calls to a journal, step by step, and their results.

    A step that raised is retried. A trainer that died is followed by one with its own journal,
    which claims the root and continues with that step.
    """

    def __init__(self, root: StorePath):
        self.root = root
        self.ledger = Journal(root)
        self.told: dict[int, CatalogEntry] = {}

    def steps(self) -> list[Callable[[], object]]:
        return [
            self.claim,
            self.begin,
            self.leave_an_upload,
            functools.partial(self.commit, 1),
            functools.partial(self.commit, 2),
            functools.partial(self.commit, 3, parent=2),
            lambda: self.ledger.retire(
                lambda state: [one.prefix for one in state.entry.catalog if one.step == 1]
            ),
            lambda: self.ledger.roll_back(2, "other"),
            lambda: self.ledger.confirm(),
            lambda: self.ledger.sweep(),
        ]

    def claim(self) -> None:
        self.ledger.claim()

    def begin(self) -> None:
        self.ledger.start_run(None)

    def leave_an_upload(self) -> None:
        self.ledger.abandon_upload(self.upload(ObjectKey(9)))

    def upload(self, unit: ObjectKey) -> str:
        prefix = self.ledger.prefix(unit)
        try:
            for name in ("x", "commit.msgpack"):
                at = self.root / prefix / name
                at.store.put(at.key, prefix.encode())
        except StorageError:
            self.ledger.abandon_upload(prefix)
            raise
        return prefix

    def commit(self, step: int, parent: int | None = None) -> None:
        unit = ObjectKey(step)
        prefix = self.upload(unit)
        of = None if parent is None else ParentRef(save_id=_save_id(parent), step_dir=str(parent))
        info = SaveInfo(
            save_id=_save_id(step),
            kind="delta" if of else "base",
            parent=of,
            step_dir=str(step),
            nbytes=10,
        )
        standing = CatalogEntry(info=info, item=unit.item, prefix=prefix, stored_bytes=2, crc32c=1)
        try:
            self.told[step] = self.ledger.commit(standing)
        except StorageError:
            self.ledger.abandon_upload(prefix)
            raise
        if self.told[step].prefix != prefix:
            self.ledger.abandon_upload(prefix)

    def die(self) -> None:
        """Another trainer takes its place."""
        self.ledger = Journal(self.root)
        self.claim()
        self.begin()

    def run(self, *, dies: bool = False, tries: int = 6) -> None:
        """Runs all steps; tries each up to ``tries`` times if the store raises."""
        for step in self.steps():
            for left in reversed(range(tries)):
                try:
                    step()
                    break
                except StorageError:
                    if not left:
                        raise
                    if dies:
                        self.die()


def _save_id(step: int) -> SaveId:
    return SaveId("r", step, step)


def check(root: StorePath, trainer: Trainer) -> None:
    """Checks that the root has the result of all steps, in one chain of entries."""
    state = JournalView(root).state()
    assert state.claim == trainer.ledger.claimed and state.claim.began
    assert {*state.catalog} == {ObjectKey(2)} and state.steps[2] == trainer.told[2]
    assert [one.entry for one in state.entry.rolled_back] == [trainer.told[3]]
    assert state.entry.committed == {"r": 3}
    for one in (trainer.told[2], trainer.told[3]):
        assert _files(root / one.prefix) == {
            name: one.prefix.encode() for name in ("x", "commit.msgpack")
        }
    history = chain(root)
    assert history[-1] == state.entry
    epochs = [one.lease.epoch for one in state.entry.claims]
    assert epochs == [*range(1, len(epochs) + 1)]


def _files(at: StorePath) -> dict[str, bytes]:
    return {name: (at / name).read() for name in at.keys()}


def _check_files(root: StorePath, trainer: Trainer) -> None:
    """Checks that only current and rolled-back saves have files."""
    prefixes = {key.rpartition("/")[0] for key in (root / entries.SAVES).keys()}
    told = (trainer.told[2], trainer.told[3])
    assert prefixes == {one.prefix.partition("/")[2] for one in told}


def journal_beside(
    network: Proxy, faults: dict[int, str], *, after: int | None, retries: bool, dies: bool
) -> Plan:
    """Runs a trainer's steps under faults, and checks the result."""
    where = fresh(network)
    deadline_secs = SHORT_SECS[network.server.scheme] if "stall" in faults.values() else LONG_SECS
    trainer = Trainer(opened(network, where, deadline_secs, retries=retries))
    plan = network.plan(where, proxy.at(faults), after=after)
    trainer.run(dies=dies)
    network.plan(where, proxy.at({}))
    root = opened(network, where, LONG_SECS)
    if not {"late", "stall"} & {*faults.values()}:
        _check_files(root, trainer)
    plan.tell()
    check(root, trainer)
    next_one = Journal(root)
    next_one.claim()
    next_one.sweep()
    _check_files(root, trainer)
    return plan


_HOW = {
    "retried": {"retries": True, "dies": False},
    "once": {"retries": False, "dies": False},
    "dies": {"retries": False, "dies": True},
}


#: The journal sends all stores the same requests; the other servers are far slower.
_DRAWN = (pytest.mark.long, pytest.mark.drawn("journals behind a faulty network", 6))
#: How, the fault, and the number of requests after which a held one continues. A client without
#: retries does not see lose, drop and late. Its change is made after cut and behead, not made after
#: 503, and made much later after stall.
_FAULTS = [
    *(("retried", kind, None) for kind in KINDS),
    ("retried", "late", 2),
    *(("once", kind, None) for kind in ("cut", "503", "stall")),
    ("once", "stall", 2),
    *(("dies", kind, None) for kind in ("behead", "stall")),
]


@pytest.mark.parametrize(("how", "kind", "after"), _FAULTS)
@pytest.mark.parametrize(
    "network", ["s3", *(pytest.param(one, marks=_DRAWN) for one in ("gcs", "azure"))], indirect=True
)
def test_a_journal_ends_as_without_faults_whatever_one_fault_does(network, how, kind, after):
    whole = journal_beside(network, {}, after=None, **_HOW[how])

    def work(number: int) -> None:
        with named(f"request {number}: {whole.seen[number]}"):
            plan = journal_beside(network, {number: kind}, after=after, **_HOW[how])
            assert plan.struck == [(number, kind)]

    together([functools.partial(work, number) for number in range(len(whole.seen))])
