# SPDX-License-Identifier: Apache-2.0
"""Settings of the checkpoint manager for T5X."""

from __future__ import annotations

import dataclasses
from typing import Literal

from deltackpt.errors import (
    OptionError,
)
from deltackpt.options import ManagerOptions
from deltackpt.state.groups import CodecOption

Wait = Literal["deferred", "each"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of ``checkpoint_manager``; comparable, since T5X compares the factories."""

    tables: tuple[str, ...]
    codec: CodecOption
    slot_codec: CodecOption
    options: ManagerOptions
    wait: Wait

    def __post_init__(self) -> None:
        if self.wait not in ("deferred", "each"):
            raise OptionError(
                f"wait: expected 'deferred' or 'each', found {self.wait!r}; 'deferred' lets "
                "training continue while a checkpoint is written"
            )
        if self.options.read_only:
            raise OptionError(
                "options: expected a trainer's options, found access="
                f"{self.options.access!r}; leave it out: a job that only reads takes no lease "
                "anyway"
            )
        if self.options.writes.when_busy != "wait":
            raise OptionError(
                "options.writes.when_busy: expected 'wait', found "
                f"{self.options.writes.when_busy!r}; leave it out: T5X would continue without its "
                "emergency save and its last save, and never requests a pending one"
            )
