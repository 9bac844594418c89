#!/usr/bin/env bash
# Installs what one peer of `make bench` needs, pinned, below target/ and bench/peers/node/node_modules; prints where it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
target=${CARGO_TARGET_DIR:-$PWD/../../target}/peers
mkdir -p "$target"

case "$1" in
webdis)
    if ! command -v webdis >/dev/null; then
        [ "$(id -u)" -eq 0 ] || { echo 'webdis is missing: sudo apt-get install webdis' >&2; exit 1; }
        apt-get update -qq >&2
        # RUNLEVEL: the package's own service is not to be started.
        RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends webdis >&2
    fi
    command -v webdis
    ;;
node)
    command -v node >/dev/null && command -v npm >/dev/null || { echo 'node and npm are missing' >&2; exit 1; }
    cd node
    if ! cmp -s package-lock.json node_modules/.installed; then
        npm ci --no-audit --no-fund --ignore-scripts >&2
        cp package-lock.json node_modules/.installed
    fi
    pwd
    ;;
axum)
    cargo build --quiet --release --locked --manifest-path axum/Cargo.toml --target-dir "$target/build" >&2
    echo "$target/build/release/axum-peer"
    ;;
idempotent-proxy-server)
    cargo install --quiet --locked idempotent-proxy-server@1.2.2 --root "$target" --target-dir "$target/build" >&2
    echo "$target/bin/idempotent-proxy-server"
    ;;
*)
    echo "no peer $1" >&2
    exit 2
    ;;
esac
