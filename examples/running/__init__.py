# SPDX-License-Identifier: Apache-2.0
"""What the examples share: a run's journal, its digest, kills, and comparisons with Orbax."""
