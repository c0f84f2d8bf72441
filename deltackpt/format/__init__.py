# SPDX-License-Identifier: Apache-2.0
"""Records, names, chains and figures of what lies on disk: pure code, without I/O."""
