# SPDX-License-Identifier: Apache-2.0
"""Peers under faults, restarts and rollbacks: no acknowledged save is lost, nothing hangs."""

# ruff: noqa: F811

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import socket
import threading
import time
import types

import pytest
from test_tiers import alone, eventually, same, staged, without_uploader  # noqa: F401
from test_tiers_extents import damage_staged
from test_tiers_peers import cluster, node, push, root_out_of_reach, s3  # noqa: F401

from deltackpt.errors import ClosedError, SaveFailed, StorageError, WaitTimeout
from deltackpt.nodes.server import Tokens
from deltackpt.options import Timeouts
from deltackpt.reading import stored_saves
from deltackpt.storage.node_client import Node
from deltackpt.storage.store import store_path
from deltackpt.tiers import bundles, peers, replicator
from deltackpt.tiers.cursor import Trainer
from deltackpt.tiers.peer_push import Pusher
from deltackpt.tiers.peers import PeerTier
from deltackpt.tiers.staging import StagingDir, TierProgress, key_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def last(one) -> str:
    """Returns the key of the newest staged save."""
    info = stored_saves.read_info(store_path(one.stage.steps / str(one.local()[-1])), "embeddings")
    return key_of(info.save_id.step, info.save_id)


def pushed(one) -> dict:
    """Returns the keys of the saves that the pusher reported."""
    return one.stage.progress(one.stage.orders().holder, "peers").saves


def test_a_staging_directory_that_was_briefly_full_is_pushed_afterwards(node, cluster, monkeypatch):
    cluster(2)
    one = node()
    full, refused = threading.Event(), threading.Event()

    def report(self, progress, tier, report=StagingDir.report):
        if tier == "peers" and full.is_set():
            refused.set()
            raise StorageError("stage: expected to write, found no space")
        report(self, progress, tier)

    with root_out_of_reach(one), one.manager(timeouts=Timeouts(close_secs=60.0)) as manager:
        one.saves(manager, 0)
        monkeypatch.setattr(StagingDir, "report", report)
        full.set()
        one.save(manager, 1)
        assert refused.wait(60)
        full.clear()  # There is space again.
        manager.wait_until_finished()


def test_a_save_after_a_rollback_is_pushed_correctly_even_if_late(node, cluster, alone):
    cluster(2)
    one, other = node(), node()
    with one.manager(wait_for="staging") as manager:
        one.saves(manager, 0, 1, 2, 3)
        pusher = push(one)

        def refresh(tier, orders, refresh=pusher._refresh_survey):
            one.restore(manager, 1)
            one.saves(manager, 2)
            refresh(tier, orders)

        pusher._surveyed_at = float("-inf")
        pusher._refresh_survey = refresh
        pusher.step()
        while last(one) not in pushed(one):
            pusher.step()  # Until the new save is at the peers.
        expected = one.held()
        # The node is lost here.
    one.lose()
    with other.manager(wait_for="staging") as manager:
        assert manager.all_steps() == [0, 1, 2]
        other.restore(manager)
        assert same(other.held(), expected)


def test_shards_of_a_larger_job_are_dropped(node, cluster, alone):
    cluster(2)
    one = node()
    with one.manager(wait_for="staging") as manager:
        one.saves(manager, 0)
        orders = one.stage.orders()
        with contextlib.closing(PeerTier(one.group())) as found:
            # As process 3 of a job of 4 left it.
            of_four = dataclasses.replace(orders, process=3, processes=4)
            info = staged(manager).local.saves()[0]
            found.put(bundles.staged_bundle(one.stage, info.save_id, of_four))
            [before] = found.refs()
            pusher = Pusher(one.stage)
            for _ in range(5):
                pusher._surveyed_at = float("-inf")
                pusher.step()
            assert before not in found.refs()


def test_damaged_bytes_are_not_reported_as_replicated(node, cluster, alone):
    cluster(2)
    one = node()
    with one.manager(timeouts=Timeouts(close_secs=60.0), wait_for="peers") as manager:
        one.save(manager, 0)
        eventually(lambda: one.local() == [0], "it is in the stage")
        damage_staged(one, 0)
        pusher = Pusher(one.stage)
        pusher.start(Trainer())
        try:
            with pytest.raises((WaitTimeout, SaveFailed)):
                manager.wait_until_finished()
        finally:
            pusher.end()


