# SPDX-License-Identifier: Apache-2.0
"""Tests of Orbax's suites that cannot apply, by name with the reason, and the proof of each."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Mapping


def excluding(reasons: Mapping[str, str]) -> Callable[[type], type]:
    """A class decorator that skips tests, and says why.

    Args:
      reasons: names of tests to why they cannot apply.
    """

    def decorate(case: type) -> type:
        for name, reason in reasons.items():
            setattr(case, name, unittest.skip(reason)(lambda self: None))
        return case

    return decorate


def fails(name: str, *parts: type) -> bool:
    """Whether a test fails in a class of the given parts; raises where there is no such test."""
    case = type("Unexcluded", parts, {})(name)
    result = unittest.TestResult()
    case.run(result)
    assert result.testsRun == 1 and not result.skipped
    return not result.wasSuccessful()
