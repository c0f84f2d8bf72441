# SPDX-License-Identifier: Apache-2.0
"""The save and restore loops of a manager, on every process of a job."""
