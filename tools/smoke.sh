#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the sdist and, from it, the wheel; installs the wheel into an empty environment of a Python; saves and restores once.
# usage: smoke.sh VERSION BUILDER, where BUILDER is a Python that has hatchling
set -eu

version=$1
builder=$2
venv=build/smoke$version
rm -rf "$venv" && mkdir -p "$venv"

SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 1767225600)
export SOURCE_DATE_EPOCH
"$builder" -m hatchling build -t sdist -d "$venv/dist"
mkdir "$venv/source" && tar -xzf "$venv"/dist/*.tar.gz -C "$venv/source" --strip-components=1
(builder=$(command -v "$builder") && builder=$(realpath -s "$builder") && cd "$venv/source" && "$builder" -m hatchling build -t wheel -d ../dist)

python=$(sh tools/find_python.sh "$version")
"$python" -m venv "$venv/env"
"$venv/env/bin/python" -m pip --disable-pip-version-check install -q -c "$(sh tools/pins.sh "$python")" "$venv"/dist/*.whl
"$venv/env/bin/deltackpt" --version
"$venv/env/bin/python" tools/smoke.py "$venv/checkpoints"
