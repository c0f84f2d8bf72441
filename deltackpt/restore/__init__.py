# SPDX-License-Identifier: Apache-2.0
"""From committed saves to the arrays of the caller's topology."""
