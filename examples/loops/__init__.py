# SPDX-License-Identifier: Apache-2.0
"""Training loops that can be killed at any moment without losing or repeating a sample."""
