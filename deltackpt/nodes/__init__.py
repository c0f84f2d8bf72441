# SPDX-License-Identifier: Apache-2.0
"""Storage that a node provides to others, and the server for it."""
