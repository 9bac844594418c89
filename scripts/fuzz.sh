#!/usr/bin/env bash
# Runs the fuzz targets (all of them, or the one that is named) for so many seconds each, and says of each what came of it.
# An input that breaks a property is left in fuzz/artifacts/: moved to fuzz/corpus/<target>/, `make test` keeps it.
# What raised the coverage goes to fuzz/target/found/, not into the repository.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:?usage: scripts/fuzz.sh SECONDS [TARGET]}
only=${2:-}
if ! command -v c++ >/dev/null; then
    echo 'fuzz: no C++ compiler for libFuzzer (on Debian: apt-get install g++)' >&2
    exit 1
fi
targets=$(cd fuzz/fuzz_targets && printf '%s\n' *.rs | sed 's/\.rs$//')
if [ -n "$only" ]; then
    grep -qx -- "$only" <<<"$targets" || { printf 'fuzz: no target "%s"; there are:\n%s\n' "$only" "$targets" >&2; exit 2; }
    targets=$only
fi

# What `cargo fuzz run --sanitizer none` passes: coverage counters, and the operands of comparisons. Stable has no
# AddressSanitizer, and the crate has no unsafe code outside of its host calls. With a target named, the flags reach
# neither build scripts nor procedural macros, which could not be linked with them.
triple=$(rustc -vV | sed -n 's/^host: //p')
export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Ccodegen-units=1"
cargo build --quiet --locked --release --manifest-path fuzz/Cargo.toml --target-dir fuzz/target --target "$triple" ${only:+--bin "$only"}

failed=()
printf '%-16s %10s %20s %16s\n' target runs coverage corpus
for target in $targets; do
    found=fuzz/target/found/$target
    log=fuzz/target/$target.log
    artifacts=fuzz/artifacts/$target/
    mkdir -p "$found" "$artifacts"
    dictionary=fuzz/dictionaries/$target.dict
    arguments=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=4096 -artifact_prefix="$artifacts")
    [ ! -f "$dictionary" ] || arguments+=(-dict="$dictionary")
    if ! "fuzz/target/$triple/release/$target" "${arguments[@]}" "$found" "fuzz/corpus/$target" >"$log" 2>&1; then
        failed+=("$target")
        grep -E "panicked at|ERROR: libFuzzer|Test unit written" -A 3 "$log" | head -n 30 >&2 || true
    fi
    # libFuzzer counts the edges of the corpus when it has read it, and at the end.
    edges() { sed -n "s/.*$1 *cov: \([0-9]*\).*/\1/p" "$log" | tail -n 1; }
    last=$(grep -E 'cov: ' "$log" | tail -n 1)
    printf '%-16s %10s %20s %16s\n' "$target" "$(sed -n 's/^#\([0-9]*\).*/\1/p' <<<"$last")" \
        "$(edges INITED) -> $(sed -n 's/.*cov: \([0-9]*\).*/\1/p' <<<"$last")" \
        "$(find "fuzz/corpus/$target" -type f | wc -l) -> $(sed -n 's/.*corp: \([0-9]*\).*/\1/p' <<<"$last")"
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "fuzz: FAILED: ${failed[*]} (inputs in fuzz/artifacts/, logs in fuzz/target/)" >&2
    exit 1
fi
