#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a Python of the given version: the one on PATH, else pyenv's newest patch of it.
# usage: find_python.sh 3.12
set -eu

version=$1
root=$(pyenv root 2>/dev/null || echo "${PYENV_ROOT:-$HOME/.pyenv}")
is_it='import sys; "%d.%d" % sys.version_info[:2] == sys.argv[1] and print(sys.executable)'

# A shim of pyenv on PATH fails unless pyenv was told of that version.
for python in "python$version" $(ls -d "$root/versions/$version".*/bin/python 2>/dev/null | sort -rV); do
    found=$("$python" -c "$is_it" "$version" 2>/dev/null || true)
    if [ -n "$found" ]; then
        echo "$found"
        exit 0
    fi
done
echo "deltackpt is tested on Python $version, and there is none: expected python$version on PATH," \
    "or one of pyenv below $root/versions." >&2
echo "Install it, for instance: pyenv install $version; then call again." >&2
exit 1
