# SPDX-License-Identifier: Apache-2.0
"""Orbax's own tests of its v0 checkpointers, with our commit in place of theirs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import orbax.checkpoint as ocp
import pytest
from exclusions import excluding, fails
from orbax.checkpoint._src.checkpointers.checkpointer_test_utils import CheckpointerTestBase

from deltackpt.handlers import commit

_OURS = commit.temporary_path_class(fsync=True)
_ORBAX_FAILS_TOO = "test_save_with_failing_array_metadata_store_in_finalize"

EXCLUDED = {
    "test_save_preempted_gcs": (
        "for object stores, which a root is refused on: their commit is Orbax's own"
    ),
    _ORBAX_FAILS_TOO: "fails with Orbax's own classes too unless there are two processes",
}


class _Adapted:
    """Orbax's test of a preemption disables the finalisation of its own class; this, of ours."""

    def test_save_preempted(self) -> None:
        with mock.patch.object(_OURS, "finalize"):
            super().test_save_preempted()  # pyright: ignore[reportAttributeAccessIssue]


class _Async:
    def checkpointer(self, handler: Any, **kwargs: Any) -> ocp.AsyncCheckpointer:
        return ocp.AsyncCheckpointer(handler, **{"temporary_path_class": _OURS, **kwargs})


class _Sync:
    def checkpointer(self, handler: Any, **kwargs: Any) -> ocp.Checkpointer:
        return ocp.Checkpointer(handler, **{"temporary_path_class": _OURS, **kwargs})


class _StockAsync:
    def checkpointer(self, handler: Any, **kwargs: Any) -> ocp.AsyncCheckpointer:
        return ocp.AsyncCheckpointer(handler, **kwargs)


class _StockSync:
    def checkpointer(self, handler: Any, **kwargs: Any) -> ocp.Checkpointer:
        return ocp.Checkpointer(handler, **kwargs)


@excluding(EXCLUDED)
class AsyncTest(_Async, _Adapted, CheckpointerTestBase.Test):
    """Under the AsyncCheckpointer."""


@excluding(EXCLUDED)
class SyncTest(_Sync, _Adapted, CheckpointerTestBase.Test):
    """Under the Checkpointer."""


@pytest.mark.parametrize("name", EXCLUDED)
@pytest.mark.parametrize("ours", [_Async, _Sync])
def test_an_excluded_test_cannot_pass(ours, name):
    assert fails(name, ours, _Adapted, CheckpointerTestBase.Test)


@pytest.mark.parametrize("stock", [_StockAsync, _StockSync])
def test_what_is_excluded_as_failing_anyhow_fails_with_stock_orbax(stock):
    assert fails(_ORBAX_FAILS_TOO, stock, CheckpointerTestBase.Test)
