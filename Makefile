# The two commands of README.md are `make demo` and `make test`; `make` alone lists all.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends
CAN_APT := test "$$(id -u)" = 0 && command -v apt-get >/dev/null

# A plain path: setuptools' import hook costs every start of Python here 10 ms.
EDITABLE := --config-settings editable_mode=compat -e

# The tests on real hosts wait much of their time, so more of them run at once.
TEST_JOBS ?= 2
HOST_TEST_JOBS ?= 4

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test lint format options-page clean pythons system-packages

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed-examples ## train the digits example with 2 workers on this machine
	PATH="$(abspath $(BIN)):$$PATH" hvlaunch -np 2 python examples/ddp_digits.py

test: system-packages lint pythons ## install what the tests need, then lint and run all tests
	$(BIN)/pytest -n $(TEST_JOBS) --ignore=tests/cluster
	$(BIN)/pytest -n $(HOST_TEST_JOBS) --dist loadgroup tests/cluster

pythons: $(VENV)/.installed-dev ## fetch other Pythons, which hosts may have and the agent is tested on
	$(BIN)/python -m tests.pythons 3.8 3.14 3.15

lint: $(VENV)/.installed-dev ## ruff, mypy, the layers, the agent's Python 3.8, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vermin -t=3.8- --no-tips --violations hvlaunch/agent
	$(BIN)/codespell

format: $(VENV)/.installed-dev ## format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

options-page: $(VENV)/.installed-dev ## write docs/options.md, from the table of options
	$(BIN)/python -m hvlaunch.cli.options_page > docs/options.md.new
	mv docs/options.md.new docs/options.md

clean: ## remove what was made, but for the virtual environment
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The tests on real hosts make them of network namespaces, each with an sshd of its own.
system-packages:
	@PATH="$$PATH:/usr/sbin:/sbin"; missing=; \
	for need in sshd=openssh-server ip=iproute2 iptables=iptables ps=procps fish=fish tcsh=tcsh zsh=zsh \
	    mpirun.openmpi=openmpi-bin mpirun.mpich=mpich slurmctld=slurm-wlm munged=munge; do \
	    command -v "$${need%=*}" >/dev/null || missing="$$missing $${need#*=}"; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if $(CAN_APT); then \
	    apt-get update -qq && $(APT_INSTALL) $$missing; \
	else \
	    echo "make test: these are missing, and only root can install them:$$missing"; \
	    echo "make test: the tests on real hosts will be skipped; all others run"; \
	fi

$(VENV)/.made:
	@if [ $(PYTHON) = python3 ] && ! command -v python3 >/dev/null && $(CAN_APT); then \
	    apt-get update -qq && $(APT_INSTALL) python3 python3-venv; \
	fi
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON); hvlaunch needs Python 3.10 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "make: $$($(PYTHON) --version) is too old: hvlaunch needs Python 3.10 or newer; try: make PYTHON=python3.12"; \
	    exit 1; }
	@package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
	    if $(CAN_APT); then apt-get update -qq && $(APT_INSTALL) "$$package"; \
	    else echo "make: $(PYTHON) can't make virtual environments; try: apt-get install $$package"; exit 1; fi; \
	fi
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt $(VENV)/.made
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt $(EDITABLE) '.[$*]'
	@touch $@
