#!/usr/bin/env bash
# Prints the folder that holds `prometheus` and `promtool`. Where they are missing, it unpacks Debian's package into
# .tools/prometheus: nothing is installed, so no service starts and root is not needed.
#
#   PROMETHEUS_PATH   a folder with both, taken instead
set -euo pipefail

fail() { echo "install-prometheus: $*" >&2; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$root/.tools/prometheus

if [ -n "${PROMETHEUS_PATH:-}" ]; then
    [ -x "$PROMETHEUS_PATH/prometheus" ] && [ -x "$PROMETHEUS_PATH/promtool" ] ||
        fail "PROMETHEUS_PATH=$PROMETHEUS_PATH does not hold prometheus and promtool"
    printf '%s\n' "$PROMETHEUS_PATH"
    exit 0
fi
if [ ! -x "$target/prometheus" ] || [ ! -x "$target/promtool" ]; then
    if found=$(command -v prometheus) && [ -x "$(dirname "$found")/promtool" ]; then
        dirname "$found"
        exit 0
    fi
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
        fail 'no Prometheus found: install it (Debian: apt-get install prometheus), or set PROMETHEUS_PATH'
    mkdir -p "$root/.tools"
    work=$(mktemp -d "$root/.tools/.installing-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    echo "unpacking Debian's prometheus (19 MB) into .tools/" >&2
    # As root, apt would fetch as another user, who may not write here.
    fetch() { (cd "$work" && apt-get -qq -o APT::Sandbox::User=root download prometheus >&2); }
    fetch || { [ "$(id -u)" -ne 0 ] || apt-get update -qq >&2; fetch; } ||
        fail "apt-get could not download prometheus: run apt-get update, or set PROMETHEUS_PATH"
    dpkg-deb -x "$work"/prometheus_*.deb "$work/unpacked"
    mkdir "$work/bin"
    mv "$work/unpacked/usr/bin/prometheus" "$work/unpacked/usr/bin/promtool" "$work/bin/"
    "$work/bin/promtool" --version >/dev/null 2>&1 || fail "Debian's promtool does not run on this machine"
    # Another run may have been faster: then its result stands.
    if [ ! -x "$target/promtool" ]; then
        rm -rf "$target"
        mv "$work/bin" "$target"
    fi
fi
printf '%s\n' "$target"
