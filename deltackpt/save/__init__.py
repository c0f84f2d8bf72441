# SPDX-License-Identifier: Apache-2.0
"""Saves a state: selects tables, then copies, encodes, writes and commits rows."""
