# make help    this list
# make demo    the whole loop on the WorldPlay application, on this machine's CPU cores
# make test    all tests, three at a time: they often wait (WORKERS=1: one by one)
# make check   ruff, formatting, strict types; skills, plugin, manifests and tool schemas by their own validators (npm)
# make conformance  the official MCP conformance suite over HTTP, for both protocol eras (npm)
# make bench   benchmarks: ratios against a peer or a floor measured in the same run
# make soak    the long reliability runs: 100 kills, 200 random programs, every cheat ten times, a minute of leases
# make setup   only the environment (.venv); make clean removes it and what was made
#
# On a GPU host choose the torch build yourself:  make demo TORCH=torch==2.13.0

PYTHON ?= python3
VENV := .venv
WORKERS ?= 3
BIN := $(VENV)/bin
# The CPU build, by its own version, so that pip never falls back to gigabytes of CUDA libraries unasked.
ifeq ($(shell uname -m),x86_64)
TORCH ?= torch==2.13.0+cpu
else
TORCH ?= torch==2.13.0
endif
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: all help setup demo test check validators conformance bench soak clean
all: setup
help:
	@sed -n 's/^# make /make /p' $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "FlashRT needs Python 3.11 or newer; say which with: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)' || { echo "No such torch here. On a GPU host: make TORCH=torch==2.13.0 (CUDA libraries come with it)."; \
	  echo "Elsewhere point pip at PyTorch's own index of CPU builds, for example with PIP_EXTRA_INDEX_URL."; exit 1; }
	$(PIP) --constraint constraints.txt --editable '.[apps,dev]'
	@# AMD's binding apart: Ray imports it wherever it is installed, and fails where AMD's library is not.
	$(PIP) --no-deps --upgrade --target $(VENV)/bindings amdsmi==7.0.2
	@touch $@

demo: setup
	$(BIN)/flashrt demo worldplay --json demo.json

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	scripts/link_types.sh
	MYPYPATH=build/types $(BIN)/mypy -p flashrt
	$(MAKE) validators

NPM := build/npm
validators: setup
	@if command -v npm >/dev/null && $(MAKE) --no-print-directory $(NPM)/.installed; then scripts/check_manifests.sh $(NPM); \
	else echo "NOT CHECKED, since npm or its registry is not here: skills, plugin, manifests, tool schemas"; fi

conformance: setup
	@command -v npm >/dev/null || { echo "make conformance needs npm (Node.js 20 or newer): install it, then run this again"; exit 1; }
	@$(MAKE) --no-print-directory $(NPM)/.installed || { echo "make conformance: npm's registry is not here"; exit 1; }
	scripts/conformance.sh $(NPM)

$(NPM)/.installed: scripts/npm/package.json
	mkdir -p $(NPM) && cp scripts/npm/package.json $(NPM)/
	npm install --silent --no-audit --no-fund --no-package-lock --prefix $(NPM)
	@touch $@

bench: setup
	$(BIN)/python benchmarks/server_start.py
	$(BIN)/python benchmarks/harness.py
	$(BIN)/python benchmarks/transport.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/planned.py
	$(BIN)/python benchmarks/trace.py
	$(BIN)/python benchmarks/serving.py
	$(BIN)/python benchmarks/elastic.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/harness.py --compare --quick

soak: setup
	$(BIN)/python scripts/soak.py --kills 100 --programs 200 --cheats 10 --leases 60

clean:
	rm -rf $(VENV) build dist demo demo.json *.egg-info
