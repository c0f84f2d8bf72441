#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the kernel tests with a module that is compiled with the address and undefined-behavior sanitizers.
# usage: sanitize_kernels.sh PYTHON [PYTEST_ARGUMENT...]
set -eu

python=$1
shift
made=build/sanitized
rm -rf "$made" && mkdir -p "$made/deltackpt"
ln -s "$PWD"/deltackpt/* "$made/deltackpt"
rm -f "$made"/deltackpt/*.so
CFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" DELTACKPT_KERNELS=1 \
    "$python" hatch_build.py "$made/deltackpt/_kernels.abi3.so"
# jaxlib throws C++ exceptions, so libstdc++ is loaded with the sanitizer. Leaks are not reported: Python frees
# little at exit.
library() { ${CC:-cc} -print-file-name="$1"; }
LD_PRELOAD="$(library libasan.so) $(library libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONPATH="$made" \
    "$python" -P -m pytest -s -p no:cacheprovider -n 0 tests/test_kernels.py \
    tests/test_kernels_blocks.py "$@"
