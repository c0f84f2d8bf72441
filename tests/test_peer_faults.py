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

import pytest
from test_tiers import eventually, same, staged, without_promoter
from test_tiers_peers import Cluster, cluster, node, root_out_of_reach, s3  # noqa: F401

from deltackpt.errors import ClosedError, SaveFailed, StorageError, WaitTimeout
from deltackpt.nodes.blobs import MemoryBlobs
from deltackpt.nodes.server import NodeServer, Tokens
from deltackpt.options import Timeouts
from deltackpt.reading import stored_saves
from deltackpt.storage.store import store_path
from deltackpt.tiers import bundles, peers
from deltackpt.tiers.cursor import Trainer
from deltackpt.tiers.peer_push import Pusher
from deltackpt.tiers.peers import PeerGroup, PeerTier
from deltackpt.tiers.staging import StagingDir, TierProgress, key_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def last(one) -> str:
    """Returns the key of the newest staged save."""
    info = stored_saves.read_info(store_path(one.stage.steps / str(one.local()[-1])), "embeddings")
    return key_of(info.save_id.step, info.save_id)


def test_a_staging_directory_that_was_briefly_full_is_pushed_afterwards(node, cluster, monkeypatch):
    cluster = cluster(2)
    one = node()
    with (
        root_out_of_reach(one, monkeypatch),
        one.manager(timeouts=Timeouts(close_secs=60.0)) as manager,
    ):
        one.save(manager, 0)
        manager.wait_until_finished()
        full, refused = threading.Event(), threading.Event()

        def report(self, progress, tier, report=StagingDir.report):
            if tier == "peers" and full.is_set():
                refused.set()
                raise StorageError("stage: expected to write, found no space")
            report(self, progress, tier)

        monkeypatch.setattr(StagingDir, "report", report)
        full.set()
        one.save(manager, 1)
        assert refused.wait(60)
        full.clear()  # There is space again.
        manager.wait_until_finished()


def test_a_save_after_a_rollback_is_pushed_correctly_even_if_late(node, cluster, monkeypatch):
    cluster = cluster(2)
    one, other = node(), node()
    without_promoter(monkeypatch)
    with one.manager(wait_for="staging") as manager:
        for step in range(4):
            one.save(manager, step)
        manager.wait_until_finished()
        pusher = Pusher(one.stage)
        while pusher.step():
            pass

        def ask(neighbours, orders, ask=pusher._refresh_survey):
            one.restore(manager, 1)
            one.save(manager, 2)
            manager.wait_until_finished()
            ask(neighbours, orders)

        pusher._surveyed_at = float("-inf")
        pusher._refresh_survey = ask
        pusher.step()
        while last(one) not in one.stage.progress(one.stage.orders().holder, "peers").saves:
            pusher.step()  # Until the new save is at the peers.
        expected = one.held()
        # The node is lost here.
    one.lose()
    with other.manager(wait_for="staging") as manager:
        assert manager.all_steps() == [0, 1, 2]
        other.restore(manager)
        assert same(other.held(), expected)


def test_parts_of_a_larger_job_are_dropped(node, cluster, monkeypatch):
    cluster = cluster(2)
    one = node()
    without_promoter(monkeypatch)
    with one.manager(wait_for="staging") as manager:
        one.save(manager, 0)
        manager.wait_until_finished()
        orders = one.stage.orders()
        with contextlib.closing(PeerTier(PeerGroup.from_bytes(one.stage.peers()))) as found:
            # As process 3 of a job of 4 left it.
            of_four = dataclasses.replace(orders, process=3, processes=4)
            info = staged(manager)._local.saves()[0]
            found.put(bundles.staged_bundle(one.stage, info.save_id, orders.item, of_four))
            before = found.refs()
            assert len(before) == 1
            pusher = Pusher(one.stage)
            for _ in range(5):
                pusher._surveyed_at = float("-inf")
                pusher.step()
            assert before[0] not in found.refs()


