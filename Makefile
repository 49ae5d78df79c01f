# The two commands of README.md are `make demo` and `make test`; `make` alone lists all.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Python compiles what is imported, which is half of the files that pip would compile.
PIP_INSTALL := $(PIP) install --quiet --no-compile
# pip refuses a package without a hash of lock.txt. An index with builds of its own needs `make CONSTRAINTS=constraints.txt …`,
# which takes the same versions and checks no hash.
CONSTRAINTS ?=
ifeq ($(CONSTRAINTS),)
install = $(BIN)/python .ci/locked.py $(1) $(2) > $(VENV)/locked.txt && $(PIP_INSTALL) --no-deps --requirement $(VENV)/locked.txt
else
install = $(PIP_INSTALL) --constraint $(CONSTRAINTS) '$(1)$(if $(2),[$(2)])'
endif
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends
CAN_APT := test "$$(id -u)" = 0 && command -v apt-get >/dev/null

# Not raised by `make lock`: a new torch is a download of gigabytes for everyone.
TORCH := 2.13.0
# docs/reference/torch.md says what was tried: these too, the oldest that pyproject.toml allows first.
OTHER_TORCHS ?= 2.6.0 2.14.1 2.15.0
# DDP on hosts, torchrun's agents on our rendezvous, and an elastic job in the process whose workers are killed.
TORCH_HOST_TESTS := tests/cluster/test_torch.py tests/cluster/test_torchrun.py \
    tests/cluster/test_training.py::test_digits_are_learned_as_well_as_by_one_process \
    'tests/cluster/test_elastic.py::test_workers_fail_one_by_one[elastic_training-in-process]'
# Its builds for processors alone: the default index has those for NVIDIA GPUs, which are ten times as large.
CPU_TORCH ?= https://download.pytorch.org/whl/cpu
HAS_GPU := command -v nvidia-smi >/dev/null || test -e /proc/driver/nvidia/version

# What the wheel is made of. A directory is newer when a file of it was removed.
SOURCES := setup.py pyproject.toml README.md LICENSE $(shell find hvlaunch -name __pycache__ -prune -o -print)
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' hvlaunch/__init__.py)
WHEEL := dist/hvlaunch-$(VERSION)-py3-none-any.whl

