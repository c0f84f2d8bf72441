# SPDX-License-Identifier: Apache-2.0
"""Events: one log record each, delivery to every handler, and Prometheus metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import prometheus_client
import pytest
from flat_options import manager_options
from hypothesis import given
from hypothesis import strategies as st

import deltackpt
from deltackpt import errors, events
from deltackpt.format.row_blocks import VALUES
from deltackpt.save import encode
from deltackpt.save.capture import BusyClock, HostPiece
from deltackpt.storage import zarr_writer
from deltackpt.testing import STEP_FILES, Disk, failing_saves, paused_saves

REPOSITORY = Path(__file__).resolve().parent.parent
DASHBOARD = REPOSITORY / "docs" / "assets" / "grafana-dashboard.json"
PAGE = REPOSITORY / "docs" / "reference" / "events.md"
STAGES = ("blocked", "extract", "room", "encode", "write", "digest", "commit", "total")


SAVE = events.SaveEvent(
    step=1200, kind="delta", reason="delta 3 of at most 50 in the chain", process=2, rows=500,
    total_rows=10_000, bytes_written=130_000, ratio=0.05, blocked_secs=0.01, extract_secs=0.008,
    encode_secs=0.03, write_secs=0.02, room_secs=0.0, digest_secs=0.002, commit_secs=0.005,
    total_secs=0.11, committed_unix_secs=1.8e9,
)  # fmt: skip
RESTORE = events.RestoreEvent(
    step=1200, process=0, chain=(1000, 1200), source="storage", bytes_read=4096, find_secs=0.05,
    read_secs=0.15, place_secs=0.05, total_secs=0.25,
)  # fmt: skip
UPLOAD = events.UploadEvent(
    step=1200, process=0, bytes_sent=4096, objects=18, seconds=0.3, lag_secs=0.5,
    committed_unix_secs=1.7e9, waiting=2, waiting_bytes=8192,
)  # fmt: skip
APPEND = events.AppendEvent(
    step=1201, process=0, kind="full", rows=500, bytes_written=5000, dense_bytes=1000,
    blocked_secs=0.002, encode_secs=0.001, write_secs=0.0005, sync_secs=0.004, durable_secs=0.009,
    batches_in_sync=2, committed_unix_secs=1.8e9,
)  # fmt: skip
FAILURE = events.FailureEvent(
    step=1300, process=2, operation="save", code="out-of-space",
    message="/data: expected room, found the file system full", seconds=3.5,
)  # fmt: skip
#: A restore does not fail if a step is skipped.
SKIP = replace(FAILURE, operation="skip")


class Registry(prometheus_client.CollectorRegistry):
    def value(self, name: str, **labels: str) -> Any:
        """The value of a sample of deltackpt."""
        return self.get_sample_value(f"deltackpt_{name}", labels)


@pytest.fixture
def registry() -> Registry:
    return Registry()


class Kept:
    """A handler that records its events and the threads that deliver them."""

    def __init__(self):
        self.received = []
        self.threads = set()

    def receive(self, event):
        self.received.append(event)
        self.threads.add(threading.current_thread())


@pytest.fixture
def kept() -> Kept:
    return Kept()


EVENTS = (SAVE, RESTORE, UPLOAD, APPEND, FAILURE)
LEVELS = {
    "append": (APPEND, logging.DEBUG),
    "upload": (UPLOAD, logging.INFO),
    "save": (SAVE, logging.INFO),
    "restore": (RESTORE, logging.INFO),
    "failure": (FAILURE, logging.ERROR),
    "failed restore": (replace(FAILURE, operation="restore"), logging.ERROR),
    "skipped step": (SKIP, logging.WARNING),
    "line break of a save": (replace(SAVE, reason="one\ntwo"), logging.INFO),
    "line break of a failure": (replace(FAILURE, message="one\ntwo"), logging.ERROR),
}


def logged(caplog, event: events.Event, **options: Any) -> Any:
    """Emits an event and returns its only log record."""
    with caplog.at_level(logging.DEBUG, logger="deltackpt"):
        events.emit(event, **options)
    (record,) = caplog.records
    return record


@pytest.mark.parametrize(("event", "level"), LEVELS.values(), ids=LEVELS)
def test_an_event_is_one_line_with_every_figure_and_the_process(event, level, caplog):
    record = logged(caplog, event)
    assert (record.name, record.levelno) == ("deltackpt.events", level)
    assert record.event is event
    assert record.process_index == event.process
    line = record.getMessage()
    assert line.startswith(f"process {event.process}: ")
    assert "\n" not in line
    for field in dataclasses.fields(event):
        if field.name not in ("process", "tables", "dense"):
            assert f" {field.name}=" in line


def test_a_message_that_is_raised_or_warned_is_not_logged_again(caplog):
    event = replace(FAILURE, message="the disk is on fire")
    record = logged(caplog, event, log_message=False)
    assert "code=" in record.getMessage() and "on fire" not in record.getMessage()
    assert record.event is event


def test_every_handler_receives_each_event_once_in_order():
    event_handlers = [Kept(), Kept()]
    emitted = [replace(SAVE, step=1), replace(SAVE, step=2), RESTORE, FAILURE]
    for event in emitted:
        events.emit(event, event_handlers)
    assert [handler.received for handler in event_handlers] == [emitted, emitted]


def test_a_failing_handler_is_reported_and_does_not_stop_the_others(kept):
    refusing = mock.Mock(receive=mock.Mock(side_effect=ConnectionError("gateway is down")))
    with pytest.warns(RuntimeWarning, match="ConnectionError at the save of step 1200: gateway"):
        events.emit(SAVE, [refusing, kept])
    assert len(kept.received) == 1


def test_handlers_cannot_modify_events():
    assert all(type(event).__dataclass_params__.frozen for event in EVENTS)


def test_a_deltackpt_error_is_reported_by_its_code_others_by_class():
    of = events.FailureEvent.from_error
    told = of(errors.OutOfSpace("full"), "save", 7, process=1, seconds=2.0)
    assert (told.code, told.message) == ("out-of-space", "full")
    assert of(KeyError("k"), "restore", None, process=1, seconds=2.0).code == "KeyError"


def test_an_orbax_logger_receives_every_figure_in_json_types():
    entries = []

    class Cloud(ocp.logging.AbstractLogger):
        """Modifies the dict that it receives, as Orbax's CloudLogger does."""

        def log_entry(self, msg, *args, **kwargs):
            msg["job_name"] = "run-17"
            entries.append(msg)

    handler = events.OrbaxLoggerHandler(ocp.logging.CompositeLogger(Cloud()))
    figures = events.TableFigures(
        table="words", field=VALUES, codec="int4", reason="int4", rows=500, nbytes=130_000,
        ratio=0.2, relative_error=0.06,
    )  # fmt: skip
    for event in (replace(SAVE, tables=(figures,)), RESTORE, FAILURE, UPLOAD):
        handler.receive(event)
        names = {field.name for field in dataclasses.fields(event)}
        assert names | {"event", "job_name"} <= set(entries[-1])
    assert json.loads(json.dumps(entries)) == entries
    assert entries[0]["relative_error"] == 0.06 and entries[0]["tables"][0]["table"] == "words"


