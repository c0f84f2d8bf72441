# SPDX-License-Identifier: Apache-2.0
"""The report: one self-contained page that shows first what matters."""

from __future__ import annotations

import html
import html.parser
import json
import os
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import pytest
from test_cli import run
from test_compact import run_compaction, write_chain
from test_plots import MadeUp
from test_wal_inspection import write as write_log

from deltackpt import inspect
from deltackpt.errors import StorageError
from deltackpt.format import naming
from deltackpt.inspect import report
from deltackpt.testing import stored_chunks
from deltackpt.units import size


class Page(html.parser.HTMLParser):
    """The text of a page, and the resources that it would request."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: set[str] = set()
        self.asked: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name == "alt":
                self.text += value
            if name in ("src", "href", "xlink:href", "action", "data") and value:
                self.asked.append(value)

    def handle_data(self, data):
        self.text += data


def test_page_is_self_contained_and_small_for_1000_saves_of_200_tables(tmp_path):
    path = tmp_path / "report.html"
    written = report.write(MadeUp(1000, 200, codec="adaptive4", base_every=100), path)
    page = Page(path)
    assert written.nbytes == path.stat().st_size < 3_000_000
    assert (written.steps, written.newest, written.restorable) == (1000, 20_000, 20_000)
    assert written.warnings == ()
    assert not page.tags & {"script", "link", "iframe", "object"}
    assert all(asked.startswith(("#", "data:")) for asked in page.asked)
    assert len(page.ids) == len(set(page.ids))
    assert all(asked[1:] in page.ids for asked in page.asked if asked.startswith("#"))
    assert "default-src 'none'" in path.read_text()


def test_page_shows_what_the_directory_holds(tmp_path):
    write_chain(tmp_path / "run")
    ck = inspect.open(tmp_path / "run")
    written = report.write(ck, tmp_path / "report.html")
    assert (written.newest, written.restorable, written.warnings) == (4, 4, ())
    assert written.nbytes < 120_000
    text = Page(tmp_path / "report.html").text
    for said in ("5", "1 base, 4 deltas", "a base and 4 deltas, by manifests", "tables/users"):
        assert said in text
    assert "700 × 8" in text and "accumulator" in text


def test_compacted_bases_are_counted_and_their_reads_are_reported(tmp_path):
    write_chain(tmp_path / "run")
    run_compaction(tmp_path / "run", 3)
    ck = inspect.open(tmp_path / "run")
    assert report.write(ck, tmp_path / "report.html").compacted == 1
    text = Page(tmp_path / "report.html").text
    base = sum(p.stat().st_size for p in (tmp_path / "run/compacted/3").rglob("*") if p.is_file())
    saved = sum(save.disk_bytes for save in ck.saves)
    newest = ck.saves[-1].disk_bytes
    on_disk = f"{size(newest)} for the newest step, {size(base)} for 1 compacted base"
    assert f"on disk{size(saved + base)}{on_disk}" in text
    assert "a compacted base and 1 delta, by manifests" in text
    title = f"5 saves: 1 base, 4 deltas; 1 compacted base; {size(saved + base)} on disk"
    assert title in text


def test_counts_agree_between_card_picture_and_table(tmp_path):
    ck = MadeUp(12, 2)
    for number in (8, 9, 10):
        ck.with_save(number, problem="its chain is broken")
    ck.with_save(11, kind=None, parent=None, tables=(), problem="no manifest")
    report.write(ck, tmp_path / "report.html")
    page = Page(tmp_path / "report.html").text
    assert page.count("1 base, 10 deltas, 1 unreadable; 3 broken chains") == 2
    assert page.count("its chain is broken") == 2 * 3 and page.count("no manifest") == 2


def test_page_begins_with_the_step_that_cannot_be_restored(tmp_path):
    write_chain(tmp_path / "run")
    (tmp_path / "run" / "4" / "embeddings" / naming.manifest_name(0)).unlink()
    written = report.write(inspect.open(tmp_path / "run"), tmp_path / "report.html")
    assert (written.newest, written.restorable) == (4, 3)
    assert written.warnings[0] == "Step 4 cannot be restored; the newest that can is 3."
    assert "manifest" in written.warnings[1]
    assert written.warnings[0] in Page(tmp_path / "report.html").text


def test_page_shows_the_wal_and_the_dense_leaves(tmp_path):
    write_log(tmp_path / "run")
    written = report.write(inspect.open(tmp_path / "run"), tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert written.warnings == () and {"dense", "wal"} <= {*page.ids}
    point = next(one for one in inspect.open(tmp_path / "run").recovery_points() if one.full)
    assert f"newest recovery point{point.step}appended" in page.text
    assert "recovery point 5 of epoch 0, step 3" in page.text and "resumed from" in page.text
    assert "dense/kernel" in page.text and "placeholder without a value" in page.text


def test_damage_outside_the_tables_costs_a_section_and_not_the_page(tmp_path):
    write_log(tmp_path / "run")
    head = max((tmp_path / "run" / "log").glob("*.msgpack"))
    for path in (head, *(tmp_path / "run" / "log").glob("*/head.msgpack")):
        path.write_bytes(b"nothing")
    for chunk in stored_chunks(tmp_path / "run" / "3", "*", segment="dense.plain"):
        chunk.flip()
    written = report.write(inspect.open(tmp_path / "run"), tmp_path / "report.html")
    assert any("dense leaves are not shown" in text for text in written.warnings)
    assert any("valid recovery points cannot be determined" in text for text in written.warnings)
    assert "tables/users" in Page(tmp_path / "report.html").text


def test_damaged_rows_cost_a_picture_and_not_the_page(tmp_path):
    write_chain(tmp_path / "run")
    for step in ("1", "2"):
        for file in (tmp_path / "run" / step).rglob("layer.*"):
            file.write_bytes(b"")
    written = report.write(inspect.open(tmp_path / "run"), tmp_path / "report.html")
    assert any("is left out" in warning for warning in written.warnings)
    assert "deltackpt verify reads every byte" in Page(tmp_path / "report.html").text


@pytest.mark.parametrize("saves", [0, 1])
def test_a_directory_with_at_most_one_step_has_a_page(tmp_path, saves):
    written = report.write(MadeUp(saves, saves), tmp_path / "report.html")
    assert written.steps == saves
    assert written.warnings == (() if saves else ("No step was saved yet.",))


def test_names_are_text_on_the_page(tmp_path):
    name = "<script>alert('$x$')</script>&\"_"
    report.write(MadeUp(5, 2, prefix=name), tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert "script" not in page.tags
    assert f"{name}C1" in page.text


def test_failed_write_keeps_the_old_page(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("before")

    def refuse(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StorageError, match="report.html"):
            report.write(MadeUp(2, 1), path)
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["report.html"]
    with pytest.raises(StorageError):
        report.write(MadeUp(2, 1), tmp_path / "missing" / "report.html")


def test_command_writes_the_page_and_reports_what_matters(tmp_path):
    write_chain(tmp_path / "run")
    path = tmp_path / "page.html"
    found = run("report", tmp_path / "run", "-o", path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"{path}: 5 steps, ") and path.exists()
    found = run("report", tmp_path / "run", "-o", path, "--json")
    told = json.loads(found.stdout)
    assert (told["newest"], told["restorable"], told["warnings"]) == (4, 4, [])
    found = run("report", tmp_path / "nothing")
    assert found.returncode == 1 and found.stderr.count("\n") == 1
    assert "deltackpt report /data/run-17" in run("report", "--help").stdout


@pytest.fixture
def chromium(tmp_path):
    """Runs headless Chromium on a page without a network; returns its output."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")

    def show(page: Path, *flags: str) -> str:
        found = subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,2600"),
                *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr"),
                *(*flags, page.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "HOME": str(tmp_path)},
        )
        assert found.returncode == 0, found.stderr
        return found.stdout + found.stderr

    return show


@pytest.mark.processes
def test_browser_shows_the_page_without_complaint(tmp_path, chromium):
    page = tmp_path / "report.html"
    report.write(MadeUp(60, 12, codec="adaptive4"), page)
    # Chromium logs everything that the page's policy or the network refuses to the console.
    said = chromium(page, "--dump-dom", "--virtual-time-budget=5000")
    assert "CONSOLE" not in said and "image/svg+xml" in said
    asking = tmp_path / "asking.html"
    asking.write_text(page.read_text().replace("<h1>", '<img src="https://no.test/x.png"><h1>'))
    assert "CONSOLE" in chromium(asking, "--dump-dom", "--virtual-time-budget=5000")
    shot = tmp_path / "shot.png"
    chromium(page, f"--screenshot={shot}")
    image = matplotlib.image.imread(shot)
    # Ink and plots differ from the paper.
    assert (abs(image[..., :3] - image[5, 5, :3]).max(axis=-1) > 0.3).mean() > 0.01
