# SPDX-License-Identifier: Apache-2.0
"""Orbax's own tests of its v0 checkpointers, with our commit in place of theirs."""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import orbax.checkpoint as ocp
from orbax.checkpoint._src.checkpointers.checkpointer_test_utils import CheckpointerTestBase

from deltackpt.handlers import commit

_OURS = commit.temporary_path_class(fsync=True)


class _Adapted:
    """Orbax's test of a preemption disables the finalisation of its own class; this, of ours."""

    def test_save_preempted(self) -> None:
        with mock.patch.object(_OURS, "finalize"):
            super().test_save_preempted()  # pyright: ignore[reportAttributeAccessIssue]

    @unittest.skip("for object stores, which a root is refused on: their commit is Orbax's own")
    def test_save_preempted_gcs(self) -> None: ...

    @unittest.skip("fails with Orbax's own classes too unless there are two processes")
    def test_save_with_failing_array_metadata_store_in_finalize(self) -> None: ...


class AsyncTest(_Adapted, CheckpointerTestBase.Test):
    """Under the AsyncCheckpointer."""

    def checkpointer(self, handler: Any, **kwargs: Any) -> ocp.AsyncCheckpointer:
        return ocp.AsyncCheckpointer(handler, **{"temporary_path_class": _OURS, **kwargs})


class SyncTest(_Adapted, CheckpointerTestBase.Test):
    """Under the Checkpointer."""

    def checkpointer(self, handler: Any, **kwargs: Any) -> ocp.Checkpointer:
        return ocp.Checkpointer(handler, **{"temporary_path_class": _OURS, **kwargs})
