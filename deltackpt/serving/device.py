# SPDX-License-Identifier: Apache-2.0
"""The rows of a table on devices, brought up to date by scatters."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from deltackpt.errors import MissingExtra


def jax_module() -> Any:
    """Imports jax, which the other modules of this package do not need.

    Raises:
      MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module("jax")
    except ImportError as error:
        raise MissingExtra(
            "serving: expected jax, found that it cannot be imported; install jax, or look up rows "
            "with version()"
        ) from error


def neutral() -> Any:
    """Returns ``state.contexts.neutral()``, which imports jax."""
    return importlib.import_module("deltackpt.state.contexts").neutral()


class DeviceRows:
    """All held rows of one table as one ``jax.Array``.

    Attributes:
      number: number of the version in the array; None before the first.
      array: the array; an earlier one is donated.
    """

    def __init__(self, sharding: Any):
        """Transfers nothing yet.

        Args:
          sharding: a sharding or device; None for the default device.
        """
        self.number: int | None = None
        self.array: Any = None
        self._sharding = sharding
        self._scatter: Any = None

    def put(self, number: int, rows: np.ndarray) -> None:
        """Transfers all rows; returns when they were read."""
        jax = jax_module()
        with neutral():
            # The rows change in place, so the array must not alias them.
            array = jax.device_put(rows, self._sharding, may_alias=False)
            self.array, self.number = jax.block_until_ready(array), number
            self._scatter = jax.jit(_set_rows, donate_argnums=0, out_shardings=array.sharding)

    def change(self, number: int, at: np.ndarray, values: np.ndarray) -> None:
        """Replaces some rows.

        Args:
          number: number of the version that the array then has.
          at: (n,) their positions, each at most once.
          values: (n, *row shape) their values.
        """
        # Sizes are powers of two, so that few programs are compiled; the rest is out of bounds.
        size = 1 << (max(1, len(at)) - 1).bit_length()
        padded = np.full(size, len(self.array), np.int32)
        padded[: len(at)] = at
        news = np.zeros((size, *values.shape[1:]), values.dtype)
        news[: len(at)] = values
        with neutral():
            # Donated: it is lost if this fails.
            array, self.array, self.number = self.array, None, None
            self.array, self.number = self._scatter(array, padded, news), number


def _set_rows(array: Any, at: Any, values: Any) -> Any:
    return array.at[at].set(values, mode="drop", unique_indices=False)
