# The two targets to know: `make demo` shows what zmdp does, `make test` tests it.  Both install what they need into
# .venv; `make test` also installs Java, Chromium and PgBouncer if it may, `make demo-spark` Java.

PYTHON ?= python3
SEEDS ?= 10000
KILLS ?= 200
SECONDS ?= 120
HOURS ?= 2
AMOUNT ?= 50000
VENV ?= .venv
# Tests start thousands of Python processes; each would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py $(shell find src $(dir $(wildcard */__init__.py)) -name '*.py' -o -name '*.pyx' -o -name '*.pxd')
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Editable, so that edits take effect at once; `strict` so that mypy finds the package.
INSTALL := $(PIP) install --config-settings editable_mode=strict

# Found as in spark/session.py: JAVA_HOME first, then PATH.
JAVA = $(if $(JAVA_HOME),$(wildcard $(JAVA_HOME)/bin/java),$(shell command -v java))
HAVE_JAVA = command -v java >/dev/null || [ -x "$(JAVA_HOME)/bin/java" ]

.PHONY: airflow demo demo-spark docs docs-pages docs-serve test test-all test-long test-loaded test-pythons quick java browser pgbouncer node lint unit sim crash attack failover limited soak bench dist compatibility release-check clean help
.DEFAULT_GOAL := help

help:
	@echo "On two cores, without the first installation (5 minutes, and 1 GB of downloads for the tests):"
	@echo "make demo             1 minute        start a broker and workers, send requests, kill processes, show what happens"
	@echo "make demo-spark       2 minutes       the same for Spark: a query, a DataFrame through a service, an executor killed (needs Java 17)"
	@echo "make test             8 minutes       check style and types, run the tests"
	@echo "make test-all         30 minutes      run everything: both builds, more seeds, Spark, attacks and crashes at length"
	@echo "make test-loaded      1 hour          make test, twice, at the lowest priority beside four busy loops"
	@echo "make test-pythons     8 minutes each  run the quick tests on each other Python that is found: $(PYTHONS)"
	@echo "make airflow          2 minutes       install Airflow into an environment of its own, for the tests that need it"
	@echo "make lint             1 minute        check style, types and the width of the documentation"
	@echo "make docs             1 minute        build the documentation as a site in build/site, and check its links"
	@echo "make docs-serve       until Ctrl-C    show the site at http://localhost:8000, and again whenever a page changes"
	@echo "make unit             1 minute        run the tests without sockets, with coverage of the protocol's core"
	@echo "make sim SEEDS=10000  10 minutes      run the simulator for more seeds"
	@echo "make crash KILLS=200  6 minutes       kill brokers, Titanics and workers under load, on SQLite and PostgreSQL; nothing may be lost"
	@echo "make attack           10 minutes      attack a broker in every way there is; a canary's calls must not fail, memory must stay bounded"
	@echo "make failover         6 minutes       kill and drain linked brokers under load; no call may fail"
	@echo "make limited          3 minutes       call a service with a limit from everywhere while programs are killed; the limit must hold (needs Java 17)"
	@echo "make soak HOURS=2     2 hours         run everything at once while everything fails; calls are checked, memory and latency watched"
	@echo "make bench            20 minutes      measure zmdp beside NATS, RabbitMQ, Redis, Celery and Taskiq"
	@echo "make dist             2 minutes each  build a source distribution, a pure wheel, and a compiled one for each Python that is found"
	@echo "make compatibility    2 minutes       run the last release's programs with today's"
	@echo "make release-check    10 minutes      check that a release is complete: versions, changelog, wheels that install, documentation"
	@echo "make clean            at once         remove everything that these targets create"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "zmdp needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "This Python cannot create virtual environments. On Debian: apt-get install python3-venv" >&2; exit 1; }

# Not compiled, which takes a minute: a demo needs no speed.
$(VENV)/zmdp.installed: $(SOURCES) | $(BIN)/python
	@echo "installing zmdp into $(VENV), in pure Python …"
	@ZMDP_PURE=1 $(INSTALL) -e .
	@touch $@

# Without a network, perhaps not everything can be installed: the tests that need the rest are skipped, and say so.
$(VENV)/dev.installed: $(SOURCES) | $(BIN)/python
	@echo "installing zmdp and its test tools into $(VENV), PySpark (450 MB) among them, and compiling it …"
	@$(INSTALL) -e '.[dev]' || { \
		echo "not everything could be installed; trying without what only some tests need" >&2; $(INSTALL) -e '.[test]'; }
	@touch $@ $(VENV)/zmdp.installed $(VENV)/spark.installed