def test_damaged_bytes_are_not_reported_as_replicated(node, cluster, monkeypatch):
    cluster = cluster(2)
    one = node()
    without_promoter(monkeypatch)
    with one.manager(timeouts=Timeouts(close_secs=60.0), wait_for="peers") as manager:
        one.save(manager, 0)
        eventually(lambda: one.local() == [0], "it is in the stage")
        for path in (one.stage.steps / "0").rglob("*"):
            if path.is_file() and path.stat().st_size > 4000:
                data = bytearray(path.read_bytes())
                data[100] ^= 1
                path.write_bytes(data)
        pusher = Pusher(one.stage)
        pusher.start(Trainer())
        try:
            with pytest.raises((WaitTimeout, SaveFailed)):
                manager.wait_until_finished()
        finally:
            pusher.end()


def test_a_returning_node_resumes_from_the_branch_of_another_node(node, cluster, monkeypatch):
    cluster = cluster(2)
    one, other = node(), node()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        for step in range(4):
            one.save(manager, step)
        manager.wait_until_finished()
    with root_out_of_reach(other, monkeypatch), other.manager() as manager:
        other.restore(manager, 1)
        other.save(manager, 2)
        manager.wait_until_finished()  # acknowledged: at the peers
    other.lose()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        found = one.restore(manager)
        assert found.step == 2
        assert same(one.held(), other.held())


def test_a_push_before_training_resumes_loses_nothing(node, cluster, monkeypatch):
    cluster = cluster(2)
    one, other = node(), node()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        for step in range(2):
            one.save(manager, step)
        manager.wait_until_finished()  # acknowledged
    without_promoter(monkeypatch)
    with one.manager(wait_for="staging") as manager:
        one.restore(manager)
        one.save(manager, 2)  # staged; the trainer is killed before the push
        manager.wait_until_finished()
    manager = one.manager(wait_for="staging")  # a restart, that has not saved yet
    pusher = Pusher(one.stage)
    while pusher.step():
        pass
    manager.close()
    one.lose()
    with other.manager(wait_for="staging") as manager:
        assert sorted(manager.all_steps()) == [0, 1, 2]
        assert other.restore(manager).step == 2


def test_a_peer_agent_that_restarts_before_training_resumes(node, cluster, monkeypatch):
    cluster = cluster(4)
    one, other = node(), node()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        for step in range(8):
            one.save(manager, step)
        manager.wait_until_finished()  # acknowledged
    filled = [name for name, count in cluster.holding().items() if count]
    assert len(filled) > 1
    cluster.restart_keeper(filled[0])
    without_promoter(monkeypatch)
    manager = one.manager(wait_for="staging")  # a restart, that has not saved yet
    pusher = Pusher(one.stage)
    while pusher.step():
        pass
    manager.close()
    one.lose()
    with other.manager(wait_for="staging") as manager:
        assert sorted(manager.all_steps()) == [*range(8)]


def test_a_peer_agent_that_restarts_in_a_later_run(node, cluster, monkeypatch):
    """Bundles are pushed again under a later epoch, whose goes_on is itself."""
    cluster = cluster(4)
    one, other = node(), node()
    for step in range(8):
        with root_out_of_reach(one, monkeypatch), one.manager() as manager:
            if step:
                one.restore(manager)
            one.save(manager, step)
            manager.wait_until_finished()
            if step == 7:
                filled = [name for name, count in cluster.holding().items() if count]
                cluster.restart_keeper(filled[0])
                one.save(manager, 8)
                manager.wait_until_finished()
                eventually(lambda: sum(cluster.holding().values()) == 9, "all are there again")
    one.lose()
    without_promoter(monkeypatch)
    with other.manager(wait_for="staging") as manager:
        assert sorted(manager.all_steps()) == [*range(9)]


def test_a_save_that_cannot_be_uploaded_must_reach_the_peers(node, cluster, monkeypatch):
    cluster = cluster(2)
    one = node()
    without_promoter(monkeypatch)
    limits = Timeouts(save_secs=3.0, close_secs=0.5)
    with contextlib.suppress(WaitTimeout), one.manager(timeouts=limits) as manager:
        one.save(manager, 0)
        eventually(lambda: one.local() == [0], "it is in the stage")
        orders = one.stage.orders()
        info = None
        while info is None:
            info = staged(manager)._local.saves().get(0)
        one.stage.report(
            TierProgress(holder=orders.holder, damaged={key_of(0, info.save_id): "no parent"})
        )
        assert sum(cluster.holding().values()) == 0
        with pytest.raises(WaitTimeout, match="to reach tier 'peers'"):
            manager.wait_until_finished()


