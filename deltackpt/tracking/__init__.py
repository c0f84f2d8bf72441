# SPDX-License-Identifier: Apache-2.0
"""Which rows changed: stamps, bits and fingerprints."""