def test_a_peer_agent_that_restarts_in_a_later_run(node, cluster, monkeypatch):
    """Bundles are pushed again under a later epoch, whose resumed_from is itself."""
    cluster = cluster(4)
    one, other = node(), node()
    for step in range(7):
        one.peers_run(step)
    without_uploader(monkeypatch)
    with one.manager(wait_for="staging") as manager:
        one.restore(manager)
        one.saves(manager, 7)
        push(one)
        cluster.restart_peer(cluster.filled()[0])
        one.saves(manager, 8)
        push(one)
        assert sum(cluster.holding().values()) == 9
    one.lose()
    other.resumed(8, [*range(9)], like=one, wait_for="staging")


def test_a_save_that_cannot_be_uploaded_must_reach_the_peers(node, cluster, alone):
    cluster = cluster(2)
    one = node()
    limits = Timeouts(save_secs=3.0, close_secs=5.0)
    with contextlib.suppress(WaitTimeout), one.manager(timeouts=limits) as manager:
        one.save(manager, 0)
        eventually(lambda: 0 in staged(manager).local.saves(), "it is in the stage")
        key = key_of(0, staged(manager).local.saves()[0].save_id)
        one.stage.report(TierProgress(holder=one.stage.orders().holder, damaged={key: "no parent"}))
        assert sum(cluster.holding().values()) == 0
        with pytest.raises(WaitTimeout, match="to reach tier 'peers'"):
            manager.wait_until_finished()


def test_a_step_that_was_deleted_stays_deleted(node, cluster, monkeypatch):
    cluster(2)
    one = node()
    one.peers_run(0, 1)
    without_uploader(monkeypatch)
    with one.manager(wait_for="staging") as manager:
        manager.delete(1)  # Then all processes of the node are killed.
        assert manager.all_steps() == [0]
    with one.manager(wait_for="staging") as manager:
        assert manager.all_steps() == [0]


def test_full_peers_drop_saves_that_left_the_staging_directory(node, cluster, monkeypatch):
    cluster = cluster(2)
    one = node()
    cluster.restart_peer("node1", nbytes=30 << 10)  # Room for two bases of 12 kB.
    without_uploader(monkeypatch)
    with one.manager(wait_for="staging") as manager:
        one.saves(manager, 0, 1, bases=[0, 1])
        pusher = push(one)
        assert cluster.holding()["node1"] == 2
        # Like retention, or eviction of uploaded steps, at the next save.
        one.saves(manager, 2, bases=[2])
        manager.delete(0)
        manager.delete(1)
        assert one.local() == [2]
        for _ in range(5):
            with contextlib.suppress(StorageError):
                while pusher.step():
                    pass
        assert len(pushed(one)) == 1


def test_a_restarted_peer_agent_admits_the_newest_trainer(monkeypatch):
    peer_agents = pytest.importorskip(
        "deltackpt.service.peer_agents", reason="needs deltackpt[ray]"
    )

    class Server:
        address = "127.0.0.1:1"

    agent = object.__new__(peer_agents.PeerAgent)
    agent._tokens, agent._holder, agent._server = Tokens(), None, Server()
    # It was restarted. The previous trainer (epoch 1), which others refuse, asks first:
    agent.admit("holder-of-epoch-1", "token1" * 9, False)
    # The newest trainer (epoch 2) asks again.
    assert agent.admit("holder-of-epoch-2", "token2" * 9, False)


def test_one_damaged_save_does_not_keep_others_from_the_peers(node, cluster, alone):
    cluster(2)
    one = node()
    with one.manager(wait_for="staging") as manager:
        one.saves(manager, 0)
        for path in (one.stage.steps / "0").rglob("*"):
            if path.is_file() and path.stat().st_size > 4000:
                path.write_bytes(path.read_bytes()[:-1])
        one.saves(manager, 1, bases=[1])
        pusher = Pusher(one.stage)
        for _ in range(5):
            with contextlib.suppress(Exception):
                while pusher.step():
                    pass
    assert "1" in {key.rpartition(".")[2] for key in pushed(one)}


def unanswered(cluster, name: str, address: str) -> None:
    """Ray answers on the node, but its data port does not (a firewall, a frozen server)."""
    cluster.servers[name] = types.SimpleNamespace(address=address, close=lambda: None)