def test_prometheus_counts_saves_and_restores_by_process(registry):
    handlers, soft = [events.PrometheusHandler(registry)], replace(APPEND, kind="soft", step=1202)
    for event in (SAVE, replace(SAVE, step=1300), RESTORE, UPLOAD, APPEND, soft):
        events.emit(event, handlers)
    other, own = {"process": "2"}, {"process": "0"}
    save, restore = {**other, "kind": "delta"}, {**own, "source": "storage"}
    samples = [
        (save, {"saves_total": 2, "saved_rows_total": 1000, "saved_bytes_total": 260_000}),
        (save, {"saved_ratio": 0.05}),
        (other, {"last_saved_step": 1300, "last_commit_timestamp_seconds": 1.8e9}),
        (restore, {"restores_total": 1, "restored_bytes_total": 4096}),
        (own, {"uploads_total": 1, "uploaded_bytes_total": 4096, "waiting_bytes": 8192}),
        (own, {"last_uploaded_step": 1200}),
        ({**own, "stage": "upload"}, {"upload_seconds_count": 1}),
    ]
    for kind, step in (("full", 1201), ("soft", 1202)):
        labels = {**own, "kind": kind}
        samples.append((labels, {"appends_total": 1, "appended_rows_total": 500}))
        samples.append((labels, {"last_appended_step": step}))
        samples.append(({**labels, "stage": "durable"}, {"append_seconds_count": 1}))
    for labels, values in samples:
        assert {name: registry.value(name, **labels) for name in values} == values
    for stage in STAGES:
        found = registry.value("save_seconds_sum", **save, stage=stage)
        assert found == pytest.approx(2 * getattr(SAVE, f"{stage}_secs"))
    for stage in ("find", "read", "place", "total"):
        found = registry.value("restore_seconds_sum", **restore, stage=stage)
        assert found == getattr(RESTORE, f"{stage}_secs")


