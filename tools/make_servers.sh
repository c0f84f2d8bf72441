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
# Azure Blob Storage, in memory.
if ! command -v npm >/dev/null; then
    echo "Azurite is installed by npm, which is missing: https://nodejs.org" >&2
    exit 1
fi
npm install --silent --no-audit --no-fund --omit=dev --prefix "$1" azurite@3.35.0
ln -sf ../node_modules/.bin/azurite-blob "$bin/azurite-blob"
"$bin/versitygw" --version
"$bin/azurite-blob" --version