# Tests wait much of their time, those on real hosts most of all, so more of them run at once than there are processors.
TEST_JOBS ?= 3
HOST_TEST_JOBS ?= 5
UNIT_TESTS ?= tests/unit tests/simulation
# COVERAGE=1 measures what the unit tests run, and shows it: for one who asks, since it is a tenth of their time.
COVERAGE ?=
HOST_TESTS ?= tests/cluster tests/security tests/testhosts
# dev has it too. The theme's makers tell whoever builds with it about another program of theirs.
DOCS_EXTRA := $(VENV)/.extras-$(if $(wildcard $(VENV)/.extras-dev),dev,docs)
SITE := NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH"
PYTEST := $(BIN)/pytest -m 'not long and not timing'
# What failed runs once more, alone: beside nine busy processes of tests, a process may wait for many seconds. What fails twice fails.
ONCE_MORE = || { echo 'make test: these failed beside others, and run once more, alone:'; $(PYTEST) --last-failed --last-failed-no-failures none -x

# `make test` lints and runs all tests at once; each of these shows its output when it is done.
CHECKS := lint unit-tests host-tests
# There tests begin when these are done, and lint, which needs neither, has a processor meanwhile.
READY := pythons compiled-tests
AT_ONCE := -j $(if $(filter output-sync,$(.FEATURES)),--output-sync=target)

# Eight processes of pytest load the same tests: compiling them takes longer than all that loading else does.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
ifeq ($(MAKECMDGOALS),$(CHECKS))
unit-tests host-tests: | $(READY)
# The processes for tests on hosts would end three minutes before those for unit tests: these are divided among them.
WITH_HOSTS := tests/simulation tests/unit/api tests/unit/ssh
HOST_TESTS := $(HOST_TESTS) $(WITH_HOSTS)
UNIT_TESTS := $(filter-out $(WITH_HOSTS),$(UNIT_TESTS)) $(addprefix --ignore=,$(filter tests/unit/%,$(WITH_HOSTS)))
else
.NOTPARALLEL:
endif
.PHONY: help demo test lint compiled-tests unit-tests host-tests ecosystem-tests testhosts-tests gpu-tests torch-versions torch-tests timing-tests format house lower-limits dev options-page pictures docs docs-version lock release-check clean pythons system-packages

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.extras-examples $(VENV)/.wheel ## train the digits example with 2 workers on this machine
	PATH="$(abspath $(BIN)):$$PATH" hvlaunch -np 2 python examples/ddp_digits.py
	@echo
	@echo 'make demo: that was hvlaunch with 2 workers on this machine. Next:'
	@echo '  your own script       . $(BIN)/activate && hvlaunch -np 2 python train.py'
	@echo '  two machines          docs/start.md, from step 2 on'

test: system-packages $(VENV)/.extras-dev $(VENV)/.wheel ## install what the tests need, then lint and run all tests
	@echo 'make test: $(CHECKS) run at once, and each shows its output when it is done'
	@$(MAKE) --no-print-directory $(AT_ONCE) $(CHECKS)
	@$(MAKE) --no-print-directory timing-tests

lint: $(VENV)/.extras-dev ## ruff, mypy, the layers, the agent's Python 3.8, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vermin -t=3.8- --no-tips --violations hvlaunch/agent
	$(BIN)/codespell

# Else each of the eight processes would do that, at the same time.
compiled-tests: $(VENV)/.extras-dev $(VENV)/.wheel
	@$(PYTEST) --collect-only -qq $(filter-out --ignore=%,$(UNIT_TESTS)) $(HOST_TESTS) >$(VENV)/collected.txt || { cat $(VENV)/collected.txt; exit 1; }

unit-tests: $(VENV)/.extras-dev $(VENV)/.wheel ## the tests of single modules, and the simulations
	$(PYTEST) -o cache_dir=.pytest_cache/unit -n $(TEST_JOBS) --dist worksteal --wheel=$(WHEEL) $(if $(COVERAGE),--cov --cov-report=) $(UNIT_TESTS) \
	    $(ONCE_MORE) -o cache_dir=.pytest_cache/unit --wheel=$(WHEEL) $(UNIT_TESTS); }
	$(if $(COVERAGE),@$(BIN)/python -m tests.coverage_report)

host-tests: $(VENV)/.extras-dev $(VENV)/.wheel ## the tests on real hosts; root alone can make those
	$(PYTEST) -o cache_dir=.pytest_cache/hosts -n $(HOST_TEST_JOBS) --dist loadgroup $(HOST_TESTS) \
	    $(ONCE_MORE) -o cache_dir=.pytest_cache/hosts $(HOST_TESTS); }

ecosystem-tests: $(VENV)/.extras-ecosystem $(VENV)/.wheel ## the examples with accelerate, Lightning and transformers, which this installs: 0.1 GB
	$(BIN)/pytest -m '' tests/unit/test_ecosystem.py

testhosts-tests: $(VENV)/.extras-dev $(VENV)/.wheel ## the tests of the test hosts themselves; `make test` has them only if the tool changed
	$(BIN)/pytest --testhosts -n $(HOST_TEST_JOBS) --dist loadgroup tests/testhosts

gpu-tests: $(VENV)/.extras-dev $(VENV)/.editable ## the tests that need an NVIDIA GPU; one is enough, and root
	$(BIN)/pytest tests/gpu

# Each has an environment of its own, and what comes with torch in other versions. A build for processors is 1.5 GB there.
torch-versions: ## the tests of hvlaunch.torch and two jobs with other releases of torch, which this installs: 2 to 6 GB each
	@for version in $(OTHER_TORCHS); do \
	    mkdir -p .torch-$$version || exit 1; \
	    grep -Ev '^(torch|triton|sympy|cuda-[a-z-]+|nvidia-[a-z0-9-]+)==' constraints.txt > .torch-$$version/constraints.txt; \
	    $(MAKE) --no-print-directory VENV=.torch-$$version/venv CONSTRAINTS=.torch-$$version/constraints.txt TORCH=$$version \
	        torch-tests || exit 1; \
	done

