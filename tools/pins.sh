#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the name of the file with the pinned versions for a Python.
# usage: pins.sh PYTHON
set -eu

pins=$("$1" -c 'import sys; print("constraints-%d.%d.txt" % sys.version_info[:2])')
if [ -f "$pins" ]; then echo "$pins"; else echo constraints.txt; fi
