#!/bin/sh
# Copies a built module to where it is used, only if it changed, and tells its size.
#
#   scripts/install-wasm.sh BUILT TARGET
set -eu
built=$1
target=$2
if ! cmp -s "$built" "$target"; then
    mkdir -p "$(dirname "$target")"
    cp "$built" "$target.new"
    mv "$target.new" "$target"
fi
printf '%s: %s KiB\n' "$target" "$(($(wc -c < "$target") / 1024))"
