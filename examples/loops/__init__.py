# SPDX-License-Identifier: Apache-2.0
"""Two training loops that can be killed at any moment, and the proof that no sample is lost."""
