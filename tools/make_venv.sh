#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes a virtual environment and installs deltackpt in it, editable, with the versions that are pinned
# for its Python, or by another file.
# usage: make_venv.sh PYTHON VENV [EXTRA [CONSTRAINTS]]
set -eu

python=$1
venv=$2
extra=${3:-dev}

if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
    echo "deltackpt needs Python 3.11 to 3.13, and $python is $("$python" --version 2>&1)." >&2
    echo "Name another one: make PYTHON=python3.12 ..." >&2
    exit 1
fi

# Debian's python3 comes without ensurepip, which `python3 -m venv` needs.
if ! "$python" -c 'import venv, ensurepip; ensurepip.version()' 2>/dev/null; then
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "$python has no ensurepip: installing the system package $package"
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$package"
    else
        echo "$python cannot make a virtual environment: its ensurepip module is missing." >&2
        echo "On Debian or Ubuntu: sudo apt-get install $package; then call make again." >&2
        exit 1
    fi
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
    [ "$("$venv/bin/python" --version)" != "$("$python" --version)" ]; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

# The build backend comes first, pinned like the rest, so that the build needs no environment of
# its own.
constraints=${4:-$(sh tools/pins.sh "$venv/bin/python")}
pip="$venv/bin/python -m pip --disable-pip-version-check install -q -c $constraints"
$pip hatchling editables
$pip --no-build-isolation -e ".[$extra]"