def test_prometheus_counts_failures_by_operation_and_code(registry):
    handlers = [events.PrometheusHandler(registry)]
    before = time.time()
    for event in (FAILURE, replace(SKIP, code="damaged")):
        events.emit(event, handlers)
        labels = {"process": "2", "operation": event.operation, "code": event.code}
        assert registry.value("failures_total", **labels) == 1
        assert before <= registry.value("last_failure_timestamp_seconds", **labels) <= time.time()


def test_prometheus_handler_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(errors.MissingExtra, match=r"deltackpt\[metrics\]"):
        events.PrometheusHandler()


def new_state(seed: int = 0) -> dict:
    rows = np.random.default_rng(seed).normal(size=(4000, 16)).astype(np.float32)
    return {"tables": {"words": jnp.asarray(rows), "users": jnp.asarray(rows[:600])}, "bias": 1.0}


def manager(root: Path, *event_handlers, codec="raw", **options) -> deltackpt.CheckpointManager:
    tables = deltackpt.Tables(select="tables/*", codec=codec)
    return deltackpt.CheckpointManager(
        root,
        handlers={"embeddings": tables},
        options=manager_options(**options),
        event_handlers=event_handlers,
    )


def train(root: Path, *event_handlers, codec="raw", **options) -> dict:
    """Commits a base and a delta; returns the state."""
    state = new_state()
    touched = deltackpt.touched.init(state["tables"])
    with manager(root, *event_handlers, codec=codec, **options) as saver:
        saver.save(1, state, touched=touched)
        touched = deltackpt.touched.mark(touched, {"words": jnp.arange(0, 4000, 3)})
        saver.save(2, state, touched=touched)
    return state


def levels(caplog) -> list[int]:
    """Levels of the log records of events; Orbax logs the error too."""
    return [record.levelno for record in caplog.records if record.name == "deltackpt.events"]


def no_room(*_: object, **__: object) -> None:
    raise errors.OutOfSpace("/data: expected room, found the file system full")


@pytest.mark.parametrize("durability", ["power", "process"])
@pytest.mark.parametrize("codec", ["raw", "lossless", "adaptive4"])
def test_the_stages_of_a_save_add_up_to_at_most_its_total(tmp_path, codec, durability, kept):
    choice = deltackpt.policies.CodecChoice(base="bf16", delta=codec)
    before = time.time()
    train(tmp_path, kept, codec=choice, durability=durability)
    after = time.time()
    assert [event.kind for event in kept.received] == ["base", "delta"]
    for event in kept.received:
        assert all(getattr(event, f"{stage}_secs") > 0 for stage in STAGES)
        assert event.extract_secs <= event.blocked_secs
        background = event.encode_secs + event.write_secs + event.digest_secs + event.commit_secs
        assert background <= event.total_secs
        assert event.blocked_secs <= event.total_secs
        assert before < event.committed_unix_secs < after
    assert (kept.received[1].relative_error > 0) == (codec == "adaptive4")


