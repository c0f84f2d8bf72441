# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import jax.numpy as jnp
import pytest
from command import run
from test_compact import chain, write_chain

import deltackpt
from deltackpt import cli
from deltackpt.cli import (
    daemons,
    exchange,
    inspect_commands,
    maintenance_commands,
    service,
    terminal,
)
from deltackpt.inspect.listing import Listing
from deltackpt.maintenance import compact


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


def test_every_command_of_the_modules_is_listed():
    found = set()
    for module in (daemons, exchange, inspect_commands, maintenance_commands, service):
        held = vars(module).values()
        top = {one.name for one in held if isinstance(one, click.Command)}
        inner = {name for one in held if isinstance(one, click.Group) for name in one.commands}
        found |= top - inner
    assert found == {*cli.cli.list_commands(click.Context(cli.cli))}
    listed = run("--help").stdout
    assert "..." not in listed.partition("Commands:")[2]  # No summary is cut off.


def test_compact_prints_json_on_request(tmp_path):
    write_chain(tmp_path)
    found = run("compact", tmp_path, 2, "--json")
    assert found.returncode == 0 and found.stderr == ""
    told = json.loads(found.stdout)
    assert (told["step"], told["deltas"], told["save_id"]["step"]) == (2, 2, 2)
    assert json.loads(run("compact", tmp_path, 2, "--json").stdout) is None


def test_errors_are_one_line_with_their_code_and_an_exit_code(tmp_path):
    write_chain(tmp_path)
    with compact.exclusive(tmp_path):
        found = run("compact", tmp_path)
    assert (found.returncode, found.stdout) == (75, "")
    assert found.stderr.endswith("[already-compacting]\n") and found.stderr.count("\n") == 1
    found = run("compact", tmp_path, 99)
    assert found.returncode == 1 and found.stderr.endswith("[step-not-found]\n")
    assert found.stderr.count("\n") == 1
    assert run("compact", tmp_path, "--memory", "much").returncode == 2
    assert run("compact").returncode == 2


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1GiB", 1 << 30), ("512M", 512 << 20), ("1.5k", 1536), ("77", 77)]
)
def test_sizes_have_units(text, nbytes):
    assert terminal.Size().convert(text, None, None) == nbytes


def test_a_table_is_as_wide_as_it_needs(capsys):
    files = [("a" * 40, "1.5 MiB"), ("b", "12 KiB")]
    terminal.print_table(Listing(("name", "size"), files, "files"))
    lines = ["", "files", f"{'name':40}    size", f"{'a' * 40} 1.5 MiB", f"{'b':40}  12 KiB"]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.processes
def test_a_listing_imports_no_package_that_only_other_commands_need(tmp_path):
    state = {"tables": {"words": jnp.ones((50, 8))}, "bias": jnp.zeros(3)}
    handlers = {"embeddings": deltackpt.Tables(select="tables/*")}
    with deltackpt.CheckpointManager(tmp_path, handlers=handlers) as manager:
        touched = deltackpt.touched.init(state["tables"])
        manager.save(0, state, touched=touched)
        manager.save(1, state, touched=deltackpt.touched.mark(touched, {"words": jnp.array([3])}))
    others = ["jax", "ray", "orbax", "tensorstore", "rich", "h11", "ml_dtypes", "asyncio"]
    others += ["deltackpt.layers.write", "deltackpt.layers.merge", "deltackpt.storage.node_client"]
    others += ["deltackpt.events", "hashlib", "shutil", "socket"]
    others += ["deltackpt.cli.daemons", "deltackpt.ledger.committed", "deltackpt.format.wal_format"]
    program = (
        f"import sys; sys.argv[1:] = ['ls', {str(tmp_path)!r}];"
        "from deltackpt import cli; cli.cli(standalone_mode=False);"
        f"print([m for m in {others} if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    *lines, imported = found.stdout.splitlines()
    assert imported == "[]", found.stderr
    assert [line.split()[:2] for line in lines[1:3]] == [["0", "base"], ["1", "delta"]]
