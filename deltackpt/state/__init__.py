# SPDX-License-Identifier: Apache-2.0
"""Which leaves of a state are tables, slots and dense, and which process owns which rows."""