@pytest.mark.parametrize(
    ("stage", "owner", "name"),
    [("encode", encode, "on_host"), ("write", zarr_writer, "ZarrWriter")],
)
def test_a_slow_stage_is_reported_by_its_name(tmp_path, stage, owner, name, kept):
    real = getattr(owner, name)

    def slow(*arguments, **options):
        threading.Event().wait(0.2)
        return real(*arguments, **options)

    with mock.patch.object(owner, name, slow):
        with manager(tmp_path, kept, codec=deltackpt.policies.CodecChoice(base="bf16")) as saver:
            saver.save(1, new_state())
    (event,) = kept.received
    assert getattr(event, f"{stage}_secs") > 0.2
    assert event.encode_secs + event.write_secs <= event.total_secs


@pytest.mark.parametrize("stage", ["before the write", "in the background", "at the commit"])
def test_a_failed_save_is_one_event_and_one_error_line(tmp_path, stage, caplog, kept):
    state = new_state()
    with caplog.at_level(logging.INFO, logger="deltackpt.events"):
        with manager(tmp_path, kept) as saver:
            with contextlib.ExitStack() as stack:
                if stage == "before the write":
                    where = "deltackpt.save.pending_save.require_room"
                    stack.enter_context(mock.patch(where, no_room))
                else:
                    call = ("rename", "^1$") if stage == "at the commit" else ("write", STEP_FILES)
                    stack.enter_context(Disk(tmp_path)).fail(*call, errno=errno.ENOSPC)
                with pytest.raises((errors.OutOfSpace, errors.SaveFailed), match="full"):
                    saver.save(1, state)
                    saver.wait_until_finished()
            assert saver.save(2, state).kind == "base"
    failed, saved = kept.received
    assert (failed.step, failed.operation, failed.code) == (1, "save", "out-of-space")
    assert "found the file system full" in failed.message and failed.seconds > 0
    assert (saved.step, saved.kind) == (2, "base")
    assert kept.threads == {threading.current_thread()}
    assert levels(caplog) == [logging.ERROR, logging.INFO]
    assert "found the file system full" not in caplog.text  # the exception has it


def test_the_next_save_reports_the_previous_failure_first(tmp_path, kept):
    state = new_state()
    with manager(tmp_path, kept) as saver:
        with failing_saves(tmp_path, errno.ENOSPC):
            saver.save(1, state)
            flight = saver._saver.in_flight
            assert flight.pending.rows.released.wait(60)
        with pytest.raises(errors.SaveFailed) as caught:
            saver.save(2, state)
        assert caught.value.saved is not None
    found = [(type(event), event.step) for event in kept.received]
    assert found == [(events.FailureEvent, 1), (events.SaveEvent, 2)]


def test_a_refused_save_is_reported(tmp_path, kept):
    with manager(tmp_path, kept) as saver:
        saver.save(5, new_state())
        with pytest.raises(errors.OptionError):
            saver.save(5, new_state())
    assert [getattr(event, "code", None) for event in kept.received] == [None, "option"]


def test_a_wait_timeout_is_not_a_failure_and_the_save_is_reported(tmp_path, kept):
    choice = deltackpt.policies.CodecChoice(base="bf16")
    options = {"base_snapshot": "block", "timeouts": deltackpt.Timeouts(save_secs=0.05)}
    with paused_saves(tmp_path) as held, manager(tmp_path, kept, codec=choice, **options) as saver:
        with pytest.raises(errors.WaitTimeout):
            saver.save(1, new_state())
        held.release()
    assert [type(event) for event in kept.received] == [events.SaveEvent]


