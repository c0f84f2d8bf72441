# SPDX-License-Identifier: Apache-2.0
"""The choice of tables, of their slots and of their codecs, by patterns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from deltackpt.errors import (
    OptionError,
)
from deltackpt.policies import CodecChoice
from deltackpt.state import paths
from deltackpt.state.groups import CodecOption
from deltackpt.state.paths import Select
from deltackpt.state.stacks import StackedTable


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """Selects the tables of a state. Create one and reuse it: it caches the layouts that it finds.

    Attributes:
      select: paths of the tables in the state; optimizer states are never searched. ``*`` matches
        within one path component, ``**`` across components. ``()`` declares a state without tables.
        Every array that matches becomes a table whose first axis is the rows, even a bias, so
        ``"**"`` selects the whole model. A scalar, a PRNG key or a Python number that matches
        raises ``TableSelectionError``.
      slots: None finds slots by optax's tree mapping. An empty mapping declares that there are
        none: optimizer states are then saved whole, with a warning if they are large. Otherwise,
        table path pattern to slot name to the slot's path, in which ``{table}`` is replaced by the
        table's path and ``{name}`` by its last component; tables that no pattern matches keep the
        slots that are found.
      key: path of the key column of each table, in which ``{table}`` and ``{name}`` are replaced as
        for ``slots``; a mapping from table path pattern to such a path if only some tables have
        one. It holds the id of each row, -1 for a row without one: (rows,) int32, int64 or uint64,
        or (rows, 2) int32 or uint32 for 64-bit ids without ``jax_enable_x64``. It is saved with its
        row as slot ``key``, uncompressed. A restore checks that ids are unique. Mark the rows whose
        ids change. A delta stores only the row index of a row without an id, if all its values and
        slots are 0. See ``deltackpt.vocab``.
      always: names of slots whose rows all move at every step; each save writes them whole. A
        pattern matches the whole name or its last component. Adafactor's are known.
      codec: how the tables' values are stored: the name of a codec for the rows of deltas, a
        ``BitWidthPolicy`` that chooses one, or a ``CodecChoice``; for all tables or by table path
        pattern (the first match applies; ``raw`` without a match). A lossy codec is used only if
        you name it.
      slot_codec: the same for the tables' slots.
      stacks: table path pattern to the layout of arrays in which jax-tpu-embedding stacked tables.
        Such an array and its slots are saved as one table for each member, of logical rows, whose
        paths are below that of the array.

    Examples:
      >>> import deltackpt
      >>> import jax.numpy as jnp
      >>> from deltackpt.handlers import split
      >>> state = {"params": {"emb": jnp.ones((4, 2)), "w": jnp.ones(3)}}
      >>> parts = split(state, Tables(select="params/emb"))
      >>> [table.name for table in parts.layout.tables], list(parts.dense["params"])
      (['params/emb'], ['w'])
    """

    select: Select
    slots: Mapping[str, Mapping[str, Select]] | None = None
    key: str | Mapping[str, Select] | None = None
    always: Sequence[str] = ()
    codec: CodecOption = "raw"
    slot_codec: CodecOption = "raw"
    stacks: Mapping[str, StackedTable] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        paths.check_select(self.select)
        for option in (self.codec, self.slot_codec):
            for given in option.values() if isinstance(option, Mapping) else [option]:
                CodecChoice.of(given)
        for pattern, stack in self.stacks.items():
            if not isinstance(stack, StackedTable):
                raise OptionError(
                    f"stacks: expected a StackedTable for {pattern!r}, found {stack!r}"
                )
        if self.slots is not None and not isinstance(self.slots, Mapping):
            raise OptionError(f"slots: expected a mapping or None, found {self.slots!r}")
        if self.key is not None and not isinstance(self.key, (str, Mapping)):
            raise OptionError(f"key: expected a path, a mapping or None, found {self.key!r}")
