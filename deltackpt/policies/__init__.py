# SPDX-License-Identifier: Apache-2.0
"""Policies: pure functions of history that return a decision and its reason. No clock, no I/O.

Only ``MeasuredCosts`` has state: the figures of the events that it receives. The names for advice
on intervals and regimes are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltackpt.lazy_import import attributes
from deltackpt.policies.save_policies import (
    CHECK_N_RUN,
    MEASURED,
    BaseOrDelta,
    BitWidthPolicy,
    CodecChoice,
    Consecutive,
    Decision,
    Intermittent,
    LeftToCompaction,
    OneShot,
    PlannedCodec,
    SaveHistory,
    WhenExceeded,
    too_large,
)

if TYPE_CHECKING:
    from deltackpt.policies.advice import (
        Advice,
        Cost,
        MeasuredCosts,
        RecoveryKind,
        Regime,
        RegimeAdvice,
        advise_interval,
        advise_regime,
    )

__all__ = [
    "CHECK_N_RUN",
    "MEASURED",
    "Advice",
    "BaseOrDelta",
    "BitWidthPolicy",
    "CodecChoice",
    "Consecutive",
    "Cost",
    "Decision",
    "Intermittent",
    "LeftToCompaction",
    "MeasuredCosts",
    "OneShot",
    "PlannedCodec",
    "RecoveryKind",
    "Regime",
    "RegimeAdvice",
    "SaveHistory",
    "WhenExceeded",
    "advise_interval",
    "advise_regime",
    "too_large",
]

_ADVICE = (
    *("Advice", "Cost", "MeasuredCosts", "RecoveryKind", "Regime", "RegimeAdvice"),
    *("advise_interval", "advise_regime"),
)
__getattr__ = attributes(__name__, dict.fromkeys(_ADVICE, ".advice"))
