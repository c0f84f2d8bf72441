# SPDX-License-Identifier: Apache-2.0
"""Dense leaves as an item of a step: copied at capture, written in Orbax's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deltackpt.resources.staging import Staging
from deltackpt.save import dense_layout
from deltackpt.save.dense_layout import Plan
from deltackpt.save.rendezvous import Rendezvous
from deltackpt.storage import ocdbt
from deltackpt.storage.batch import FileBatch
from deltackpt.storage.ocdbt import Value

#: Smaller leaves are copied into memory of their own.
_STAGED_BYTES = 128 << 10


class DenseLeaves:
    """The dense leaves that this process writes, independent of later training steps."""

    def __init__(self, plan: Plan, values: list[Value], staging: Staging, lent: list[np.ndarray]):
        """Created by ``take``."""
        self._plan = plan
        self._values = values
        self._staging = staging
        self._lent = lent
        held = (one.data for one in values)
        #: Bytes of what is to be written.
        self.nbytes = sum(len(one) if isinstance(one, bytes) else one.nbytes for one in held)

    @classmethod
    def take(cls, tree: Any, process: int, staging: Staging) -> DenseLeaves:
        """Copies the values that this process writes; waits for accelerators.

        Args:
          tree: nested containers of leaves.
          process: index of this process.
          staging: provides the memory for the copies.

        Raises:
          UnsupportedLeaf: Orbax's handler must write the leaves.
        """
        plan = dense_layout.plan(tree, process)
        chunks = plan.fetched()
        lent: list[np.ndarray] = []
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        values = [Value(key, data) for key, data in plan.described.items()]
        try:
            for chunk, found in chunks:
                if not chunk.on_host:
                    data = np.ascontiguousarray(found)  # Memory of its own.
                elif found.nbytes < _STAGED_BYTES:
                    data = np.array(found, order="C")
                else:
                    data = staging.take(found.shape, found.dtype)
                    lent.append(data)
                    copies.append((data, found))
                values.append(Value(chunk.key, data))
            staging.copy(copies)
        except BaseException:
            staging.take_back(lent)
            raise
        return cls(plan, values, staging, lent)

    def write(self, item_dir: Path, batch: FileBatch, others: Rendezvous) -> None:
        """See ``step.Item``."""
        own = item_dir
        if others.count > 1:
            own = ocdbt.process_directory(item_dir, others.process)
        try:
            ocdbt.write(own, self._values, batch, nodes_apart=others.apart)
        finally:
            self.release()
        for name, text in self._plan.files.items():
            path = item_dir / name
            batch.make(path.parent)
            batch.write(path, text.encode())

    def complete(self, item_dir: Path, batch: FileBatch, others: Rendezvous) -> None:
        """See ``step.Item``."""
        if others.count > 1:
            ocdbt.merge(item_dir, range(others.count), self._plan.described)
            own = {ocdbt.process_directory(item_dir, number) for number in range(others.count)}
            batch.adopt(item_dir, but=own)  # Each digests and forces its own.

    def release(self) -> None:
        """Releases the memory. Idempotent."""
        self._values = []
        self._staging.take_back(self._lent)
