# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: reports are correct, pages show results, and each benchmark runs when small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import pytest
import report as reports
import run
import tables
from report import Report, Sample, ratio, secs

_ROOT = Path(__file__).resolve().parents[1]
#: Figures in tables that are limits, defaults, inputs or estimates, and in prose those of a setup.
NOT_MEASURED = {
    "docs/how-to/standby.md": {"300 MB"},
    "docs/project/benchmarks.md": {"0.5 s", "5 MB"},
    "docs/project/design.md": {"0.15 GB", "0.4 MB", "0.5 GB", "10 GB"},
    "docs/project/security.md": {"20 s", "5 s"},
    "docs/project/web-scale.md": {
        *("0.1 ms", "0.11 s", "0.2 GB/s", "0.31 s", "0.7 ms", "1 s", "11 ms", "2.6 GB/s"),
        *("3.1 GB/s", "30 ms", "37 ms", "7 s", "73 ms"),
    },
    "docs/reference/options.md": {"2 ms"},
    "docs/tutorials/language-model.md": {"1/4"},
}
#: Pages whose whole text quotes results only.
WHOLE = {"README.md", "docs/project/benchmarks.md"}


def written(report: Report, path: Path) -> dict:
    """The result of a report."""
    report.show(reports.arguments(None).parse_args([f"--json={path}", "--repeats=1"]))
    return json.loads(path.read_text())


def small_report() -> Report:
    report = Report("title", sizes="sizes")
    report.compare("met", Sample((1.0,)), "them", Sample((4.0,)), secs, bar=0.5)
    report.compare("missed", Sample((3.0,)), "them", Sample((4.0,)), secs, bar=0.5)
    report.state("stated", Sample((7.0,)), secs)
    report.publish("table", ("a", "b"), [["one", (Sample((2.0, 1.0, 3.0)), secs)]], "A remark.")
    return report


def test_ratios_are_computed_round_by_round():
    ours, theirs = Sample((1.0, 2.0, 30.0)), Sample((10.0, 20.0, 300.0))
    assert ours.over(theirs).values == (0.1, 0.1, 0.1)
    assert ours.median == 2.0


def test_ratios_are_shown_as_fractions_below_a_half():
    assert ratio(1 / 18) == "1/18.0"
    assert ratio(0.75) == "x0.75"
    assert secs(0.0123) == "12.3 ms"


def test_ranges_name_a_shared_unit_once():
    assert Sample((0.02, 0.01, 0.03)).shown(secs) == "20 ms (10–30)"
    assert Sample((0.5, 0.4, 2.0)).shown(secs) == "500 ms (400 ms–2.00 s)"
    assert Sample((0.01, -0.1, 0.03)).shown(secs) == "10 ms (-100 to 30)"
    assert Sample((1.5, 1.25, 2.0)).shown(ratio) == "x1.50 (1.25–2.00)"


def test_a_result_reports_which_bars_hold(tmp_path, capsys):
    found = written(small_report(), tmp_path / "out.json")
    assert found["bars"] == [
        {"name": "met against them", "ratio": 0.25, "bar": 0.5, "holds": True},
        {"name": "missed against them", "ratio": 0.75, "bar": 0.5, "holds": False},
        {"name": "stated", "ratio": 7.0, "bar": None, "holds": True},
    ]
    assert "missed" in capsys.readouterr().out


def test_a_result_names_commit_machine_load_and_versions(tmp_path):
    found = written(small_report(), tmp_path / "out.json")
    assert set(found) > {"commit", "clean", "date", "command", "secs"}
    assert set(found["machine"]) == {"cpu", "cores", "memory_gib"}
    assert len(found["load"]) == 2
    assert {"python", "jax", "orbax-checkpoint"} <= set(found["versions"])


def test_rounds_take_turns_and_the_first_does_not_count():
    calls: list[str] = []

    def measure(name: str) -> dict[str, float]:
        calls.append(name)
        return {"secs": float(len(calls))}

    candidates = {name: lambda name=name: measure(name) for name in "ab"}
    found = reports.interleaved(2, candidates)
    assert "".join(calls) == "ababab"
    assert found("b", "secs").values == (4.0, 6.0)


def test_a_page_shows_what_a_result_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    written(small_report(), tmp_path / "small.json")
    page = tables.rewritten("<!-- results small table -->\nold\n<!-- end of results -->\nprose")
    lines = page.splitlines()
    assert lines[1:4] == ["| a | b |", "| --- | --- |", "| one | 2.00 s (1.00–3.00) |"]
    assert "Commit" in lines[5]
    assert lines[-4:] == ["", "A remark.", "<!-- end of results -->", "prose"]
    assert tables.rewritten(page) == page


def test_pages_equal_the_results():
    differing = [
        page for page in tables.pages() if tables.rewritten(page.read_text()) != page.read_text()
    ]
    assert not differing, "run `python tools/tables.py`"


def test_pages_quote_no_figure_that_no_result_holds():
    for page in tables.pages():
        name = page.relative_to(_ROOT).as_posix()
        found = tables.unheld(page, prose=name in WHOLE) - NOT_MEASURED.get(name, set())
        assert not found, f"{name}: expected figures of benchmarks/results, found {sorted(found)}"


def test_results_say_how_to_repeat_them():
    for path in tables.RESULTS.glob("*.json"):
        found = tables.result(path.stem)
        if path.stem in run.BENCHMARKS:
            command = run.BENCHMARKS[path.stem].command
            assert found["command"].startswith(f"python benchmarks/{command.split()[0]}"), path.name
        else:
            # Recorded by hand: long crash tests, and measurements without a script.
            assert "recorded" in found, path.name


@pytest.mark.long
@pytest.mark.drawn("benchmarks", 2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", run.BENCHMARKS)
def test_benchmark_runs_at_a_small_scale(tmp_path, name):
    tiny = run.BENCHMARKS[name].tiny.split()
    assert run.run(name, *tiny, f"--directory={tmp_path}", results=tmp_path)
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert all(set(bar) == {"name", "ratio", "bar", "holds"} for bar in found["bars"])
    assert found["bars"] and found["rows"]
    for table in found["tables"].values():
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
