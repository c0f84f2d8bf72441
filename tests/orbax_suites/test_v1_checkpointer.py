# SPDX-License-Identifier: Apache-2.0
"""Orbax's own tests of its v1 Checkpointer, with our handler registered too."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from orbax.checkpoint.experimental.v1._src.handlers import registration
from orbax.checkpoint.experimental.v1._src.testing.compatibility import (
    manager_compatibility_test_base as compatibility,
)
from orbax.checkpoint.experimental.v1._src.training.checkpointer_test_base import (
    STATE_CHECKPOINTABLE_KEY,
    CheckpointerTestBase,
)

import deltackpt
from deltackpt.handlers.v1 import DeltaCheckpointableHandler


class _Registered:
    """Registers our handler with Orbax's, in a global registry of the test."""

    def setUp(self: Any) -> None:
        super().setUp()  # pyright: ignore[reportAttributeAccessIssue]
        registry = ocp.handlers.local_registry()
        self.enter_context(mock.patch.object(registration, "_GLOBAL_REGISTRY", registry))
        ocp.handlers.register_handler(DeltaCheckpointableHandler)


class HandlerRegisteredTest(_Registered, CheckpointerTestBase.Test):
    """Registering our handler does not break Orbax's own."""


class EmbeddingsBesideTest(_Registered, CheckpointerTestBase.Test):
    """Saving our ``Embeddings`` with the suite's state breaks nothing; each save has both."""

    def save(
        self,
        checkpointer: ocp.training.Checkpointer,
        step: int,
        state: Any,
        metrics: Any = None,
        custom_metadata: Any = None,
    ) -> bool:
        table = jnp.full((6, 4), step, jnp.float32)
        split = deltackpt.handlers.split({"table": table}, deltackpt.Tables(select="table"))
        embeddings = deltackpt.handlers.Embeddings(split=split)
        both = {STATE_CHECKPOINTABLE_KEY: state, "embeddings": embeddings}
        saved = checkpointer.save_checkpointables(
            step, both, metrics=metrics, custom_metadata=custom_metadata
        )
        if saved:
            found = checkpointer.load_checkpointables(step, {"embeddings": None})["embeddings"]
            np.testing.assert_array_equal(found.fields["table"]["values"], table)
        return saved


class CompatibilityTest(compatibility.ManagerCompatibilityTestBase):
    """The earlier versions' checkpoints that ship with Orbax load with our handler registered."""

    def setup_registry(self) -> Any:
        registry = super().setup_registry()
        registry.add(DeltaCheckpointableHandler)
        return registry
