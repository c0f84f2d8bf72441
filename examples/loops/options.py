# SPDX-License-Identifier: Apache-2.0
"""The command line of both loops."""

from __future__ import annotations

import argparse
from pathlib import Path

from loops import data


def parsed(arguments: list[str] | None, description: str) -> argparse.Namespace:
    """Parses the command line.

    Args:
      arguments: the arguments; None for those of this process.
      description: description of the loop.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--directory", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--journal", type=Path, help="file to append one JSON line per step to")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", type=int, default=5, help="steps between two saves")
    parser.add_argument("--pipeline", choices=("dataset", "loader"), default="dataset")
    parser.add_argument("--workers", type=int, default=0, help="number of prefetching processes")
    options = parser.parse_args(arguments)
    options.steps = options.epochs * data.STEPS_PER_EPOCH
    return options