torch-tests: $(VENV)/.extras-test $(VENV)/.wheel
	$(PYTEST) -n $(TEST_JOBS) --dist worksteal tests/unit/torch tests/unit/cli/test_foreign_options.py
	PATH="$(abspath $(BIN)):$$PATH" hvlaunch -np 2 python examples/ddp_digits.py
	PATH="$(abspath $(BIN)):$$PATH" hvlaunch -np 2 --min-np 1 python examples/elastic_digits.py
	$(BIN)/pytest -m '' -n $(TEST_JOBS) --dist loadgroup $(TORCH_HOST_TESTS)

timing-tests: $(VENV)/.extras-dev $(VENV)/.wheel ## the tests that measure how soon something happens: alone, one by one
	$(BIN)/pytest -m timing $$(grep -rl --include='test_*.py' mark.timing tests)

house: $(VENV)/.extras-dev ## print the figures of the code (size, language, imports) and their limits
	$(BIN)/python -m tests.house

lower-limits: $(VENV)/.extras-dev ## write figures of the code that fell as their new limits
	$(BIN)/python -m tests.house --lower

pythons: $(VENV)/.extras-dev ## fetch other Pythons, which hosts may have and the agent is tested on
	$(BIN)/python -m tests.pythons 3.8 3.14 3.15

format: $(VENV)/.extras-dev ## format the code, and fix what ruff can fix
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

options-page: dev ## write docs/reference/options.md, docs/reference/coming-from.md, docs/reference/json.md, docs/reference/errors*.md, docs/internals/waits.md and hvlaunch/api/options.py, from their tables
	$(BIN)/python docs/waits_page.py > docs/internals/waits.md.new
	mv docs/internals/waits.md.new docs/internals/waits.md
	$(BIN)/python docs/errors_page.py errors.md > docs/reference/errors.md.new
	mv docs/reference/errors.md.new docs/reference/errors.md
	$(BIN)/python docs/errors_page.py errors-python.md > docs/reference/errors-python.md.new
	mv docs/reference/errors-python.md.new docs/reference/errors-python.md
	$(BIN)/python docs/options_pages.py options.md > docs/reference/options.md.new
	mv docs/reference/options.md.new docs/reference/options.md
	$(BIN)/python docs/options_pages.py coming-from.md > docs/reference/coming-from.md.new
	mv docs/reference/coming-from.md.new docs/reference/coming-from.md
	$(BIN)/python docs/options_pages.py json.md > docs/reference/json.md.new
	mv docs/reference/json.md.new docs/reference/json.md
	$(BIN)/python docs/python_options.py hvlaunch/api/options.py
	$(BIN)/ruff format hvlaunch/api/options.py

pictures: dev ## make the pictures in docs/ anew, from real jobs: needs root
	$(BIN)/python docs/make_pictures.py
	$(BIN)/python docs/make_view_pictures.py
	$(BIN)/python docs/make_animation.py
	$(BIN)/python docs/make_figures.py

docs: $(DOCS_EXTRA) ## build the site of docs/ in site/, where a warning is an error
	$(SITE) python -m mkdocs build --strict --quiet
	@echo 'make docs: site/ is built; to look at it: python3 -m http.server --directory site'

docs-version: $(DOCS_EXTRA) ## put the site of this version beside those of others, in the branch gh-pages of this clone
	$(SITE) mike deploy --update-aliases $(VERSION) latest
	$(SITE) mike set-default latest

dev: $(VENV)/.extras-dev $(VENV)/.editable ## install the working tree in the wheel's place, for quick work with pytest

lock: $(VENV)/.extras-release ## write lock.txt and constraints.txt anew, with the newest of all but torch
	echo torch==$(TORCH) | $(BIN)/uv pip compile --quiet --no-config --universal --python-version 3.10 --upgrade --all-extras \
	    --constraint - --generate-hashes --no-header --output-file lock.txt pyproject.toml
	sed -e '/^ /d' -e 's/ \\$$//' lock.txt > constraints.txt

