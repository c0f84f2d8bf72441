# SPDX-License-Identifier: Apache-2.0
"""Runs the command line in the test process; returns its output and exit code."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
from unittest import mock

from deltackpt import cli


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the command line without starting a process."""
    given = list(map(str, arguments))
    out, err = io.StringIO(), io.StringIO()
    logger = logging.getLogger("absl")
    level, code = logger.level, 0
    try:
        with (
            mock.patch("sys.argv", ["deltackpt", *given]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            cli.main()
    except SystemExit as left:
        assert left.code is None or isinstance(left.code, int), left.code
        code = left.code or 0
    finally:
        logger.setLevel(level)
    return subprocess.CompletedProcess(given, code, out.getvalue(), err.getvalue())
