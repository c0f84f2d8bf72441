# SPDX-License-Identifier: Apache-2.0
"""Policies: pure functions of history that return a decision and its reason. No clock, no I/O.

Only ``MeasuredCosts`` has state: the figures of the events that it receives.
"""

from deltackpt.policies.base_or_delta import (
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
from deltackpt.policies.bit_width import CHECK_N_RUN, MEASURED, BitWidthPolicy, Choice
from deltackpt.policies.codec_choice import CodecChoice, WhenExceeded
from deltackpt.policies.interval import Advice, advise_interval
from deltackpt.policies.measured import MeasuredCosts
from deltackpt.policies.regimes import Cost, RecoveryKind, Regime, RegimeAdvice, advise_regime

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
