# SPDX-License-Identifier: Apache-2.0
"""Orbax adapters: the only code, with ``manager``, that imports Orbax."""
