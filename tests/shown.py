# SPDX-License-Identifier: Apache-2.0
"""The exact bytes of files, and of what inspection reads of a step; without jax."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deltackpt import inspect
from deltackpt.inspect.dense_items import PLACEHOLDERS


def bytes_below(folder: Path) -> dict[str, bytes]:
    """The bytes of all files, by their paths below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def table_fields(root: Path, step: int) -> dict[str, bytes]:
    """The bytes of each field of each table."""
    return {
        f"{name}.{field}": np.asarray(table.field(field)).tobytes()
        for name, table in inspect.open(root).at(step).tables.items()
        for field in table.leaves
    }


def dense_leaves(root: Path, step: int) -> dict[str, bytes]:
    """The bytes of each dense leaf."""
    return {
        name: str(leaf.value).encode()
        if leaf.kind in ("string", *PLACEHOLDERS)
        else np.asarray(leaf).tobytes()
        for name, leaf in inspect.open(root).at(step).dense.items()
    }
