# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: reports are correct, and each benchmark runs at a small scale."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import pytest
import report as reports
import restore_service
from report import Report, Sample, ratio, secs

BENCHMARKS = Path(reports.__file__).parent


def test_ratios_are_computed_round_by_round():
    ours, theirs = Sample((1.0, 2.0, 30.0)), Sample((10.0, 20.0, 300.0))
    assert ours.over(theirs).values == (0.1, 0.1, 0.1)
    assert ours.median == 2.0


def test_ratios_are_shown_as_fractions_below_a_half():
    assert ratio(1 / 18) == "1/18.0"
    assert ratio(0.75) == "x 0.75"
    assert secs(0.0123) == "12.3 ms"


def test_json_reports_which_bars_hold(tmp_path, capsys):
    report = Report("title", sizes="sizes")
    report.compare("met", Sample((1.0,)), "them", Sample((4.0,)), secs, bar=0.5)
    report.compare("missed", Sample((3.0,)), "them", Sample((4.0,)), secs, bar=0.5)
    report.state("stated", Sample((7.0,)), secs)
    report.show(tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == [
        {"name": "met against them", "ratio": 0.25, "bar": 0.5, "holds": True},
        {"name": "missed against them", "ratio": 0.75, "bar": 0.5, "holds": False},
        {"name": "stated", "ratio": 7.0, "bar": None, "holds": True},
    ]
    assert "missed" in capsys.readouterr().out


def test_a_save_that_the_service_never_showed_counts_until_the_next_one_shown():
    found, unseen = restore_service.lags({1: 10.0, 2: 11.0, 3: 12.0}, {1: 0.5, 3: 0.25})
    assert found == [0.5, 1.25, 0.25]
    assert unseen == 1


def test_markdown_has_a_line_for_each_row_and_no_markup():
    report = Report("title", sizes="sizes")
    report.compare("met", Sample((1.0,)), "them", Sample((4.0,)), secs, bar=0.5)
    report.state("stated", Sample((7.0,)), secs)
    assert report.markdown().splitlines()[2:] == [
        "| met | 1.00 s | them | 4.00 s | 1/4.0 | x 0.50 holds |",
        "| stated | 7.00 s |  |  |  |  |",
    ]


@pytest.mark.long
@pytest.mark.drawn("benchmarks", 2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("plain.py", ["--scale", "0.01", "--repeats", "1", "--steps", "40"]),
        ("save_restore.py", ["--scale", "0.01", "--repeats", "1"]),
        (
            "accuracy.py",
            ["--steps", "8", "--seeds", "2", "--restores", "2", "--codecs", "adaptive2"],
        ),
        (
            "bases.py",
            ["--scale", "0.01", "--repeats", "1", "--modes", "hold", "compacted", "rolling 8"],
        ),
        (
            "buckets.py",
            ["--scale", "0.01", "--repeats", "1", "--saves", "2", "--interval", "0.1"],
        ),
        ("extents.py", ["--scale", "0.1", "--repeats", "1"]),
        ("kafka_wal.py", ["--scale", "0.01", "--repeats", "1"]),
        ("codecs.py", ["--scale", "0.01", "--repeats", "1", "--steps", "5"]),
        ("gpu.py", ["--allow-cpu", "--scale", "0.01", "--repeats", "1", "--steps", "6"]),
        ("soak.py", ["--scale", "0.001", "--repeats", "1", "--saves", "8"]),
        ("step.py", ["--scale", "0.01", "--repeats", "1"]),
        ("scaling.py", ["--scale", "0.02", "--repeats", "1", "--processes", "1", "2"]),
        ("cycles.py", ["--scale", "0.01", "--repeats", "1"]),
        (
            "interference.py",
            [
                "--scale",
                "0.02",
                "--repeats",
                "1",
                "--steps",
                "8",
                "--every",
                "4",
                "--step-ms",
                "200",
            ],
        ),
        ("log.py", ["--quick"]),
        ("many.py", ["--scale", "0.01", "--repeats", "1", "--steps", "6"]),
        ("nodes.py", ["--scale", "0.02", "--repeats", "1"]),
        ("inspect_rows.py", ["--scale", "0.01", "--repeats", "1", "--steps", "6"]),
        ("vocab.py", ["--scale", "0.01", "--repeats", "2"]),
        ("restore_service.py", ["--scale", "0.01", "--repeats", "1", "--sizes", "1"]),
        ("service_memory.py", ["--scale", "0.01", "--sizes", "1"]),
        (
            "dense.py",
            ["--only", "bytes", "w", "--models", "adafactor", "--size", "tiny", "--batch", "1"]
            + ["--first", "2", "--gap", "1", "--more", "1", "--scale", "0.01", "--repeats", "1"],
        ),
        (
            "tiers.py",
            ["--scale", "0.01", "--repeats", "1", "--iterations", "2", "--processes", "1", "2"],
        ),
        ("thesis.py", ["--quick"]),
        ("tracking.py", ["--scale", "0.01", "--repeats", "2", "--batch", "64"]),
        (
            "training.py",
            ["--scale", "0.01", "--repeats", "1", "--batch", "64", "--steps", "4", "--every", "2"],
        ),
        ("web_scale.py", ["--hosts", "12", "--hours", "0.5", "--repeats", "2"]),
    ],
)
def test_benchmark_runs_at_a_small_scale(tmp_path, name, arguments):
    path, table = tmp_path / "out.json", tmp_path / "out.md"
    places = [f"--directory={tmp_path}", f"--json={path}", f"--markdown={table}"]
    # The tests' virtual devices would share the two cores.
    environment = os.environ | {"XLA_FLAGS": ""}
    subprocess.run(
        [sys.executable, BENCHMARKS / name, *arguments, *places], check=True, env=environment
    )
    entries = json.loads(path.read_text())
    assert entries
    assert all(set(entry) == {"name", "ratio", "bar", "holds"} for entry in entries)
    assert table.read_text().count("\n|") > 2