def test_a_silent_node_is_asked_once_and_not_for_each_save(node, cluster, monkeypatch):
    cluster = cluster(3)
    one, other = node(), node()
    one.peers_run(0, 1, 2)
    one.lose()
    cluster.stores["quiet"] = cluster.stores["node0"]
    cluster.tokens["quiet"] = cluster.tokens["node0"]
    cluster.deadline_secs = 1.0
    without_uploader(monkeypatch)
    asked: list[str] = []

    def found(self, *given, real=PeerTier._found, **how):
        asked.append("asked")
        return real(self, *given, **how)

    monkeypatch.setattr(PeerTier, "_found", found)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        unanswered(cluster, "quiet", f"127.0.0.1:{listener.getsockname()[1]}")
        with other.manager(wait_for="staging") as manager:
            assert sorted(manager.all_steps()) == [0, 1, 2]
    assert len(asked) <= 3


def test_a_node_that_lets_only_fragments_time_out_delays_one_push(
    node, cluster, monkeypatch, alone
):
    cluster(3)
    one = node()
    tried: list[str] = []
    with one.manager(wait_for="staging") as manager:
        one.saves(manager, *range(8))
        orders, saves = one.stage.orders(), staged(manager).local.saves().values()
        packs = [bundles.staged_bundle(one.stage, info.save_id, orders) for info in saves]
        with contextlib.closing(PeerTier(one.group())) as found:
            slow = found._nodes[found._in_order(packs[0].ref)[0]]

            def put(self, key, pieces, real=Node.put):
                if self is slow:
                    tried.append(key)
                    raise StorageError("expected an answer, found none") from TimeoutError()
                real(self, key, pieces)

            monkeypatch.setattr(Node, "put", put)
            for pack in packs:
                found.put(pack)
            assert len(tried) == 1
            assert {*found.refs()} == {pack.ref for pack in packs}


def test_a_node_that_does_not_answer_at_the_start_is_reported(node, cluster, monkeypatch):
    cluster = cluster(3)
    one, other = node(), node()
    one.peers_run(0)  # Acknowledged.
    one.lose()
    [name] = cluster.filled()
    real = cluster.servers[name]
    unanswered(cluster, name, "127.0.0.1:9")  # Temporarily.
    without_uploader(monkeypatch)
    with pytest.warns(UserWarning, match=rf"expected an answer.*found none from {name} \(127"):
        manager = other.manager(wait_for="staging")
    with manager:
        assert manager.all_steps() == []
    cluster.servers[name] = real
    other.resumed(0, like=one, wait_for="staging")


def test_a_pusher_survives_altered_orders(node, cluster):
    cluster(2)
    one = node()
    one.staged_run(0)
    [path] = one.stage.path.glob("orders.*")
    good = path.read_bytes()
    path.write_bytes(b"altered")
    pusher = Pusher(one.stage)
    thread = pusher.start(Trainer())
    time.sleep(0.5)
    path.write_bytes(good)
    alive = thread.is_alive()
    pusher.end()
    thread.join()
    assert alive


def test_closed_peers_raise_a_typed_error(node, cluster, alone):
    """The saving thread closes the peers that the training thread reads from, if they changed."""
    cluster(2)
    one = node()
    with one.manager(wait_for="staging") as manager:
        one.saves(manager, 0)
        orders = one.stage.orders()
        save_id = staged(manager).local.saves()[0].save_id
        pack = bundles.staged_bundle(one.stage, save_id, orders)
        found = PeerTier(one.group())
        found.put(pack)
        reader = found.open(pack.ref)
        found.close()
        for ask in (
            lambda: reader.read_into(0, memoryview(bytearray(1))),
            found.refs,
            found.survey,
            lambda: found.put(pack),
            lambda: found.delete([pack.ref]),
        ):
            with pytest.raises(ClosedError, match="other peers were found; retry"):
                ask()


def test_peers_closed_during_a_request_raise_a_typed_error(node, cluster):
    cluster(2)
    one = node()
    with one.manager(wait_for="staging"):
        found = PeerTier(one.group())
    free = threading.Event()
    with contextlib.closing(found), concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            for _ in range(peers._THREADS):  # A request waits for one of them.
                found._pool.submit(free.wait)
            asked = pool.submit(found.refs)
            eventually(lambda: found._pool._work_queue.qsize() == 2, "both nodes are to be asked")
            # As ``close`` does, which then waits for the others.
            found._pool.shutdown(wait=False, cancel_futures=True)
            with pytest.raises(ClosedError, match="other peers were found; retry"):
                asked.result(60)
        finally:
            free.set()


def test_unreadable_orders_do_not_end_the_replicator(tmp_path):
    stage = StagingDir(tmp_path)
    stage.make()
    record = tmp_path / "orders.1.msgpack"
    record.symlink_to(record)
    with pytest.raises(StorageError):
        stage.orders()
    with replicator._pushing(stage, Trainer()):
        pass
