# SPDX-License-Identifier: Apache-2.0
"""The docs notebook: it runs from top to bottom on any machine, and has its outputs."""

from __future__ import annotations

import os
import subprocess
import sys

import nbformat
import pytest

NOTEBOOK = "docs/tutorials/inspecting.ipynb"
PLOTS = ("timeline", "chain_lengths", "touched_fraction", "activity", "drift", "codec_error")


@pytest.fixture(scope="module")
def kept(repository):
    return nbformat.read(repository / NOTEBOOK, as_version=4)


@pytest.mark.processes
def test_a_fresh_run_of_the_notebook_shows_what_the_committed_one_shows(kept, repository, tmp_path):
    command = [sys.executable, "tools/run_notebook.py", NOTEBOOK, "--pictures", tmp_path]
    # An empty home directory: no kernel of the user may be needed.
    found = subprocess.run(
        [*command, "--output", tmp_path / "fresh.ipynb"],
        cwd=repository,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert found.returncode == 0, found.stderr
    fresh = nbformat.read(tmp_path / "fresh.ipynb", as_version=4)
    assert [cell.source for cell in fresh.cells] == [cell.source for cell in kept.cells]
    for left, right in zip(fresh.cells, kept.cells):
        assert kinds(left) == kinds(right), left.source
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"inspecting-{name}.png" for name in PLOTS
    }


def kinds(cell) -> list:
    """Kinds of a cell's outputs; the values differ between machines in the last bits."""
    return [
        (output.output_type, sorted(output.get("data", ()))) for output in cell.get("outputs", ())
    ]


def test_committed_notebook_is_complete_small_and_machine_independent(kept, repository):
    nbformat.validate(kept)
    text = (repository / NOTEBOOK).read_text()
    assert len(text) < 1_500_000
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any("/home/" in text or "/tmp/" in text for text in text.splitlines())
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)


def test_pictures_of_the_docs_are_those_of_the_notebook(repository):
    for name in PLOTS:
        assert (repository / "docs" / "assets" / f"inspecting-{name}.png").stat().st_size < 200_000