def test_a_failed_step_is_not_a_checkpoint_for_ray():
    pytest.importorskip("ray")
    from deltackpt.service import jax_trainer

    reported = []
    with (
        mock.patch.object(jax_trainer, "check_processes"),
        mock.patch.multiple(
            jax_trainer.ray.train,
            get_context=mock.Mock(**{"return_value.get_world_rank.return_value": 0}),
            get_checkpoint=lambda: None,
            report=lambda metrics, checkpoint=None: reported.append(metrics),
        ),
    ):
        session = jax_trainer.Session("/data/run")
        session.receive(FAILURE)
        session.report({"loss": 0.5})
        for event in (RESTORE, SKIP, replace(APPEND, step=1300), replace(UPLOAD, step=900)):
            session.receive(event)
        session.report({"loss": 0.25})
    assert reported == [{"loss": 0.5}, {"loss": 0.25, "checkpoint_step": 1200}]


def test_a_restore_reports_its_stages(tmp_path, kept):
    state = train(tmp_path)
    with manager(tmp_path, kept, access="read") as reader:
        found = reader.restore_latest(state)
    (event,) = kept.received
    assert event.total_secs == found.seconds
    stages = (event.find_secs, event.read_secs, event.place_secs)
    assert all(secs > 0 for secs in stages)
    assert sum(stages) == pytest.approx(event.total_secs)


def damage(root: Path, step: int) -> None:
    (root / str(step) / "embeddings/manifest.0.msgpack").write_bytes(b"")


def test_a_skipped_step_is_reported_before_the_restored_one(tmp_path, caplog, kept):
    state = train(tmp_path)
    damage(tmp_path, 2)
    with caplog.at_level(logging.INFO, logger="deltackpt.events"):
        with manager(tmp_path, kept, access="read") as reader:
            with pytest.warns(UserWarning, match="step 2 is skipped"):
                reader.restore_latest(state)
    skipped, restored = kept.received
    assert skipped.message and skipped.message not in caplog.text  # the warning has it
    assert (skipped.operation, skipped.step, skipped.code) == ("skip", 2, "damaged")
    assert restored.step == 1
    assert levels(caplog) == [logging.WARNING, logging.INFO]


def test_a_directory_without_an_intact_step_is_reported(tmp_path, kept):
    state = train(tmp_path)
    for step in (1, 2):
        damage(tmp_path, step)
    with manager(tmp_path, kept, access="read") as reader:
        with pytest.warns(UserWarning, match="is skipped"), pytest.raises(errors.NoIntactStep):
            reader.restore_latest(state)
        with pytest.raises(errors.Damaged):
            reader.restore(2, state)
    assert [(event.operation, event.step, event.code) for event in kept.received] == [
        ("skip", 2, "damaged"),
        ("skip", 1, "damaged"),
        ("restore", None, "no-intact-step"),
        ("restore", 2, "damaged"),
    ]


def test_a_mismatched_abstract_state_fails_the_restore_and_skips_no_step(tmp_path, kept):
    state = train(tmp_path)
    state["tables"]["words"] = jnp.zeros((4000, 8))
    with manager(tmp_path, kept, access="read") as reader:
        with pytest.raises(errors.TemplateMismatch):
            reader.restore_latest(state)
    assert [(event.operation, event.step) for event in kept.received] == [("restore", 2)]


