# SPDX-License-Identifier: Apache-2.0
"""Restores committed saves into the arrays of the caller's topology."""