def test_a_step_that_was_deleted_stays_deleted(node, cluster, monkeypatch):
    cluster = cluster(2)
    one = node()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        for step in range(2):
            one.save(manager, step)
        manager.wait_until_finished()
    without_promoter(monkeypatch)
    with one.manager(wait_for="staging") as manager:
        manager.delete(1)  # then all processes of the node are killed
        assert manager.all_steps() == [0]
    with one.manager(wait_for="staging") as manager:
        assert manager.all_steps() == [0]


def test_full_peers_drop_saves_that_left_the_staging_directory(node, cluster, monkeypatch):
    cluster = cluster(2)
    one = node()
    # Room for two bases of 12 kB.
    cluster.servers["node1"].close()
    cluster.shelves["node1"].close()
    cluster.shelves["node1"] = MemoryBlobs(30 << 10)
    cluster.servers["node1"] = NodeServer(
        cluster.shelves["node1"], bind="127.0.0.1", tokens=cluster.tokens["node1"]
    )
    without_promoter(monkeypatch)
    with one.manager(wait_for="staging") as manager:
        for step in range(2):
            one.save(manager, step, force_base=True)
        manager.wait_until_finished()
        pusher = Pusher(one.stage)
        while pusher.step():
            pass
        assert cluster.holding()["node1"] == 2
        # Like retention, or eviction of uploaded steps, at the next save.
        one.save(manager, 2, force_base=True)
        manager.wait_until_finished()
        manager.delete(0)
        manager.delete(1)
        assert one.local() == [2]
        for _ in range(5):
            with contextlib.suppress(StorageError):
                while pusher.step():
                    pass
        assert len(one.stage.progress(one.stage.orders().holder, "peers").saves) == 1


def test_a_restarted_peer_agent_admits_the_newest_trainer(monkeypatch):
    keepers = pytest.importorskip("deltackpt.service.peer_agents", reason="needs deltackpt[ray]")

    class Server:
        address = "127.0.0.1:1"

    keeper = object.__new__(keepers.PeerAgent)
    keeper._tokens, keeper._holder, keeper._server = Tokens(), None, Server()
    # It was restarted. The previous trainer (epoch 1), which others refuse, asks first:
    keeper.admit("holder-of-epoch-1", "token1" * 9, False)
    # The newest trainer (epoch 2) asks again.
    assert keeper.admit("holder-of-epoch-2", "token2" * 9, False)


def test_one_damaged_save_does_not_keep_others_from_the_peers(node, cluster, monkeypatch):
    cluster = cluster(2)
    one = node()
    with root_out_of_reach(one, monkeypatch):
        manager = one.manager(wait_for="staging")
        without = monkeypatch.context()
        with without as patch:
            patch.setattr("deltackpt.tiers.replicator.ReplicatorProcess.start", lambda self: None)
            one.save(manager, 0)
            manager.wait_until_finished()
            for path in (one.stage.steps / "0").rglob("*"):
                if path.is_file() and path.stat().st_size > 4000:
                    path.write_bytes(path.read_bytes()[:-1])
            one.save(manager, 1, force_base=True)
            manager.wait_until_finished()
        pusher = Pusher(one.stage)
        for _ in range(5):
            with contextlib.suppress(StorageError, Exception):
                while pusher.step():
                    pass
        manager.close()
        held = {
            key.rpartition(".")[2]
            for key in one.stage.progress(one.stage.orders().holder, "peers").saves
        }
        assert "1" in held