@given(spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_a_stage_is_timed_while_at_least_one_thread_is_in_it(spans):
    edges = sorted(
        [(start, 1) for start, _ in spans] + [(start + length, -1) for start, length in spans],
        key=lambda edge: (edge[0], -edge[1]),
    )
    busy = {second for start, length in spans for second in range(start, start + length)}
    clock = BusyClock()
    with mock.patch("deltackpt.save.capture.time.perf_counter") as now:
        for now.return_value, change in edges:
            if change > 0:
                clock.__enter__()
            else:
                clock.__exit__()
    assert clock.seconds == len(busy)


def test_pieces_pass_through_the_clock_unchanged():
    clock = BusyClock()
    rows = [np.full((4, 2), number, np.float32) for number in range(3)]
    found = [piece.host() for piece in clock.over(HostPiece(one) for one in rows)]
    assert all(mine is theirs for mine, theirs in zip(found, rows, strict=True))
    assert clock.seconds > 0


METRIC = re.compile(r"(deltackpt_\w+)(?:\{([^}]*)\})?")
#: Labels that Prometheus adds to scraped samples or to histograms.
OF_PROMETHEUS = {"job", "le"}
BY = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, set[str]]:
    """Maps sample names to labels after saves, a restore, failures, an append and an upload."""
    root, registry = tmp_path_factory.mktemp("run"), Registry()
    handler = events.PrometheusHandler(registry)
    state = train(root, handler, codec=deltackpt.policies.CodecChoice(delta="int4"))
    with manager(root, handler) as saver:
        with mock.patch("deltackpt.save.pending_save.require_room", no_room):
            with pytest.raises(errors.OutOfSpace):
                saver.save(3, state)
        damage(root, 2)
        with pytest.warns(UserWarning, match="is skipped"):
            saver.restore_latest(state)
        with pytest.raises(errors.Damaged):
            saver.restore(2, state)
    # Other tests cover runs with a WAL or a bucket.
    handler.receive(APPEND)
    handler.receive(UPLOAD)
    samples = (sample for metric in registry.collect() for sample in metric.samples)
    return {sample.name: set(sample.labels) for sample in samples}


def wrong_names(expressions: list[str], exported: dict[str, set[str]]) -> list[str]:
    """Metrics and labels in the expressions that are not exported."""
    found = []
    for expression in expressions:
        names = METRIC.findall(expression)
        found += [name for name, _ in names if name not in exported]
        known = set.intersection(*(exported.get(name, set()) for name, _ in names))
        used = [label for _, labels in names for label in re.findall(r"(\w+)\s*[=!]", labels)]
        used += re.findall(r"\w+", " ".join(BY.findall(expression)))
        found += [f"{label} in {expression}" for label in {*used} - known - OF_PROMETHEUS]
    return found


def test_the_dashboard_uses_only_exported_metrics(exported):
    board = json.loads(DASHBOARD.read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    for target in targets:
        known = set.intersection(*(exported[name] for name, _ in METRIC.findall(target["expr"])))
        legend = re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))
        grouped = set(re.findall(r"\w+", " ".join(BY.findall(target["expr"])))) - {"le"}
        assert set(legend) <= (grouped or known), target
    expressions = [target["expr"] for target in targets] + [
        variable["query"].removeprefix("label_values(")
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    ]
    assert len(expressions) > 10 and wrong_names(expressions, exported) == []


def test_every_metric_is_on_the_dashboard_or_explained_on_the_page(exported):
    page, board = PAGE.read_text(), DASHBOARD.read_text()
    ends = re.compile(r"_(total|bucket|sum|count|created)$")
    for name in {ends.sub("", name) for name in exported}:
        assert name in page, name
    for name in ("save_seconds", "saved_rows", "saved_ratio", "relative_error", "failures"):
        assert f"deltackpt_{name}" in board


def test_the_alerts_on_the_page_use_only_exported_metrics(exported):
    page = (REPOSITORY / "docs" / "how-to" / "monitoring.md").read_text()
    until = r"\n +(?:for|labels|annotations):"
    expressions = re.findall(rf"^ +expr: (?:>-\s+)?(.+?){until}", page, re.MULTILINE | re.DOTALL)
    assert len(expressions) == page.count("expr:") >= 4
    assert wrong_names(expressions, exported) == []


def test_every_figure_is_explained_on_the_page():
    page = PAGE.read_text()
    for event in EVENTS:
        for field in dataclasses.fields(event):
            assert f"| `{field.name}` |" in page, field.name
    for name in events.TableFigures._fields:
        assert f"| `{name}` |" in page, name
