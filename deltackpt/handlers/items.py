# SPDX-License-Identifier: Apache-2.0
"""Which handler of ``CheckpointManager(handlers=...)`` is for what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from deltackpt import layout
from deltackpt.errors import OptionError
from deltackpt.tables import Tables


def sorted_handlers(
    handlers: Mapping[str, Any] | None,
) -> tuple[str, Tables, dict[str, ocp.CheckpointHandler]]:
    """Tells our item from Orbax's.

    Args:
      handlers: item names to what handles them.

    Returns:
      Name and tables of our item, and the other handlers.

    Raises:
      OptionError: there is not exactly one ``Tables``, or another value is no handler.
    """
    given = dict(handlers or {layout.EMBEDDINGS_ITEM: Tables(select="**/embedding")})
    ours = {name: choice for name, choice in given.items() if isinstance(choice, Tables)}
    if len(ours) != 1:
        raise OptionError(
            "handlers: expected exactly one item with a deltackpt.Tables, found "
            f"{sorted(ours) or 'none'}; give e.g. {{'embeddings': Tables(select='params/emb/*')}}"
        )
    [(item, chosen)] = ours.items()
    others = {name: handler for name, handler in given.items() if name != item}
    for name, handler in others.items():
        # By its methods: grain's handler, for one, names no base class.
        works = all(callable(getattr(handler, call, None)) for call in ("save", "restore"))
        if name == layout.DENSE_ITEM or not works or isinstance(handler, type):
            raise OptionError(
                f"handlers[{name!r}]: expected an Orbax CheckpointHandler under a name other "
                f"than {layout.DENSE_ITEM!r}, found {type(handler).__name__}"
            )
    return item, chosen, others
