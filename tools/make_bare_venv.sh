#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes a virtual environment with what reading needs, and with neither jax nor Orbax.
# usage: make_bare_venv.sh PYTHON VENV
set -eu

python=$1
venv=$2

rm -rf "$venv"
"$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check install -q -c $(sh tools/pins.sh "$python")"
$pip hatchling editables
$pip --no-build-isolation --no-deps -e .
# The first line is what a user needs: docs/how-to/inspect.md names it.
$pip numpy tensorstore ml-dtypes msgpack google-crc32c h11 zstandard rich click psutil \
    matplotlib pandas safetensors pyarrow \
    pytest pytest-timeout hypothesis
