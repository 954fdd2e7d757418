# The two targets to know: `make demo` shows what zmdp does, `make test` tests it.  Both install what they need into
# .venv; `make test` also installs Java and Chromium if it may, `make demo-spark` Java.

PYTHON ?= python3
SEEDS ?= 10000
KILLS ?= 200
SECONDS ?= 120
AMOUNT ?= 50000
VENV := .venv
# Tests start thousands of Python processes; each would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py $(shell find src mdp mmi clients workers titanic migrations spark -name '*.py' -o -name '*.pyx')
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Editable, so that edits take effect at once; `strict` so that mypy finds the package.
INSTALL := $(PIP) install --config-settings editable_mode=strict

# Found as in spark/session.py: JAVA_HOME first, then PATH.
JAVA = $(if $(JAVA_HOME),$(wildcard $(JAVA_HOME)/bin/java),$(shell command -v java))
HAVE_JAVA = command -v java >/dev/null || [ -x "$(JAVA_HOME)/bin/java" ]

.PHONY: demo demo-spark test test-spark java browser lint unit covered sim crash attack failover bench bench-more clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo            start a broker and workers, send requests, kill processes, show what happens (under a minute)"
	@echo "make demo-spark      the same for Spark: kill an executor, run a job that survives its caller (needs Java 17)"
	@echo "make test            check style and types, run all tests except the longest on Spark"
	@echo "make test-spark      run all tests on Spark, including those that take minutes"
	@echo "make lint            check style, types and the width of the documentation"
	@echo "make unit            run the tests without sockets, with coverage of the protocol's core"
	@echo "make sim SEEDS=10000 run the simulator for more seeds"
	@echo "make crash KILLS=200 kill brokers, Titanics and workers under load, on SQLite and PostgreSQL; nothing may be lost"
	@echo "make attack          attack a broker in every way there is; a canary's calls must not fail, memory must stay bounded"
	@echo "make failover        kill and drain linked brokers under load, for minutes; no call may fail"
	@echo "make bench           measure zmdp beside NATS, RabbitMQ, Redis, gearmand, Celery and others"
	@echo "make bench-more      measure recovery, Titanic and Spark"
	@echo "make clean           remove everything that these targets create"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "zmdp needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "This Python cannot create virtual environments. On Debian: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/zmdp.installed: $(SOURCES) | $(BIN)/python
	@echo "installing zmdp into $(VENV) …"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/dev.installed: $(SOURCES) | $(BIN)/python
	@echo "installing zmdp and its test tools into $(VENV) …"
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/zmdp.installed $(VENV)/spark.installed

$(VENV)/bench.installed: $(SOURCES) | $(BIN)/python
	@echo "installing zmdp and the systems it is measured against into $(VENV) …"
	@$(INSTALL) -e '.[bench]'
	@touch $@ $(VENV)/zmdp.installed

$(VENV)/spark.installed: $(SOURCES) | $(BIN)/python
	@echo "installing zmdp and PySpark (450 MB) into $(VENV) …"
	@$(INSTALL) -e '.[spark]'
	@touch $@ $(VENV)/zmdp.installed

demo: $(VENV)/zmdp.installed
	@$(BIN)/python examples/demo.py

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

test-spark: $(VENV)/dev.installed java
	$(BIN)/pytest tests/spark tests/docs/test_fleet_page.py

# What is compiled is tested compiled; the core, its conformance and its simulation on Python alone as well.
UNIT := $(shell find tests/mdp -name 'test_*.py') $(wildcard tests/mmi/test_*.py) tests/clients/test_legacy_session.py tests/clients/test_session.py tests/clients/test_failover.py tests/workers/test_session.py
# Those that count instructions take five times as long while coverage counts as well.
COUNTED := tests/mdp/broker/test_cost.py tests/mdp/broker/test_work.py
# Half of the others, for one of two processes.
HALF := $(wildcard tests/mdp/broker/test_broker*.py tests/mdp/wire/test_*.py)

