# SPDX-License-Identifier: Apache-2.0
"""The JAX contexts around the calls of a training process, and the placement of its arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

#: Names in ``user_contexts.CONTEXTS``; importing that module starts a JAX backend.
CONTEXTS = (
    "set_mesh Auto",
    "set_mesh Explicit",
    "numpy_rank_promotion",
    "numpy_dtype_promotion",
    "transfer_guard",
    "enable_x64",
    "disable_x64",
    "default_device",
    "debug_nans",
    "disable_jit",
    "others",
)
#: Placements of arrays; "mixed" leaves some leaves where JAX made them.
PLACEMENTS = ("never placed", "one device", "sharded", "mixed")
#: Kinds of templates for a restore.
TEMPLATES = ("arrays", "like", "shapes")
#: Memory kinds on CPU.
MEMORIES = ("device", "pinned_host", "unpinned_host")


def draw(random_: random.Random, *, log: bool = False) -> dict[str, str | None]:
    """Fields of ``Surroundings``; full WAL records hold no dense leaves in pinned memory."""
    return {
        "context": random_.choice((None, *CONTEXTS)),
        "placement": random_.choice(PLACEMENTS),
        "memory": random_.choice(MEMORIES),
        "dense_memory": random_.choice(MEMORIES[::2] if log else MEMORIES),
        "template": random_.choice(TEMPLATES),
    }


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """The surroundings of a process with eight devices; see the constants above."""

    context: str | None = None
    placement: str = "never placed"
    memory: str = "device"
    dense_memory: str = "device"
    template: str = "shapes"

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """The context."""
        if self.context is None:
            return contextlib.nullcontext()
        from user_contexts import CONTEXTS

        return CONTEXTS[self.context]()

    def around(self, target: Any) -> Any:
        """An object whose methods are called in the context."""
        if self.context is None:
            return target
        from user_contexts import InContext

        return InContext(target, self.entered)

    def placed(self, state: Any) -> Any:
        """Places a state on devices."""
        number = 0

        def place(path: Any, leaf: Any) -> Any:
            nonlocal number
            number += 1
            if self.placement == "never placed" or (self.placement == "mixed" and number % 2 == 0):
                return jax.device_put(leaf)
            of_table = path[0].key in ("tables", "slots")
            memory = self.memory if of_table else self.dense_memory
            return jax.device_put(leaf, self._sharding(leaf, memory))

        return jax.tree.map_with_path(place, state)

    def abstract(self, state: Any) -> Any:
        """A template for a restore of a state."""
        placed = self.placed(state)
        if self.template == "arrays":
            return placed
        if self.template == "like":
            return jax.tree.map(jax.ShapeDtypeStruct.like, placed)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf.sharding if leaf.committed else None
            ),
            placed,
        )

    def misplaced(self, found: Any) -> str | None:
        """The first leaf that is not where ``placed`` puts it, or None."""
        for (path, leaf), expected in zip(
            jax.tree.leaves_with_path(found),
            jax.tree.leaves(self.placed(jax.tree.map(np.asarray, found))),
            strict=True,
        ):
            # The device is guaranteed only for committed arrays: others follow the context.
            there = [(one.committed, one.committed and one.sharding) for one in (leaf, expected)]
            if there[0] != there[1]:
                return f"{jax.tree_util.keystr(path)} is placed {there[0]} instead of {there[1]}"
        return None

    def _sharding(self, leaf: Any, memory: str) -> Any:
        if self.placement == "one device":
            return SingleDeviceSharding(jax.devices()[1], memory_kind=memory)
        from user_contexts import MESHES

        mesh = MESHES["Explicit" if self.context == "set_mesh Explicit" else "Auto"]
        sharded = leaf.ndim and len(leaf) % mesh.shape["x"] == 0
        spec = P("x") if sharded else P()
        return NamedSharding(mesh, spec, memory_kind=memory)