$(VENV)/bench.installed: $(SOURCES) | $(BIN)/python
	@echo "installing zmdp and the systems it is measured against into $(VENV) …"
	@$(INSTALL) -e '.[bench]'
	@touch $@ $(VENV)/zmdp.installed

$(VENV)/spark.installed: $(SOURCES) | $(BIN)/python
	@echo "installing zmdp, in pure Python, and PySpark (450 MB) into $(VENV) …"
	@ZMDP_PURE=1 $(INSTALL) -e '.[spark]'
	@touch $@ $(VENV)/zmdp.installed

# Lenient: the site needs no exact list of modules, so it is not installed again when sources change.
$(VENV)/docs.installed: pyproject.toml setup.py | $(BIN)/python
	@echo "installing zmdp and what builds its site into $(VENV) …"
	@ZMDP_PURE=1 $(PIP) install -e '.[docs]'
	@touch $@

demo: $(VENV)/zmdp.installed
	@$(BIN)/python examples/demo.py

# Airflow pins what zmdp leaves open, so it has an environment of its own; its tests are skipped without it.
airflow:
	@$(MAKE) --silent VENV=.venv-airflow .venv-airflow/airflow.installed

$(VENV)/airflow.installed: pyproject.toml setup.py | $(BIN)/python
	@echo "installing zmdp and Airflow into $(VENV) …"
	@ZMDP_PURE=1 $(INSTALL) -e . 'apache-airflow>=3.3,<4'
	@touch $@

# Java comes first: without it there is no reason to download PySpark.
demo-spark: java
	@$(HAVE_JAVA)
	@$(MAKE) --no-print-directory $(VENV)/spark.installed
	@$(BIN)/python examples/spark_scenes.py

