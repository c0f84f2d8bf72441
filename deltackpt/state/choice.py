# SPDX-License-Identifier: Apache-2.0
"""The choice of tables, of their slots and of their codecs, by patterns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from deltackpt.errors import (
    OptionError,
)
from deltackpt.policy import CodecChoice
from deltackpt.state import paths
from deltackpt.state.groups import CodecOption
from deltackpt.state.paths import Select


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """The user's choice of tables; make it once, since it remembers the layouts that it found.

    Attributes:
      select: paths of the tables in the state; optimizer states are never searched. ``*`` stays
        within one step of a path, ``**`` crosses them.
      slots: None finds slots by optax's tree mapping; an empty mapping declares that there are
        none (optimizer states are then saved whole, and a warning says so where that is much).
        Else table path pattern to slot name to the slot's path, in which ``{table}`` stands for the
        table's path and ``{name}`` for its last step; the tables that no pattern matches keep the
        slots that are found.
      always: names of slots whose rows all move at every step, written whole at each save;
        a pattern matches the whole name or its last step. Adafactor's are known.
      codec: how the tables' values are stored: the name of a codec for the rows of deltas, a
        ``BitWidthPolicy`` that chooses one, or a ``CodecChoice``; for all tables or by table
        path pattern (the first that matches; ``raw`` where none does). Lossy codecs are taken
        only where they are asked for.
      slot_codec: likewise for the tables' slots.

    Example:
      >>> import deltackpt
      >>> import jax.numpy as jnp
      >>> from deltackpt import split
      >>> state = {"params": {"emb": jnp.ones((4, 2)), "w": jnp.ones(3)}}
      >>> parts = deltackpt.split(state, Tables(select="params/emb"))
      >>> [table.name for table in parts.layout.tables], list(parts.dense["params"])
      (['params/emb'], ['w'])
    """

    select: Select
    slots: Mapping[str, Mapping[str, Select]] | None = None
    always: Sequence[str] = ()
    codec: CodecOption = "raw"
    slot_codec: CodecOption = "raw"

    def __post_init__(self) -> None:
        paths.check_select(self.select)
        for option in (self.codec, self.slot_codec):
            for given in option.values() if isinstance(option, Mapping) else [option]:
                CodecChoice.of(given)
        if self.slots is not None and not isinstance(self.slots, Mapping):
            raise OptionError(f"slots: expected a mapping or None, found {self.slots!r}")
