# make demo   install into .venv, with or without a compiler, then plan, build, read, check and
#             lock one epoch of a real corpus
# make quick  the tests of formats, kernels, orders and plans alone, without torch, megatron-core
#             and Ray: under a minute on two cores, for the loop of editing and testing
# make test   install into .venv with what the tests need, then run them: minutes; JOBS= processes
# make lint   ruff and strict mypy
# make bench  time every kernel and the whole build against megatron-core; with
#             NEOX=checkout also against a GPT-NeoX checkout whose helpers are compiled, and with
#             MEGATRON=checkout against one of Megatron-LM main
# make bench-quick  a minute of it, and which speed-ups fell since benchmarks/baseline.json
# make matrix the Megatron adapter against every release of megatron-core
# make tags   plans against the training code of checkouts of Megatron-LM
# make wheels the sdist, and manylinux wheels of every Python that is found, in dist/: of x86-64, each
#             tested without a compiler, and of aarch64
# make aarch64  the kernels on an emulated aarch64, equal to x86-64 bit by bit
# make docs   the site of docs/, with search and an API reference, in build/site
# make docs-sample  docs/audit-sample.html, and the pictures of docs/
# make trainers   the scripts of examples/, and one lock under every trainer, with the real packages;
#             with NEOX=checkout also the loaders of GPT-NeoX, whose helpers are compiled
# make explore, make sanitize, make slow, make fuzz, make soak, make mutants,
#             make simulate, make coverage, make neox-runs, make nightly: see CONTRIBUTING.md

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check
SOURCES := pyproject.toml setup.py $(wildcard csrc/*.cpp csrc/*/*.cpp csrc/*/*.hpp)

# Processes that run tests: JOBS, or one a core, at most four; of all tests one more, since some
# wait for workers, servers and disks
CORES := $(shell n=$$(getconf _NPROCESSORS_ONLN); if [ "$$n" -lt 4 ]; then echo "$$n"; else echo 4; fi)

# Seed of `make nightly`: the day; and its tests against megatron-core's compiled helpers
NIGHT := $(shell date -u +%Y%m%d)
MEGATRONS := $(addprefix tests/kernels/test_,samples.py blending.py mapping.py)

# Tests start many processes: without byte code each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test trainers neox-runs explore lint bench bench-quick matrix tags wheels aarch64 docs docs-sample sanitize slow fuzz soak simulate coverage nightly faults mutants clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/megaindex demo --dir demo-data

quick: $(VENV)/.quick-installed $(VENV)/.kernels-compiled
	$(BIN)/pytest --quick -n $(or $(JOBS),$(CORES))

test: $(VENV)/.test-installed $(VENV)/.kernels-compiled $(VENV)/.tests-compiled
	$(BIN)/python -m pytest -m "not slow" -n $(or $(JOBS),$(shell expr $(CORES) + 1))

# In an environment of its own: the tests of `make test` find none of these packages
TRAINERS := $(VENV)-trainers
trainers: $(SOURCES) requirements/torch.txt requirements/trainers.txt
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/pip install --quiet --disable-pip-version-check --editable . \
		-r requirements/quick.txt -r requirements/torch.txt -r requirements/trainers.txt
	$(TRAINERS)/bin/pip install --quiet --disable-pip-version-check --no-deps \
		nemo-automodel==0.7.0 torchao==0.18.0 megatron-core==0.16.1 megatron-bridge==0.3.1
	$(if $(NEOX),NEOX=$(NEOX)) $(TRAINERS)/bin/python -m pytest tests/trainers tests/test_examples.py

# Plans and printed settings of random GPT-NeoX runs against its own code; NEOX is a checkout
neox-runs: $(VENV)/.test-installed
	$(BIN)/python tests/robustness/frameworks/neox_runs.py $(NEOX) $(or $(SEED),$(NIGHT)) \
		$(or $(COUNT),200) $(or $(FIRST),0)

# The property tests with a seed of their own, which MEGAINDEX_EXPLORE_SEED sets; of TESTS alone
explore: $(VENV)/.test-installed
	@seed=$${MEGAINDEX_EXPLORE_SEED:-$$($(BIN)/python -c 'import secrets; print(secrets.randbits(32))')}; \
	echo "MEGAINDEX_EXPLORE_SEED=$$seed"; \
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=explore \
		--hypothesis-seed=$$seed $(TESTS) || { status=$$?; \
	echo "to repeat: make explore MEGAINDEX_EXPLORE_SEED=$$seed TESTS=\"$(TESTS)\""; exit $$status; }

lint: $(VENV)/.test-installed
	$(PIP) -r requirements/dev.txt
	$(BIN)/ruff check megaindex tests benchmarks examples packaging docs/*.py setup.py
	$(BIN)/ruff format --check megaindex tests benchmarks examples packaging docs/*.py setup.py
	$(BIN)/mypy

bench: $(VENV)/.test-installed
	$(PIP) -r requirements/bench.txt
	$(BIN)/python -m benchmarks $(if $(NEOX),--neox $(NEOX)) $(if $(MEGATRON),--megatron $(MEGATRON))

bench-quick: $(VENV)/.test-installed
	$(BIN)/python -m benchmarks --quick --rounds 15 --json benchmarks/results/quick.json
	$(BIN)/python -m benchmarks.baseline benchmarks/results/quick.json

# MATRIX_VERSIONS="0.15.3 0.16.1" for those alone
matrix: $(VENV)/.test-installed
	$(BIN)/python tests/robustness/matrix.py $(VENV)/megatron-core $(MATRIX_VERSIONS)

# Plans and printed settings against the training code of releases: checkouts megatron-0.16.1, …,
# megatron-main in the folder MEGATRON_TAGS; MEGATRON_SEED and MEGATRON_COUNT for the random runs
tags: $(VENV)/.test-installed
	MEGATRON_TAGS=$(MEGATRON_TAGS) $(BIN)/python -m pytest -q -s tests/plan/test_megatron_tags.py \
		tests/adapters/test_megatron_packing.py

# WHEELS="--python 3.12 --no-tests" for those alone; the compiler (zig) comes from the package index
wheels: $(VENV)/bin/python
	$(BIN)/python packaging/wheels.py $(WHEELS)
	$(BIN)/python packaging/wheels.py --machine aarch64 $(WHEELS)

aarch64: $(VENV)/bin/python
	BIN=$(BIN) sh packaging/aarch64.sh

# A link, anchor or docstring that is missing fails; -E, since a page read before would not warn again
docs: $(VENV)/.test-installed
	$(PIP) -r requirements/docs.txt
	$(BIN)/python -W ignore -m sphinx -W --keep-going -E -q docs build/site
	@echo "built build/site/index.html"

docs-sample: $(VENV)/.test-installed
	$(BIN)/python docs/audit_sample.py

slow: $(VENV)/.test-installed
	$(PIP) -r requirements/slow.txt
	$(BIN)/python -m pytest -m slow

sanitize: $(VENV)/.test-installed
	BIN=$(BIN) sh tests/robustness/sanitize/run.sh

# FUZZ_SECONDS for each target
fuzz: $(VENV)/.test-installed
	$(PIP) -r requirements/fuzz.txt
	BIN=$(BIN) sh tests/robustness/fuzz/run.sh $(or $(FUZZ_SECONDS),60)

# Random operations against a model, for SOAK_SECONDS
soak: $(VENV)/.test-installed
	$(BIN)/python tests/robustness/soak --seconds $(or $(SOAK_SECONDS),3600)

# Processes, disks and power losses that a seed decides, for SECONDS; SEED=7 SCENARIO=pairs for one;
# SIMULATE=--planted searches bugs that are planted, --interleavings runs builders in any order
simulate: $(VENV)/.test-installed
	PYTHONHASHSEED=0 $(BIN)/python -W ignore tests/robustness/simulation $(SIMULATE) \
		--seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED)) \
		$(if $(SCENARIO),--scenario $(SCENARIO))

# Lines and branches that tests reach: of the native headers (gcov), and of index, plan, cache and
# format, with reasons for those that none does
coverage: $(VENV)/.test-installed
	$(PIP) -r requirements/coverage.txt
	$(BIN)/python tests/robustness/coverage_report.py

# New seeds for what explores, as .github/workflows/nightly.yml runs it
nightly: $(VENV)/.test-installed
	$(MAKE) explore MEGAINDEX_EXPLORE_SEED=$(NIGHT) MEGAINDEX_TEST_EXAMPLES=$(or $(EXAMPLES),1000)
	$(MAKE) explore MEGAINDEX_EXPLORE_SEED=$(NIGHT) MEGAINDEX_TEST_EXAMPLES=$(or $(CASES),100000) \
		TESTS="$(MEGATRONS) -k native"
	MEGAINDEX_EXPLORE_SEED=$(NIGHT) $(BIN)/python -m pytest tests/independent
	MEGAINDEX_EXPLORE_SEED=$(NIGHT) MEGAINDEX_TEST_EXAMPLES=$(or $(EXAMPLES),1000) \
		$(BIN)/python -m pytest tests/lock/test_forged_locks.py
	$(MAKE) simulate SECONDS=$(or $(SECONDS),3600)
	$(MAKE) simulate SIMULATE=--planted
	$(MAKE) soak SOAK_SECONDS=$(or $(SECONDS),3600)
	$(MAKE) fuzz FUZZ_SECONDS=$(or $(FUZZ_SECONDS),300)

# A process that ends, or a call that fails, at every place where files change
faults: $(VENV)/.test-installed
	$(BIN)/python tests/robustness/faults

# Small changes of the code, each of which a test should notice: SAMPLE of them, drawn by SEED. The
# survivors of seed 27 have been given tests; another SEED measures changes that nobody has looked at
mutants: $(VENV)/.test-installed $(VENV)/.kernels-compiled
	$(PIP) -r requirements/coverage.txt -r requirements/slow.txt
	$(BIN)/python tests/robustness/mutants --sample $(or $(SAMPLE),300) --seed $(or $(SEED),27)

# Each step says when it begins, what it installs, and how long that takes two idle cores.
$(VENV)/bin/python:
	@$(PYTHON) -m venv $(VENV)

# As users install it: without a core where none can be compiled.
$(VENV)/.installed: $(SOURCES) | $(VENV)/bin/python
	@date +"%T  installing megaindex into $(VENV): numpy, numba, the native core (1 to 2 minutes)"
	@$(PIP) --editable .
	@$(BIN)/megaindex --version
	@touch $@

# With warnings of the compiler as errors, and not without a core: for those who develop it.
$(VENV)/.dev-installed: $(SOURCES) | $(VENV)/bin/python
	@date +"%T  installing megaindex into $(VENV): numpy, numba, the native core (1 to 2 minutes)"
	@MEGAINDEX_DEV=1 $(PIP) --editable .
	@touch $(VENV)/.installed $@

# Numba's cache beside its kernels, complete before several processes of tests use it.
$(VENV)/.kernels-compiled: $(wildcard megaindex/kernels/jit/*.py) tests/support/compile_kernels.py $(VENV)/.dev-installed
	@date +"%T  compiling the Numba kernels for the tests (half a minute)"
	@$(BIN)/python tests/support/compile_kernels.py
	@touch $@

# Pytest's byte code of the tests, which else each of several processes would compile.
$(VENV)/.tests-compiled: $(VENV)/.test-installed
	@date +"%T  compiling the tests (15 seconds)"
	@$(BIN)/python -m pytest --collect-only -qq > /dev/null || true  # the tests say why
	@touch $@

$(VENV)/.quick-installed: $(VENV)/.dev-installed requirements/quick.txt
	@date +"%T  installing pytest and hypothesis (10 seconds)"
	@$(PIP) -r requirements/quick.txt
	@touch $@

# Torch and the others apart, so that it is seen which of them takes long
$(VENV)/.torch-installed: $(VENV)/.quick-installed requirements/torch.txt
	@date +"%T  installing torch (the CPU build: 200 MB, half a minute; of an index without it: 3 GB with CUDA)"
	@$(PIP) -r requirements/torch.txt
	@touch $@

$(VENV)/.test-installed: $(VENV)/.torch-installed requirements/test.txt requirements/node.txt requirements/peers.txt
	@date +"%T  installing Arrow, tokenizers, an object server (130 MB, half a minute)"
	@$(PIP) -r requirements/test.txt
	@command -v node > /dev/null || { date +"%T  installing node (60 MB, 10 seconds)"; \
		$(PIP) -r requirements/node.txt; }
	@date +"%T  installing megatron-core and other loaders to compare with (40 MB, 10 seconds)"
	@$(PIP) --no-deps -r requirements/peers.txt
	@date +"%T  installed what the tests need"
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-trainers build dist demo-data megaindex.egg-info megaindex/kernels/_native*.so megaindex/kernels/no_native.txt
