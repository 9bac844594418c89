#!/usr/bin/env bash
# Plants one bug at a time in a copy of the tree and shows that the suite turns red.
# Usage: tests/planted-bugs.sh [NAME…]     (needs ENVOY_PATH or .tools, as the end-to-end tests do)
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$root/target}"
case "$CARGO_TARGET_DIR" in /*) ;; *) CARGO_TARGET_DIR="$root/$CARGO_TARGET_DIR" ;; esac
tree="$CARGO_TARGET_DIR/planted/tree"
log="$CARGO_TARGET_DIR/planted/log"
# A directory of its own: the module has the same name, whatever the package is called.
module_target="$CARGO_TARGET_DIR/planted/build"
only=("$@")
planted=0
survived=0

fresh_tree() {
    rm -rf "$tree"
    mkdir -p "$tree"
    (cd "$root" && git ls-files -z --cached --others --exclude-standard |
        while IFS= read -r -d '' file; do [ -e "$file" ] && printf '%s\0' "$file"; done |
        xargs -0 cp --parents -t "$tree")
    # Another package: Cargo takes the copy for the same one, and would reuse a planted artefact for the clean tree.
    # What it depends on is the same, and is built already.
    sed -i 's/^name = "envoy-idempotency"$/name = "envoy-idempotency-planted"/' "$tree/Cargo.toml" "$tree/Cargo.lock"
    # Cargo compares times: what an earlier bug left behind must not look newer than the clean file.
    find "$tree" -name '*.rs' -exec touch {} +
}

# edit FILE FROM TO: replaces a text that must be there exactly once.
edit() {
    python3 - "$tree/$1" "$2" "$3" <<'PY'
import sys
path, old, new = sys.argv[1:]
text = open(path).read()
if text.count(old) != 1:
    sys.exit(f"{path}: {text.count(old)} places read {old!r}, expected 1: the planted bug is out of date")
open(path, "w").write(text.replace(old, new))
PY
}

# Without the floods: a planted bug has to show sooner.
native() {
    (cd "$tree" && cargo test --locked --lib --test scenarios --test store_contract \
        --no-fail-fast -- --skip bounds::)
}

# The inputs that the fuzz targets started from and found.
corpus() {
    (cd "$tree" && cargo test --locked --test corpus)
}

# The end-to-end binary is the unplanted one; only the filter it loads is planted.
through_envoy() {
    (cd "$tree" && cargo build --locked --release --lib --target wasm32-wasip1 --features test-hooks \
        --target-dir "$module_target")
    cp "$module_target/wasm32-wasip1/release/idempotency.wasm" "$tree/planted.wasm"
    (cd "$root" && IDEMPOTENCY_WASM="$tree/planted.wasm" IDEMPOTENCY_TEST_WASM="$tree/planted.wasm" \
        cargo test --locked --test e2e "$@")
}

# must_fail NAME COMMAND…: the command has to end with failed tests, not with a build error.
must_fail() {
    local name=$1
    shift
    if "$@" >"$log" 2>&1; then
        echo "SURVIVED  $name: the suite stayed green"
        survived=$((survived + 1))
    elif grep -q '^test result: FAILED' "$log"; then
        echo "caught    $name: $(grep -c '^test .* FAILED$' "$log") tests red, first: $(grep -m1 '^test .* FAILED$' "$log" | cut -d' ' -f2)"
    else
        echo "BROKEN    $name: no test ran"
        tail -30 "$log"
        survived=$((survived + 1))
    fi
}

wanted() {
    [ ${#only[@]} -eq 0 ] && return 0
    local name
    for name in "${only[@]}"; do [ "$name" = "$1" ] && return 0; done
    return 1
}

plant() {
    local name=$1
    wanted "$name" || return 0
    planted=$((planted + 1))
    fresh_tree
    "bug_$name"
}

bug_no_fencing() {
    edit src/record/mod.rs 'if record.owner != *owner {' 'if false {'
    must_fail no_fencing native
}

bug_no_fingerprint_check() {
    edit src/exchange/mod.rs ') if found != fingerprint =>' ') if found != fingerprint && false =>'
    must_fail no_fingerprint_check native
}

bug_lease_is_record_ttl() {
    edit src/record/mod.rs 'lease_until: now.after(terms.lock_ttl)' 'lease_until: now.after(terms.record_ttl)'
    must_fail lease_is_record_ttl native
}

bug_own_replies_stored() {
    edit src/outcome.rs 'if details == VIA_UPSTREAM {' 'if details == VIA_UPSTREAM || true {'
    must_fail own_replies_stored native
}

bug_cas_none() {
    edit src/host/shared_data.rs 'const CREATE: u32 = u32::MAX;' 'const CREATE: u32 = 0;'
    edit src/host/shared_data.rs 'Seen::Version(cas) => cas,' 'Seen::Version(_) => 0,'
    must_fail cas_none through_envoy contract::
}

bug_detached_request_goes_on() {
    edit src/exchange/response.rs 'Self::After(_) | Self::Before(_) | Self::Nobody => Gate::HoldRequest,' \
        'Self::After(_) | Self::Before(_) | Self::Nobody => Gate::Pass,'
    must_fail detached_request_goes_on native
}

bug_replayed_body_cut() {
    edit src/exchange/mod.rs 'let body_at = encoded.len().saturating_sub(body.len());' \
        'let body_at = encoded.len().saturating_sub(body.len()).saturating_add(1);'
    must_fail replayed_body_cut native
}

# Only a client that leaves at the wrong moment shows it.
bug_client_gone_frees_the_key() {
    edit src/outcome.rs 'OnFailure::Retain =>' 'OnFailure::Retain if reason != Reason::ClientGone =>'
    edit src/outcome.rs 'OnFailure::Release => ClaimEnd' 'OnFailure::Retain | OnFailure::Release => ClaimEnd'
    must_fail client_gone_frees_the_key through_envoy chaos::storm
}

bug_names_run_together() {
    edit src/fingerprint.rs '        update_framed(hasher, name);' '        hasher.update(name);'
    must_fail names_run_together corpus
}

for bug in no_fencing no_fingerprint_check lease_is_record_ttl own_replies_stored detached_request_goes_on \
    replayed_body_cut names_run_together cas_none client_gone_frees_the_key; do plant "$bug"; done

echo "$planted bugs planted, $((planted - survived)) caught, $survived not"
[ "$planted" -gt 0 ] && [ "$survived" -eq 0 ]
