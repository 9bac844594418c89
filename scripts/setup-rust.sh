#!/bin/sh
# Makes sure that Rust can build, format and lint this project for wasm32-wasip1; installs by rustup what is missing.
set -eu

fail() { printf '%s\n' "setup-rust: $*" >&2; exit 1; }

platform=$(uname -sm)
[ "$platform" = "Linux x86_64" ] ||
    fail "this project is built and tested on Linux x86-64; this machine is $platform"

command -v cargo >/dev/null 2>&1 && command -v rustc >/dev/null 2>&1 ||
    fail "no Rust found; install Rust 1.95 or newer: https://rustup.rs"
wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
found=$(rustc --version | sed -n 's/^rustc \([0-9]*\.[0-9]*\).*/\1/p')
[ "$(printf '%s\n' "$wanted" "$found" | sort -V | head -n 1)" = "$wanted" ] ||
    fail "Rust $found is too old; this project needs $wanted or newer"

# $1: what is missing; the rest: the rustup command that brings it.
install() {
    what=$1
    shift
    command -v rustup >/dev/null 2>&1 ||
        fail "$what is missing, and there is no rustup to install it; see https://rustup.rs"
    printf '%s\n' "setup-rust: installing $what" >&2
    rustup "$@" >&2 || fail "rustup could not install $what"
}

[ -d "$(rustc --print target-libdir --target wasm32-wasip1)" ] ||
    install "the wasm32-wasip1 target" target add wasm32-wasip1
cargo fmt --version >/dev/null 2>&1 || install rustfmt component add rustfmt
cargo clippy --version >/dev/null 2>&1 || install clippy component add clippy
