# SPDX-License-Identifier: Apache-2.0
"""Memory that is reused, and the byte budget of what is in flight."""
