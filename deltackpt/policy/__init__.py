# SPDX-License-Identifier: Apache-2.0
"""Policies: pure functions of history that answer with their reason. No clock, no I/O.

``MeasuredCosts`` alone keeps something: the figures of events that it is given.
"""

from deltackpt.policy.base_or_delta import (
    BaseOrDelta,
    Consecutive,
    Decision,
    History,
    Intermittent,
    LeftToCompaction,
    OneShot,
    Rolling,
    too_large,
)
from deltackpt.policy.bit_width import CHECK_N_RUN, MEASURED, BitWidthPolicy, Choice
from deltackpt.policy.codec_choice import CodecChoice, WhenExceeded
from deltackpt.policy.interval import Advice, advise_interval
from deltackpt.policy.measured import MeasuredCosts
from deltackpt.policy.regimes import Cost, RecoveryKind, Regime, RegimeAdvice, advise_regime

__all__ = [
    "CHECK_N_RUN",
    "MEASURED",
    "Advice",
    "BaseOrDelta",
    "BitWidthPolicy",
    "Choice",
    "CodecChoice",
    "Consecutive",
    "Cost",
    "Decision",
    "History",
    "Intermittent",
    "LeftToCompaction",
    "MeasuredCosts",
    "OneShot",
    "RecoveryKind",
    "Regime",
    "RegimeAdvice",
    "Rolling",
    "WhenExceeded",
    "advise_interval",
    "advise_regime",
    "too_large",
]
