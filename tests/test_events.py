# SPDX-License-Identifier: Apache-2.0
"""Events: one log record each, every sink told, and figures that Prometheus can scrape."""

from __future__ import annotations

import dataclasses
import logging
import sys

import pytest

from deltackpt import errors, events


def save_event(**changes) -> events.SaveEvent:
    event = events.SaveEvent(
        step=1200,
        kind="delta",
        reason="delta 3 of at most 50 in the chain",
        process=2,
        rows=500,
        total_rows=10_000,
        bytes_written=130_000,
        ratio=0.05,
        blocked_secs=0.01,
        extract_secs=0.008,
        write_secs=0.05,
        digest_secs=0.002,
        total_secs=0.11,
    )
    return dataclasses.replace(event, **changes)


def restore_event() -> events.RestoreEvent:
    return events.RestoreEvent(
        step=1200, process=0, chain=(1000, 1200), source="storage", bytes_read=4096, seconds=0.25
    )


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self):
        self.received = []

    def receive(self, event):
        self.received.append(event)


class Refusing:
    """A sink that fails."""

    def receive(self, event):
        raise ConnectionError("gateway is down")


@pytest.mark.parametrize("event", [save_event(), restore_event()], ids=["save", "restore"])
def test_an_event_is_one_record_with_every_figure_and_the_process(event, caplog):
    with caplog.at_level(logging.INFO, logger="deltackpt"):
        events.emit(event)
    (record,) = caplog.records
    assert record.name == "deltackpt.events"
    assert record.event is event
    assert record.process_index == event.process
    line = record.getMessage()
    assert line.startswith(f"process {event.process}: ")
    assert "\n" not in line
    for field in dataclasses.fields(event):
        if field.name not in ("process", "tables"):
            assert f" {field.name}=" in line


def test_a_reason_with_a_line_break_stays_one_line(caplog):
    with caplog.at_level(logging.INFO, logger="deltackpt"):
        events.emit(save_event(reason="one\ntwo"))
    assert "\n" not in caplog.records[0].getMessage()


def test_every_sink_is_told_once_in_order():
    sinks = [Kept(), Kept()]
    told = [save_event(step=1), save_event(step=2), restore_event()]
    for event in told:
        events.emit(event, sinks)
    assert [sink.received for sink in sinks] == [told, told]


def test_a_failing_sink_is_reported_and_does_not_silence_the_others():
    kept = Kept()
    with pytest.warns(RuntimeWarning, match="ConnectionError at the save of step 1200: gateway"):
        events.emit(save_event(), [Refusing(), kept])
    assert len(kept.received) == 1


def test_events_cannot_be_changed_by_a_sink():
    with pytest.raises(dataclasses.FrozenInstanceError):
        save_event().step = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_prometheus_counts_saves_and_restores_by_process():
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    sink = events.PrometheusSink(registry)
    for step in (1200, 1300):
        events.emit(save_event(step=step), [sink])
    events.emit(restore_event(), [sink])

    save = {"process": "2", "kind": "delta"}
    assert registry.get_sample_value("deltackpt_saves_total", save) == 2
    assert registry.get_sample_value("deltackpt_saved_rows_total", save) == 1000
    assert registry.get_sample_value("deltackpt_saved_bytes_total", save) == 260_000
    stages = {
        stage: registry.get_sample_value("deltackpt_save_seconds_sum", {**save, "stage": stage})
        for stage in ("blocked", "extract", "write", "digest", "total")
    }
    assert stages == pytest.approx(
        {"blocked": 0.02, "extract": 0.016, "write": 0.1, "digest": 0.004, "total": 0.22}
    )
    assert registry.get_sample_value("deltackpt_last_saved_step", {"process": "2"}) == 1300
    restore = {"process": "0", "source": "storage"}
    assert registry.get_sample_value("deltackpt_restores_total", restore) == 1
    assert registry.get_sample_value("deltackpt_restored_bytes_total", restore) == 4096


def test_prometheus_sink_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(errors.OptionError, match=r"deltackpt\[metrics\]"):
        events.PrometheusSink()