# Installs Java if that is possible here.  Without Java the tests on Spark are skipped, and say so.
java:
	@if [ -z "$(JAVA)" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing Java …"; \
		for package in openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless; do \
			{ apt-get install -y -qq --no-install-recommends $$package || \
				{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $$package; }; } \
				>/dev/null 2>&1 && break; \
		done; \
	fi
	@$(HAVE_JAVA) || \
		echo "Java is missing, and Spark needs it. On Debian: apt-get install openjdk-17-jre-headless" >&2

# Installs Chromium if that is possible here.  Without it the tests in a browser are skipped, and say so.
HAVE_BROWSER = { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null
browser:
	@if ! $(HAVE_BROWSER) && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing Chromium …"; \
		apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 || \
			{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1; \
	fi; \
	$(HAVE_BROWSER) || \
		echo "Chromium is missing, and tests in a browser need it. On Debian: apt-get install chromium" >&2

# Installs PgBouncer if that is possible here; where systemd runs, Debian also starts it.  Without it, the tests behind
# it are skipped, and say so.
HAVE_PGBOUNCER = PATH="$$PATH:/usr/sbin" command -v pgbouncer >/dev/null
pgbouncer:
	@if ! $(HAVE_PGBOUNCER) && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing PgBouncer …"; \
		apt-get install -y -qq --no-install-recommends pgbouncer >/dev/null 2>&1 || \
			{ apt-get update -qq && apt-get install -y -qq --no-install-recommends pgbouncer; } >/dev/null 2>&1; \
	fi; \
	$(HAVE_PGBOUNCER) || \
		echo "PgBouncer is missing, and some tests of Titanic need it. On Debian: apt-get install pgbouncer" >&2

# The site is built in an environment of its own, beside what tests and benchmarks need.
DOCS := .venv-docs/bin

docs-pages:
	@$(MAKE) --silent VENV=.venv-docs .venv-docs/docs.installed
	@$(DOCS)/python docs/generate.py

docs: docs-pages
	@PYTHONPATH=docs $(DOCS)/zensical build --strict --clean
	@$(DOCS)/python docs/check_site.py

docs-serve: docs-pages
	@PYTHONPATH=docs $(DOCS)/zensical serve

# tests/suites.py says what runs in which of them.
SUITE = $(BIN)/python tests/suites.py

test: java browser pgbouncer $(VENV)/dev.installed
	@$(SUITE) test

test-all: java browser pgbouncer $(VENV)/dev.installed
	@$(SUITE) all

# What `make test-all` runs beyond `make test`.
# ZeroMQ for Node, which the X1 programs in Node need (examples/x1).
node: $(VENV)/dev.installed
	@if command -v npm >/dev/null && ! [ -d $(VENV)/node/node_modules/zeromq ]; then \
		echo "installing zeromq for Node …"; npm install --silent --prefix $(VENV)/node zeromq@6 >/dev/null; \
	fi; \
	[ -d $(VENV)/node/node_modules/zeromq ] || \
		echo "zeromq for Node is missing, and tests of the programs in Node need it: install Node and npm" >&2

test-long: java browser pgbouncer node $(VENV)/dev.installed
	@$(SUITE) long

test-loaded: java browser pgbouncer $(VENV)/dev.installed
	@$(SUITE) test --load 4
	@$(SUITE) test --load 4

# Each other Python that is found, also by pyenv, gets a virtual environment of its own, compiled quickly rather than
# well.
python = $(shell python$(1) -c 'import sys; print(sys.executable)' 2>/dev/null || \
	ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$(1).*/bin/python$(1) 2>/dev/null | tail -1)
PYTHONS := 3.11 3.12 3.13 3.14
OTHERS = $(foreach version,$(filter-out $(THIS),$(PYTHONS)),$(if $(call python,$(version)),$(version)))
THIS = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
test-pythons:
	@for version in $(OTHERS); do $(MAKE) --no-print-directory test-python-$$version || exit 1; done
test-python-%:
	@echo "Python $*"
	@MYPYC_OPT_LEVEL=0 $(MAKE) --no-print-directory PYTHON=$(call python,$*) VENV=.venv-$* quick

quick: $(VENV)/dev.installed
	@$(SUITE) quick

lint: $(VENV)/dev.installed
	@$(SUITE) lint

unit: $(VENV)/dev.installed
	@$(SUITE) unit

sim: $(VENV)/dev.installed
	$(BIN)/python tests/simulate.py --seeds $(SEEDS)

crash: $(VENV)/dev.installed
	PYTHONPATH=tests $(BIN)/python -m faults.crash --kills $(KILLS) --db sqlite --titanics 1
	PYTHONPATH=tests $(BIN)/python -m faults.crash --kills $(KILLS) --db postgres --titanics 2

attack: $(VENV)/dev.installed
	PYTHONPATH=tests $(BIN)/python -m attacks --amount $(AMOUNT)

failover: $(VENV)/dev.installed
	PYTHONPATH=tests $(BIN)/python -m faults.failover --how kill --seconds $(SECONDS)
	PYTHONPATH=tests $(BIN)/python -m faults.failover --how drain --seconds $(SECONDS)
	PYTHONPATH=tests $(BIN)/python -m faults.failover --tree --seconds $(SECONDS)

limited: $(VENV)/dev.installed
	PYTHONPATH=tests $(BIN)/python -m faults.limited --seconds $(SECONDS)

# The report, its plots, the ledger and the logs are in build/soak.
soak: $(VENV)/dev.installed
	PYTHONPATH=tests $(BIN)/python -m faults.soak --hours $(HOURS)

bench: $(VENV)/bench.installed
	$(BIN)/python bench/suite.py

# Wheels come from the source distribution, which shows that it is complete; with ZMDP_PURE=0 one that cannot be
# compiled is an error.  Those for other systems are built by cibuildwheel (.github/workflows/release.yml).
DIST := .venv-dist/bin/python -m
COMPILED = $(foreach version,$(PYTHONS),$(call python,$(version)))
dist:
	@$(PYTHON) -m venv .venv-dist && $(DIST) pip install --quiet build uv
	rm -rf dist
	$(DIST) build --sdist
	ZMDP_PURE=1 $(DIST) pip wheel --quiet --no-deps --wheel-dir dist dist/zmdp-*.tar.gz
	for python in $(COMPILED); do \
		ZMDP_PURE=0 $(DIST) pip --python $$python wheel --quiet --no-deps --wheel-dir dist dist/zmdp-*.tar.gz || exit 1; \
	done

# With the last tag, or with the commit PREVIOUS.
compatibility: $(VENV)/dev.installed
	$(if $(PREVIOUS),ZMDP_PREVIOUS=$(PREVIOUS)) $(BIN)/python -m pytest -q tests/deploy/test_compatibility.py

# TAG is what is to be released, such as v0.1.0.
release-check: $(VENV)/dev.installed
	$(BIN)/python deploy/release_check.py $(TAG)
	@$(MAKE) --no-print-directory dist
	$(BIN)/python -m pytest -q -s tests/deploy/test_wheels.py
	@$(MAKE) --no-print-directory docs

clean:
	rm -rf .venv .venv-* build dist src/*.egg-info src/zmdp/*.so .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache .cache
	rm -f docs/reference/commands.md docs/llms.txt
	find clients mdp workers -name '*.so' -delete
