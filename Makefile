# Two commands start everything: `make demo` and `make test`. Each makes its own .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
READY_TO_TEST := .venv/.ready-to-test
# Waiting OpenMP threads sleep instead of spinning: on a busy machine that is the difference between slow and stuck.
export OMP_WAIT_POLICY ?= PASSIVE
# Compiled modules are kept: every worker of the tests starts by reading them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test lint types pytest soak package docs sbom audit clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY)  ## teach a model 15 facts, ask it, let it forget one; then a dense and an APN model; a report
	@$(BIN)/attractor demo

test: lint  ## lint, types and every test but the slow ones
	@$(MAKE) --no-print-directory --jobs=2 types pytest  # mypy takes half a minute of one core

lint: $(READY_TO_TEST)  ## ruff and the import direction
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

types: $(READY_TO_TEST)  ## mypy
	@$(BIN)/mypy

pytest: $(READY_TO_TEST)  ## the tests alone, on two cores
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal

soak: $(READY_TO_TEST)  ## the slow tests, and what a server promises: kill -9, pauses, 64 clients (twenty minutes)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs,notebooks]"
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow
	@$(BIN)/python benchmarks/soak.py --result results/soak.json
	@$(BIN)/python benchmarks/replicas.py --result results/replicas.json

package: $(READY_TO_TEST)  ## build wheel and sdist into dist/, and try them in empty environments (twenty minutes)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[package]"
	@rm -rf dist
	@ATTRACTOR_DIST=dist ATTRACTOR_NETWORK=1 $(BIN)/python -m pytest -q -m slow tests/test_package.py

docs: $(READY_TO_TEST)  ## build the documentation into site/, and check its links
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

sbom: $(READY_TO_TEST)  ## what .venv is made of, as CycloneDX JSON in dist/sbom.json; it has the licences, too
	@$(PYTHON) -m venv .venv/sbom
	@.venv/sbom/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt cyclonedx-bom
	@mkdir -p dist
	@.venv/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON \
	  -o dist/sbom.json $(BIN)/python

audit: $(READY_TO_TEST)  ## ask pip-audit for known weaknesses of all that is in .venv; it needs a network
	@$(PYTHON) -m venv .venv/audit
	@.venv/audit/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip-audit
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//' > .venv/audit/installed.txt
	@.venv/audit/bin/pip-audit --strict --disable-pip --no-deps -r .venv/audit/installed.txt \
	  || { echo "Not clean, or nobody could be asked: see above. Without an answer nothing was audited."; exit 1; }

clean:  ## remove .venv and every cache
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted set-up starts again instead of leaving half an environment.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Attractor needs Python 3.11 or newer; this is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 demo"; exit 1; }
	@echo "Setting up .venv (once; PyTorch is a large download) ..."
	@$(PYTHON) -m venv .venv \
	  || { echo "Could not create .venv: install your system's venv package (Debian, Ubuntu: python3-venv)"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[cli,train,hf,serve]"
	@touch $@

$(READY_TO_TEST): $(READY)
	@echo "Adding what the tests need (once; Triton is large) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[cli,train,hf,dev]"
	@touch $@
