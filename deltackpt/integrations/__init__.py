# SPDX-License-Identifier: Apache-2.0
"""Thin layers between the manager and the loops that people train with."""
