# SPDX-License-Identifier: Apache-2.0
"""Orbax adapters: else only ``interchange`` and ``integrations.t5x`` import Orbax."""
