# SPDX-License-Identifier: Apache-2.0
"""Has T5X resume with the manager that it saves with: its launcher configures that by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deltackpt.integrations.t5x.modules import utils

#: Attribute of our constructor that holds its defaults. A decorator that copies the attributes of
#: what it wraps, as gin's do, shares them.
_DEFAULTS = "_deltackpt_defaults"


def resume_with(manager_cls: Callable[..., Any]) -> None:
    """Makes a class the default of T5X's ``RestoreCheckpointConfig`` in this process.

    ``t5x.train.train`` builds the configuration that it resumes with itself, with T5X's own class
    and no way to name another, and T5X then refuses to resume with a class that is not the one
    that saves. A configuration that names its class keeps it. May be called again; other
    decorators of its constructor stay, below and above.

    Args:
      manager_cls: what T5X calls to make a manager.
    """
    config = utils.RestoreCheckpointConfig
    defaults = getattr(config.__init__, _DEFAULTS, None)
    if defaults is None:
        defaults = _with_defaults(config)
    defaults["checkpoint_manager_cls"] = manager_cls


def _with_defaults(config: Any) -> dict[str, Any]:
    """Wraps the constructor of a class, which then takes defaults from what is returned."""
    defaults: dict[str, Any] = {}
    original = config.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**defaults, **kwargs})

    setattr(init, _DEFAULTS, defaults)
    config.__init__ = init
    return defaults
