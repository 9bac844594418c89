#!/usr/bin/env bash
# Prints the path of a webdis. Installs Debian's package where that needs no question; says how otherwise.
set -euo pipefail

if ! command -v webdis >/dev/null; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo 'installing webdis' >&2
        apt-get update -qq >&2
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends webdis >&2
    else
        echo 'webdis is missing: install it (Debian: sudo apt-get install webdis)' >&2
        exit 1
    fi
fi
command -v webdis
