#!/bin/sh
# Regenerates the Go code from kvindex.proto with pinned versions of the
# compiler (from PyPI, in a scratch environment) and of the two Go plugins.
set -eu
cd "$(dirname "$0")"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -q grpcio-tools==1.85.1
GOBIN="$tmp" go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
GOBIN="$tmp" go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
PATH="$tmp:$PATH" "$tmp/venv/bin/python" -m grpc_tools.protoc -I . \
	--go_out=paths=source_relative:. --go-grpc_out=paths=source_relative:. kvindex.proto