# Tests on Spark, without those that only start Java processes of their own.
SPARK := $(filter-out %_process.py %_processes.py %/test_fleet_keys.py,$(wildcard tests/spark/test_*.py tests/spark/*/test_*.py))

# What is slow in one of these mostly waits for the other: mypy and coverage, the simulator and the broker's clock, Java
# and the processes that the tests of commands start.  So they run at the same time.  Tests on Spark share one
# process and its session.  In the order of their names no long file is left for the end, as it would be in xdist's.
test: java browser $(VENV)/dev.installed
	@$(MAKE) --no-print-directory -j 2 lint covered
	ZMDP_PURE=1 $(BIN)/pytest -n 3 --dist worksteal $(COUNTED) tests/simulation tests/conformance
	$(BIN)/pytest -m "not spark_long" $(SPARK) & spark=$$!; \
	$(BIN)/pytest -n 4 -m "not spark_long" --dist loadfile --no-loadscope-reorder tests $(SPARK:%=--ignore=%); rest=$$?; \
	wait $$spark && exit $$rest

lint: $(VENV)/dev.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p zmdp
	$(BIN)/python docs/check_width.py

unit: covered
	$(BIN)/pytest -n 2 $(UNIT)

covered: $(VENV)/dev.installed
	$(BIN)/coverage erase
	ZMDP_PURE=1 $(BIN)/coverage run -p --source=zmdp -m pytest --hypothesis-profile=covered $(HALF) & half=$$!; \
	ZMDP_PURE=1 $(BIN)/coverage run -p --source=zmdp -m pytest --hypothesis-profile=covered $(filter-out $(HALF) $(COUNTED),$(UNIT)) && wait $$half
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --fail-under=100 --include='*/mdp/wire/*.py,*/mdp/linked_lists.py,*/mdp/timers.py,*/mdp/broker/admission.py,*/mdp/broker/exchange.py,*/mdp/broker/given_up.py,*/mdp/broker/announcements.py,*/mdp/broker/link.py,*/mdp/broker/links.py,*/mdp/broker/machine.py,*/mdp/broker/metrics.py,*/mdp/broker/outgoing.py,*/mdp/broker/registry.py,*/mdp/broker/requests.py,*/mdp/broker/roles.py,*/mdp/broker/scheduling.py,*/mdp/broker/tails.py,*/mdp/broker/watch.py,*/clients/call.py,*/clients/session.py,*/clients/legacy_session.py,*/workers/session.py' --omit='*/mdp/wire/batch.py'

sim: $(VENV)/dev.installed
	$(BIN)/python tests/simulate.py --seeds $(SEEDS)

crash: $(VENV)/dev.installed
	$(BIN)/python tests/crash.py --kills $(KILLS) --db sqlite --titanics 1
	$(BIN)/python tests/crash.py --kills $(KILLS) --db postgres --titanics 2

attack: $(VENV)/dev.installed
	PYTHONPATH=tests $(BIN)/python -m attacks --amount $(AMOUNT)

failover: $(VENV)/dev.installed
	$(BIN)/python bench/failover.py --how kill --seconds $(SECONDS)
	$(BIN)/python bench/failover.py --how drain --seconds $(SECONDS)
	$(BIN)/python bench/failover.py --tree --seconds $(SECONDS)

bench: $(VENV)/bench.installed
	$(BIN)/python bench/suite.py $(if $(GUIDE),--guide $(GUIDE))

# What `make bench` does not cover: recovery, Titanic by itself, Spark.
bench-more: $(VENV)/dev.installed
	$(BIN)/python bench/x1.py
	$(BIN)/python bench/titanic.py
	$(BIN)/python bench/spark_batch.py
	$(BIN)/python bench/spark_fleet.py
	$(BIN)/python bench/spark_pipeline.py
	$(BIN)/python bench/spark_titanic.py

clean:
	rm -rf $(VENV) build *.egg-info src/zmdp/*.so .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find clients mdp workers -name '*.so' -delete
