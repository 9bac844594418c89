#!/usr/bin/env bash
# Prints the path of a node. Installs Debian's package where that needs no question; says how otherwise.
set -euo pipefail

if ! command -v node >/dev/null; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo 'installing nodejs' >&2
        apt-get update -qq >&2
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nodejs >&2
    else
        echo 'node is missing: install it (Debian: sudo apt-get install nodejs), the client guide is run with 18 or newer' >&2
        exit 1
    fi
fi
command -v node
