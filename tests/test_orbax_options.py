# SPDX-License-Identifier: Apache-2.0
"""The page on Orbax's options lists every option of the installed Orbax."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

PAGE = (Path(__file__).parents[1] / "docs" / "how-to" / "orbax.md").read_text()


def _arguments(call: object) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name != "self"]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "name",
    [
        *(field.name for field in dataclasses.fields(ocp.CheckpointManagerOptions)),
        *_arguments(ocp.CheckpointManager.__init__),
        *_arguments(v1.training.Checkpointer.__init__),
        *(name for name in dir(ocp.CheckpointManager) if not name.startswith("_")),
    ],
)
def test_every_option_is_on_the_page(name):
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ")]
    assert any(f"`{name}`" in row for row in rows), name


def test_the_top_level_of_orbax_is_still_v0():
    """Orbax 1.0 makes it v1; the v0 names then have their own module."""
    assert ocp.CheckpointManager is not getattr(v1, "CheckpointManager", None)
    assert hasattr(ocp, "PyTreeCheckpointHandler") and not hasattr(ocp, "save_pytree"), (
        "orbax.checkpoint is v1 now: import the v0 names of handlers/, interchange/ and "
        "integrations/ from where it keeps them"
    )
