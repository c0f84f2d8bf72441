#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the object stores, and gets the Kafka broker, that tests, demos and benchmarks start on
# loopback.
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
# Kafka, a directory of jars.
if ! command -v java >/dev/null || ! command -v mvn >/dev/null; then
    echo "Kafka needs java and is installed by mvn: https://maven.apache.org/install.html" >&2
    exit 1
fi
mkdir -p "$1/kafka"
cat >"$1/kafka/pom.xml" <<'END'
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>deltackpt</groupId>
  <artifactId>kafka</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>4.1.0</version>
    </dependency>
    <!-- Without it, the broker logs nothing. -->
    <dependency>
      <groupId>org.apache.logging.log4j</groupId>
      <artifactId>log4j-slf4j-impl</artifactId>
      <version>2.24.3</version>
    </dependency>
  </dependencies>
</project>
END
mvn -q -B -f "$1/kafka/pom.xml" dependency:copy-dependencies -DincludeScope=runtime \
    -DoutputDirectory=libs
"$bin/versitygw" --version
"$bin/azurite-blob" --version
