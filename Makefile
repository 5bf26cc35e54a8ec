PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check
# The version that .venv is to have: of PYTHON where it is given, otherwise of the .venv that is there.
ASKED := $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
VERSION := $(shell $(ASKED) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

.PHONY: help run test tools quick long fresh lint fmt bench judge loadtest proof campaign lock clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: .venv/run.stamp ## start Headgate here, store and example policies included
	$(BIN)/headgate up --policies $(or $(HEADGATE_POLICIES),docs/policies.example.yaml)

test: .venv/test.stamp lint ## lint, type-check and run the test suite, with the lines it did not reach; PYTHON=, PYTEST_ARGS=
	$(BIN)/python -m slipcover --skip-covered --missing-width 40 --source headgate,limiter,api -m pytest -n 2 -m "not long" $(PYTEST_ARGS)

tools: .tools/litellm.stamp .tools/typescript.stamp .tools/go.stamp ## what some tests need beside: LiteLLM, Celery, generators of clients in TypeScript and Go

quick: .venv/test.stamp ## ruff and the tests that need no server, in less than a minute; PYTEST_ARGS=
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest -n 2 -q -m "not slow and not long" tests/model tests/test_tidy.py tests/test_rooms.py tests/test_citations.py $(PYTEST_ARGS)

fmt: .venv/test.stamp ## format the code, and mend what ruff can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

long: .venv/test.stamp ## run the long part of the test suite: fleets under fire, minutes of hostile traffic; PYTEST_ARGS=
	$(BIN)/pytest -m long $(PYTEST_ARGS)

fresh: ## clone HEAD elsewhere and try the README's two commands there from nothing; PYTHON=, PYTEST_ARGS=
	$(PYTHON) .ci/fresh.py

lint: .venv/test.stamp ## ruff, mypy --strict, and luacheck where it is installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/lint_lua.py

bench: .venv/run.stamp ## measure this machine: scripts, batcher, controller, bytes per bucket, HTTP, client
	$(BIN)/headgate bench
	$(BIN)/python -m loadtest.http_bench
	$(BIN)/python -m loadtest.road_bench
	$(BIN)/python -m loadtest.client_bench

judge: .venv/run.stamp ## every control law against scenarios in virtual time, as tables with verdicts: ROWS=, SEEDS="7 8"
	nice $(BIN)/python -m loadtest.simulation judge $(if $(ROWS),--rows $(ROWS)) $(SEEDS:%=--seed %)

loadtest: .venv/test.stamp ## Locust users against a fresh Headgate: SHAPE=steady|ramp|spike|soak, SECONDS=, WORKERS=
	$(BIN)/python -m loadtest.locust --shape $(or $(SHAPE),steady) --seconds $(or $(SECONDS),0) --workers $(or $(WORKERS),0)

proof: .venv/test.stamp ## a fleet on a cluster, processes killed under load: what holds, into docs/proof.md
	$(BIN)/python -m loadtest.proof

campaign: .venv/test.stamp ## hostile traffic against two nodes while somebody well-behaved is served: SECONDS=, SEED=
	$(BIN)/python -m loadtest.campaign --seconds $(or $(SECONDS),300) --seed "$(SEED)"

lock: .venv/test.stamp ## pin the dependencies again, with hashes
	$(PIP) install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --python-version 3.11 \
	  pyproject.toml --extra server --group build -o .ci/run.lock
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --python-version 3.11 \
	  pyproject.toml --all-extras --group dev -c .ci/run.lock -o .ci/test.lock
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --python-version 3.11 \
	  pyproject.toml --extra server --extra otel --group build -c .ci/test.lock -o .ci/image.lock
	printf 'celery[redis]\nlitellm\n' | $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate \
	  --python-version 3.11 - pyproject.toml -c .ci/run.lock -o .ci/litellm.lock

clean: ## remove what the other targets made here
	rm -rf .venv .tools .headgate .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build

# Each stamp stands for one lock file installed with its hashes checked; the project itself is linked in, not copied.
.venv/%.stamp: .ci/%.lock pyproject.toml .venv/lib/python$(VERSION)
	$(PIP) install --quiet --require-hashes -r $<
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# Packages that must not come near the project's own. Nothing here is compiled that no test imports.
.tools/litellm.stamp: .ci/litellm.lock | .venv/test.stamp
	rm -rf .tools/litellm
	$(BIN)/python -m venv --without-pip .tools/litellm
	$(PIP) --python .tools/litellm/bin/python install --quiet --no-compile --require-hashes -r $<
	@touch $@

.tools/typescript.stamp: .ci/typescript/package-lock.json
	@command -v npm > /dev/null || { echo "npm is missing: sudo .ci/install"; exit 1; }
	mkdir -p .tools/typescript
	cp .ci/typescript/package.json .ci/typescript/package-lock.json .tools/typescript
	cd .tools/typescript && npm ci --silent --no-audit --no-fund --ignore-scripts
	@touch $@

# The packages that a generated client needs are compiled here, so that its test compiles little.
.tools/go.stamp: .ci/go/go.mod .ci/go/go.sum
	@command -v go > /dev/null || { echo "go is missing: sudo .ci/install"; exit 1; }
	mkdir -p .tools/go
	cp .ci/go/go.mod .ci/go/go.sum .tools/go
	cd .tools/go && go build -o bin/ github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen \
	  && go build github.com/oapi-codegen/runtime
	@touch $@

# An environment of another version of Python is made again, stamps included.
.venv/lib/python$(VERSION):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Headgate needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	rm -rf .venv
	$(PYTHON) -m venv .venv