release-check: $(VENV)/.extras-release ## build what a release has, and try it in a fresh environment
	RELEASE='$(RELEASE)' .ci/release-check $(BIN)

clean: ## remove what was made, but for the virtual environment
	rm -rf build dist site .torch-* *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The tests on real hosts make them of network namespaces, each with an sshd of its own.
system-packages:
	@PATH="$$PATH:/usr/sbin:/sbin"; missing=; \
	for need in sshd=openssh-server ip=iproute2 iptables=iptables ps=procps fish=fish tcsh=tcsh zsh=zsh \
	    mpirun.openmpi=openmpi-bin mpirun.mpich=mpich slurmctld=slurm-wlm munged=munge \
	    tmux=tmux; do \
	    command -v "$${need%=*}" >/dev/null || missing="$$missing $${need#*=}"; \
	done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if $(CAN_APT); then \
	    apt-get update -qq && $(APT_INSTALL) $$missing; \
	else \
	    echo "make test: these are missing, and only root can install them:$$missing"; \
	    echo "make test: the tests on real hosts will be skipped; all others run"; \
	fi
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi; \
	if ! { $(CAN_APT) && apt-get update -qq && $(APT_INSTALL) chromium chromium-driver; }; then \
	    echo 'make test: there is no Chromium: the page of hvlaunch top will not be tried in a browser'; \
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
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.setuptools: lock.txt $(VENV)/.made
	@$(call install,setuptools)
	@touch $@

# The rest is some 0.1 GB. torch alone is taken without a hash, since each index has builds of its own. Behind setuptools: pip
# complains as long as what torch needs is not there, which comes with the extras.
$(VENV)/.torch: $(VENV)/.setuptools
	@if $(BIN)/python -c 'from importlib.metadata import version; assert version("torch").split("+")[0] == "$(TORCH)"' 2>/dev/null; \
	then touch $@; exit; fi; \
	if [ "$$(uname -s)" = Linux ] && ! { $(HAS_GPU); }; then \
	    echo 'make: there is no NVIDIA GPU here: torch $(TORCH) for processors, about 0.3 GB to download with all else, 1.5 GB on disk'; \
	    if $(PIP_INSTALL) --no-deps --retries 1 --timeout 15 --index-url $(CPU_TORCH) torch==$(TORCH) >$(VENV)/torch.log 2>&1; \
	    then touch $@; exit; fi; \
	    echo 'make: it can'"'"'t be had from $(CPU_TORCH) ($(VENV)/torch.log says why; CPU_TORCH=URL is another place)'; \
	fi; \
	echo 'make: torch $(TORCH) from the default index, on Linux with all for NVIDIA GPUs: about 3 GB to download, 7 GB on disk'; \
	$(PIP_INSTALL) --no-deps torch==$(TORCH) && touch $@

# What an extra brings, beside hvlaunch itself, which is installed again after it: as a wheel, or as the working tree.
$(addprefix $(VENV)/.extras-,dev ecosystem examples release test): $(VENV)/.torch
$(VENV)/.extras-%: pyproject.toml lock.txt .ci/locked.py $(VENV)/.made
	@$(MAKE) --no-print-directory $(WHEEL)
	@echo 'make: installing the packages of pyproject.toml, [$*]'
	@$(call install,$(WHEEL),$*)
	@rm -f $(VENV)/.wheel $(VENV)/.editable
	@touch $@

# build/ has to go first: what was removed from the working tree would be there still.
$(WHEEL): $(SOURCES) $(VENV)/.setuptools
	@rm -rf build/lib build/bdist.*
	@$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

$(VENV)/.wheel: $(WHEEL) $(VENV)/.made
	@$(PIP) install --quiet --no-deps --force-reinstall $(WHEEL)
	@rm -f $(VENV)/.editable
	@touch $@

# A plain path: setuptools' import hook costs every start of Python here 10 ms.
$(VENV)/.editable: pyproject.toml $(VENV)/.setuptools
	$(PIP) install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
	@rm -f $(VENV)/.wheel
	@touch $@
