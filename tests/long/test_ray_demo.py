# SPDX-License-Identifier: Apache-2.0
"""``make demo-ray``: jobs, kills and recoveries on a Ray node of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="needs deltackpt[ray]", exc_type=ImportError)

import many
import psutil

DEMO = Path(__file__).resolve().parents[2] / "examples" / "dlrm_jax" / "demo_ray.py"


@pytest.mark.long
@pytest.mark.drawn("demos", 2)
@pytest.mark.timeout(3600)
def test_demo_recovers_from_the_service_and_leaves_no_process(tmp_path):
    done = subprocess.run(
        [sys.executable, DEMO, "--scale=0.05003", f"--directory={tmp_path}"], stdout=subprocess.PIPE
    )
    assert done.returncode == 0
    assert b"nothing was lost" in done.stdout
    assert b"the last restored from service" in done.stdout
    [place] = re.findall(r"its files in (\S+)", done.stdout.decode())
    assert not Path(place).exists()
    mine = (place, str(tmp_path))

    def left() -> list[list[str]]:
        found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return [words for words in found if any(one in " ".join(words) for one in mine)]

    # A killed process takes a moment to end.
    many.wait_until(lambda: not left(), "no process is left", lambda: str(left()))
