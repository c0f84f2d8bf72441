# SPDX-License-Identifier: Apache-2.0
"""On-disk records, names, chains and statistics: pure code, without I/O."""
