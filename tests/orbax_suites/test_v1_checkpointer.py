# SPDX-License-Identifier: Apache-2.0
"""Orbax's own tests of its v1 Checkpointer, with what deltackpt adds beside it and in its place.

The Checkpointer drives a v0 ``CheckpointManager``; ours differs from a stock one by the temporary
path, the retention policy and the trash. ``ManagerTest`` gives the Checkpointer just that.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from exclusions import excluding, fails
from orbax.checkpoint.experimental.v1._src.handlers import registration
from orbax.checkpoint.experimental.v1._src.testing.compatibility import (
    manager_compatibility_test_base as compatibility,
)
from orbax.checkpoint.experimental.v1._src.training import (
    checkpointer as checkpointer_lib,
)
from orbax.checkpoint.experimental.v1._src.training.checkpointer_test_base import (
    STATE_CHECKPOINTABLE_KEY,
    CheckpointerTestBase,
)

import deltackpt
from deltackpt.format.chain import SaveInfo
from deltackpt.format.manifest import SaveId
from deltackpt.handlers import commit, retention
from deltackpt.handlers.v1 import DeltaCheckpointableHandler

#: These policies drop the newest step as soon as it is committed.
_NEWEST_STAYS = "KeepChain keeps the newest step whatever the policy: the next delta builds on it"

EXCLUDED = {
    "test_preservation3": _NEWEST_STAYS,
    "test_preservation4": _NEWEST_STAYS,
    "test_preservation_metrics1": _NEWEST_STAYS,
    "test_preservation_metrics3": _NEWEST_STAYS,
}


class _Registered:
    """Our handler beside Orbax's, in a global registry of the test's own."""

    def setUp(self: Any) -> None:
        super().setUp()  # pyright: ignore[reportAttributeAccessIssue]
        registry = ocp.handlers.local_registry()
        self.enter_context(mock.patch.object(registration, "_GLOBAL_REGISTRY", registry))
        ocp.handlers.register_handler(DeltaCheckpointableHandler)


class HandlerRegisteredTest(_Registered, CheckpointerTestBase.Test):
    """Our handler beside Orbax's own takes nothing away from them."""


class EmbeddingsBesideTest(_Registered, CheckpointerTestBase.Test):
    """Nor do our ``Embeddings`` beside the suite's state, which are there after each save."""

    def save(
        self,
        checkpointer: ocp.training.Checkpointer,
        step: int,
        state: Any,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> bool:
        table = jnp.full((6, 4), step, jnp.float32)
        split = deltackpt.split({"table": table}, deltackpt.Tables(select="table"))
        embeddings = deltackpt.Embeddings(split=split)
        both = {STATE_CHECKPOINTABLE_KEY: state, "embeddings": embeddings}
        saved = checkpointer.save_checkpointables(
            step, both, metrics=metrics, custom_metadata=custom_metadata
        )
        if saved:
            found = checkpointer.load_checkpointables(step, {"embeddings": None})["embeddings"]
            np.testing.assert_array_equal(found.fields["table"]["values"], table)
        return saved


class CompatibilityTest(compatibility.ManagerCompatibilityTestBase):
    """The checkpoints of earlier versions that ship with Orbax load with our handler beside."""

    def setup_registry(self) -> Any:
        registry = super().setup_registry()
        registry.add(DeltaCheckpointableHandler)
        return registry


class _Managed:
    """Our commit and retention under Orbax's Checkpointer."""

    def setUp(self: Any) -> None:
        super().setUp()  # pyright: ignore[reportAttributeAccessIssue]
        manager = checkpointer_lib.checkpoint_manager
        options = functools.partial(self._options, manager.CheckpointManagerOptions)
        self.enter_context(mock.patch.object(manager, "CheckpointManagerOptions", options))

    def _options(self, stock: Any, **given: Any) -> v0.CheckpointManagerOptions:
        given["temporary_path_class"] = commit.temporary_path_class(fsync=True)
        given["preservation_policy"] = retention.KeepChain(
            given["preservation_policy"] or retention.as_policy(None), frozenset, self._bases
        )
        return stock(**given)

    def _bases(self: Any) -> dict[int, SaveInfo | None]:
        """To the suite every step is whole by itself, as a base is."""
        steps = [int(path.name) for path in self.directory.iterdir() if path.name.isdecimal()]
        return {
            step: SaveInfo(
                save_id=SaveId("suite", step, 0),
                kind="base",
                parent=None,
                step_dir=str(step),
                nbytes=0,
            )
            for step in steps
        }


@excluding(EXCLUDED)
class ManagerTest(_Managed, CheckpointerTestBase.Test):
    """Our commit and retention under Orbax's Checkpointer."""


@pytest.mark.parametrize("name", EXCLUDED)
def test_an_excluded_test_cannot_pass(name):
    assert fails(name, _Managed, CheckpointerTestBase.Test)
