# SPDX-License-Identifier: Apache-2.0
"""The hot standby's merged state, without Ray."""
