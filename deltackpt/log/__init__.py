# SPDX-License-Identifier: Apache-2.0
"""The log: what changes between steps, durable at every call; managers hold a ``recorder``."""
