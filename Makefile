# keiro-relay: `make` or `make help` lists what there is.

CARGO ?= cargo
# Cargo.lock is what is tested.
CARGO_FLAGS ?= --locked
# More arguments of the demo and the bench: make demo ARGS=--keep
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help deps services languages check test demo bench mutants clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

deps: ## Check for what the build and the services need; install it from Debian when allowed to
	@tests/services/deps

services: deps ## Fetch PostgreSQL and Kafka from Maven Central to target/services
	@tests/services/fetch

languages: ## Fetch what the examples of producers in Python, Node.js and Go need to target/producers
	@tests/services/deps languages
	@tests/services/languages

check: deps ## Formatting, lints and documentation, warnings being errors
	$(CARGO) fmt --check
	$(CARGO) clippy $(CARGO_FLAGS) --all-targets -- -D warnings
	$(CARGO) clippy $(CARGO_FLAGS) --no-default-features --lib --examples -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(CARGO_FLAGS) --no-deps

test: services languages ## Run every test, on a PostgreSQL and a Kafka started for them
	$(CARGO) test $(CARGO_FLAGS)

demo: services ## Show the main job on servers of its own
	$(CARGO) run $(CARGO_FLAGS) --release -- demo $(ARGS)

bench: services ## Print the figures: buffers per claim, rows per second, latency
	$(CARGO) run $(CARGO_FLAGS) --release -- bench $(ARGS)

mutants: services ## Break what users rely on, one patch at a time; each must turn a named test red
	tests/mutants/run

clean: ## Remove everything built or fetched
	$(CARGO) clean
