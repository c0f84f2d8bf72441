# SPDX-License-Identifier: Apache-2.0
"""A stock Orbax script and its deltackpt version: few lines differ, and results are the same."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

STOCK, CONVERTED = (Path(__file__).parent / "stock" / name for name in ("stock.py", "converted.py"))


def written(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip()]


def test_five_lines_change():
    lines = list(difflib.unified_diff(written(STOCK), written(CONVERTED), n=0, lineterm=""))
    assert len([line for line in lines[2:] if line.startswith("+")]) == 5


@pytest.mark.processes
def test_both_give_the_same_result_after_an_interruption(tmp_path):
    told = {}
    for script in (STOCK, CONVERTED):
        for steps in ("5", "9"):
            ran = subprocess.run(
                [sys.executable, "-W", "ignore", script, tmp_path / script.stem, steps],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True,
                text=True,
            )
            assert ran.returncode == 0, ran.stderr
            told.setdefault(script, []).append(ran.stdout)
    assert told[STOCK] == told[CONVERTED]
