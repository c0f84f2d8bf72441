# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from command import run
from test_compact import chain, write_chain

from deltackpt import cli
from deltackpt.cli import arguments
from deltackpt.upkeep import compact


def test_compact_merges_the_newest_step_and_reports_it(tmp_path):
    write_chain(tmp_path)
    found = run("compact", tmp_path, "--workers", 2, "--memory", "64MiB")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("step 4: merged 4 deltas into a base of ")
    assert chain(tmp_path, 4) == ["compacted/4/embeddings"]
    found = run("compact", tmp_path)
    assert (found.returncode, found.stdout) == (
        0,
        "nothing to compact: the chain of the step is only a base\n",
    )


def test_compact_prints_json_on_request(tmp_path):
    write_chain(tmp_path)
    found = run("compact", tmp_path, "--step", 2, "--json")
    assert found.returncode == 0 and found.stderr == ""
    told = json.loads(found.stdout)
    assert (told["step"], told["deltas"], told["save_id"]["step"]) == (2, 2, 2)
    assert json.loads(run("compact", tmp_path, "--step", 2, "--json").stdout) is None


def test_errors_are_one_line_with_their_code_and_an_exit_code(tmp_path):
    write_chain(tmp_path)
    with compact.exclusive(tmp_path):
        found = run("compact", tmp_path)
    assert (found.returncode, found.stdout) == (75, "")
    assert found.stderr.endswith("[already-compacting]\n") and found.stderr.count("\n") == 1
    found = run("compact", tmp_path, "--step", 99)
    assert found.returncode == 1 and found.stderr.endswith("[step-not-found]\n")
    assert found.stderr.count("\n") == 1
    assert run("compact", tmp_path, "--memory", "much").returncode == 2
    assert run("compact").returncode == 2


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1GiB", 1 << 30), ("512M", 512 << 20), ("1.5k", 1536), ("77", 77)]
)
def test_sizes_have_units(text, nbytes):
    assert arguments.Size().convert(text, None, None) == nbytes


@pytest.mark.processes
def test_help_has_examples_and_needs_neither_jax_nor_ray():
    found = CliRunner().invoke(cli.cli, ["compact", "--help"])
    assert "deltackpt compact /data/run-17" in found.output
    program = (
        "import sys, deltackpt.cli;"
        "print([m for m in ('jax', 'ray', 'orbax', 'tensorstore') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
