#!/usr/bin/env bash
# Runs the end-to-end suite on each Envoy version given, and prints what differs. The modules and the test binary are
# built once. Usage: scripts/e2e-matrix.sh VERSION… -- [ARGUMENTS OF THE TEST BINARY…]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    versions+=("$1")
    shift
done
[ $# -eq 0 ] || shift
logs="${CARGO_TARGET_DIR:-target}/e2e-matrix"
mkdir -p "$logs"
failed=0
table=''
for version in "${versions[@]}"; do
    # An ENVOY_PATH of the caller's would be taken for every version.
    envoy=$(unset ENVOY_PATH && scripts/install-envoy.sh "$version")
    log="$logs/$version.log"
    started=$SECONDS
    printf '=== Envoy %s (log: %s)\n' "$version" "$log"
    status=passed
    ENVOY_PATH="$envoy" cargo test --locked --test e2e -- "$@" >"$log" 2>&1 || status=FAILED
    counts=$(sed -n 's/^test result: [A-Za-z]*\. \([0-9]* passed; [0-9]* failed\).*/\1/p' "$log" | tail -n 1)
    if [ -z "$counts" ]; then
        counts='no test ran'
        status=FAILED
    fi
    [ "$status" = passed ] || { failed=1; grep '^test .* FAILED$' "$log" || tail -n 20 "$log"; }
    table+=$(printf '%-8s  %-7s  %-24s  %4d s' "$version" "$status" "$counts" "$((SECONDS - started))")$'\n'
done
printf '\n%s' "$table"
exit "$failed"