def test_rolled_back_steps_that_are_still_remote_are_ignored_on_another_node(
    node, cluster, monkeypatch
):
    cluster = cluster(2)
    one, other = node(), node()
    with one.manager(wait_for="remote") as manager:
        for step in range(4):
            one.save(manager, step, force_base=step == 3)
        manager.wait_until_finished()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        one.restore(manager, 1)
        one.save(manager, 2)
        manager.wait_until_finished()  # acknowledged, at the peers
    one.lose()
    with root_out_of_reach(other, monkeypatch), other.manager() as manager:
        assert other.restore(manager).step == 2
        assert same(other.held(), one.held())


def silent(cluster, name):
    """Ray answers on the node, but its data port does not (a firewall, a frozen server)."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    class Silent:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def close(self):
            listener.close()

    cluster.servers[name] = Silent()


def test_a_silent_node_is_asked_once_and_not_for_each_save(node, cluster, monkeypatch):
    cluster = cluster(3)
    one, other = node(), node()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        for step in range(3):
            one.save(manager, step)
        manager.wait_until_finished()
    one.lose()
    cluster.shelves["quiet"] = cluster.shelves["node0"]
    cluster.tokens["quiet"] = cluster.tokens["node0"]
    silent(cluster, "quiet")
    without_promoter(monkeypatch)
    asked: list[str] = []
    real = PeerTier._found

    def found(self, *given):
        asked.append("asked")
        return real(self, *given)

    monkeypatch.setattr(PeerTier, "_found", found)
    with other.manager(wait_for="staging") as manager:
        assert sorted(manager.all_steps()) == [0, 1, 2]
    assert len(asked) <= 3


def test_a_node_that_does_not_answer_at_the_start_is_reported(node, cluster, monkeypatch):
    cluster = cluster(3)
    one, other = node(), node()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        one.save(manager, 0)
        manager.wait_until_finished()  # acknowledged
    one.lose()
    [name] = [name for name, count in cluster.holding().items() if count]

    class Gone:
        address = "127.0.0.1:9"

        def close(self):
            pass

    real, cluster.servers[name] = cluster.servers[name], Gone()  # Temporarily.
    without_promoter(monkeypatch)
    with pytest.warns(UserWarning, match=rf"expected an answer.*found none from {name} \(127"):
        manager = other.manager(wait_for="staging")
    with manager:
        assert manager.all_steps() == []
    cluster.servers[name] = real
    with other.manager(wait_for="staging") as manager:
        assert other.restore(manager).step == 0
    assert same(other.held(), one.held())


def test_a_pusher_survives_altered_orders(node, cluster, monkeypatch):
    cluster(2)
    one = node()
    without_promoter(monkeypatch)
    with one.manager(wait_for="staging") as manager:
        one.save(manager, 0)
        manager.wait_until_finished()
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


def test_closed_peers_raise_a_typed_error(node, cluster, monkeypatch):
    """The saving thread closes the peers that the training thread reads from, if they changed."""
    cluster(2)
    one = node()
    without_promoter(monkeypatch)
    with one.manager(wait_for="staging") as manager:
        one.save(manager, 0)
        manager.wait_until_finished()
        info = staged(manager)._local.saves()[0]
        pack = bundles.staged_bundle(
            one.stage, info.save_id, one.stage.orders().item, one.stage.orders()
        )
        found = PeerTier(PeerGroup.from_bytes(one.stage.peers()))
        found.put(pack)
        with found.open(pack.ref) as reader:
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
        found = PeerTier(PeerGroup.from_bytes(one.stage.peers()))
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


def test_peers_that_were_absent_do_not_bring_back_abandoned_steps(node, cluster, monkeypatch):
    cluster(2)
    one = node()
    with root_out_of_reach(one, monkeypatch), one.manager() as manager:
        for step in range(4):
            one.save(manager, step, force_base=step == 3)
        manager.wait_until_finished()
    without_promoter(monkeypatch)
    away = {"peers": None, "wait_for": "staging"}
    with one.manager(**away) as manager:
        one.restore(manager, 1)
        one.save(manager, 2)
        manager.wait_until_finished()
    expected = one.held()
    with one.manager(**away) as manager:  # A restart without a save.
        assert one.restore(manager).step == 2
    with one.manager(wait_for="staging") as manager:
        assert one.restore(manager).step == 2
        assert same(one.held(), expected)
