#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the object stores that tests, the demo and a benchmark start on loopback.
# usage: make_servers.sh DIRECTORY
set -eu

bin=$1/bin
mkdir -p "$bin"
if ! command -v go >/dev/null; then
    echo "The servers are built by go, which is missing: https://go.dev/doc/install" >&2
    exit 1
fi
# S3, over a directory.
GOBIN=$(cd "$bin" && pwd) go install github.com/versity/versitygw/cmd/versitygw@v1.8.0
# Google Cloud Storage, in memory.
GOBIN=$(cd "$bin" && pwd) go install github.com/fsouza/fake-gcs-server@v1.56.1
"$bin/versitygw" --version
