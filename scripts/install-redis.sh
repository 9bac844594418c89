#!/usr/bin/env bash
# Prints the path of a redis-server. Installs Debian's package where that needs no question; says how otherwise.
set -euo pipefail

if ! command -v redis-server >/dev/null; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo 'installing redis-server' >&2
        apt-get update -qq >&2
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server >&2
    else
        echo 'redis-server is missing: install it (Debian: sudo apt-get install redis-server), the tests need 6.0 or newer' >&2
        exit 1
    fi
fi
command -v redis-server
