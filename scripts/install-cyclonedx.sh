#!/usr/bin/env bash
# Prints a folder for PYTHONPATH with the JSON schemas of CycloneDX and a validator; installs both from PyPI into .tools/.
set -euo pipefail

fail() { echo "install-cyclonedx: $*" >&2; exit 1; }

cyclonedx=11.12.0 jsonschema=4.26.0
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$root/.tools/cyclonedx-$cyclonedx-$jsonschema
if [ ! -d "$target" ]; then
    command -v python3 >/dev/null || fail 'python3 is missing'
    mkdir -p "$root/.tools"
    work=$(mktemp -d "$root/.tools/.installing-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    python=python3
    if ! python3 -m pip --version >/dev/null 2>&1; then
        python3 -m venv "$work/venv" >/dev/null || fail 'python3 has neither pip nor venv: install python3-pip or python3-venv'
        python=$work/venv/bin/python3
    fi
    echo "installing cyclonedx-python-lib==$cyclonedx (its schemas) and jsonschema==$jsonschema from PyPI" >&2
    # Of the first only its data files are used, so without its dependencies.
    for package in "--no-deps cyclonedx-python-lib==$cyclonedx" "jsonschema==$jsonschema"; do
        # shellcheck disable=SC2086
        PIP_BREAK_SYSTEM_PACKAGES=1 PIP_USER=0 "$python" -m pip install --disable-pip-version-check --quiet \
            --root-user-action ignore --target "$work/packages" $package >&2 || fail "pip could not install $package"
    done
    [ -d "$target" ] || mv "$work/packages" "$target"
fi
printf '%s\n' "$target"
