# SPDX-License-Identifier: Apache-2.0
"""The commands of the command line, a module for each kind."""
