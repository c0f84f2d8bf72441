# SPDX-License-Identifier: Apache-2.0
"""The pages: their Python runs, their links lead somewhere, every error has its row."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import deltackpt.inspect as inspect_checkpoints
from deltackpt import errors

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
BLOCK = re.compile(r"(?<!<!-- fragment -->\n)^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def run_blocks(page: Path) -> None:
    namespace = {"__name__": name(page)}
    for block in BLOCK.finditer(page.read_text()):
        line = page.read_text()[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=name)
def test_python_on_a_page_runs_from_top_to_bottom_and_again_where_it_ended(
    page, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run_blocks(page)
    if "CheckpointManager(" in page.read_text() or any(tmp_path.iterdir()):
        run_blocks(page)  # As a run that was stopped goes on.


def test_the_readme_s_loop_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(REPOSITORY / "README.md")
    shutil.rmtree(tmp_path / "checkpoints" / "20")  # As if it had been stopped before that.
    run_blocks(REPOSITORY / "README.md")
    found = inspect_checkpoints.open(tmp_path / "checkpoints")
    assert [(save.step, save.chain_length) for save in found.saves] == [(0, 0), (10, 1), (20, 2)]
    assert not (tmp_path / "checkpoints" / "rolled-back").exists()
    assert found.at(20)["bias"][0] == np.float32(sum([np.float32(0.1)] * 21, np.float32(0)))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_lead_to_a_file(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = [
        target
        for target in LINK.findall(prose)
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_error_has_a_row_in_troubleshooting():
    page = (REPOSITORY / "docs" / "guide" / "troubleshooting.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| `(\w+)` \|", page, re.MULTILINE))
    classes = {
        value.code: value.__name__
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.DeltackptError)
    }
    assert rows == classes
