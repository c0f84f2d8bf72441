#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Renews the pins of a Python: installs the newest versions within the ranges of pyproject.toml in a
# fresh environment, runs the given tests there, and where they pass writes what is installed.
# usage: newest.sh VERSION TEST...
set -eu

version=$1
shift
venv=build/newest$version
pins=constraints-$version.txt

python=$(sh tools/find_python.sh "$version")
rm -rf "$venv"
sh tools/make_venv.sh "$python" "$venv" dev /dev/null
"$venv/bin/python" -m pytest "$@"
{
    echo "# SPDX-License-Identifier: Apache-2.0"
    echo "# Exact versions that the suite runs with on Python $version (Linux), extras included: the newest within"
    echo "# the ranges of pyproject.toml. Written by \`make newest\`."
    "$venv/bin/python" -m pip --disable-pip-version-check freeze --exclude-editable
} >"$venv/pins"
mv "$venv/pins" "$pins"
