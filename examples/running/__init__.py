# SPDX-License-Identifier: Apache-2.0
"""Shared code of the examples: a run's journal, its digest, kills, and comparisons with Orbax."""
