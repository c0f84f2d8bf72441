# SPDX-License-Identifier: Apache-2.0
"""Classifies a state's leaves as tables, slots and dense leaves, and assigns rows to processes."""
