# SPDX-License-Identifier: Apache-2.0
"""Makes T5X resume with the manager that it saves with; its launcher has no setting for that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deltackpt.integrations.t5x.modules import utils

#: Attribute of the patched constructor that holds its defaults. Decorators that copy attributes,
#: such as gin's, share it.
_DEFAULTS = "_deltackpt_defaults"


def resume_with(manager_cls: Callable[..., Any]) -> None:
    """Makes a class the default of T5X's ``RestoreCheckpointConfig`` in this process.

    ``t5x.train.train`` builds its resume configuration with T5X's own class and offers no way to
    name another; T5X then refuses to resume with a class other than the one that saves. A
    configuration that names a class keeps it. May be called again; other decorators of the
    constructor are preserved, below and above.

    Args:
      manager_cls: the factory that T5X calls to create a manager.
    """
    config = utils.RestoreCheckpointConfig
    defaults = getattr(config.__init__, _DEFAULTS, None)
    if defaults is None:
        defaults = _with_defaults(config)
    defaults["checkpoint_manager_cls"] = manager_cls


def _with_defaults(config: Any) -> dict[str, Any]:
    """Wraps a class's constructor so that it takes defaults from the returned dict."""
    defaults: dict[str, Any] = {}
    original = config.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**defaults, **kwargs})

    setattr(init, _DEFAULTS, defaults)
    config.__init__ = init
    return defaults
