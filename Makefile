# Everything from a bare checkout, in environments of its own; needs make and Python 3.11 or newer.
#
# The default torch for Linux may bring gigabytes of CUDA. Without a GPU, name PyTorch's index of CPU builds, whose address
# https://pytorch.org/get-started/locally/ shows for Linux, Pip, Python and CPU, behind --index-url:
#     make run PIP_EXTRA_INDEX_URL=ADDRESS

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
CACHE := .cache
RELEASE := $(CACHE)/release
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Set for other programs, these put packages into, or take them from, other places than .venv.
unexport PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX
# Without .pyc files each process of the tests would compile what it imports, and rewrite the asserts of every test.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test kernels soak faults endurance growth kills same-bits fuzz mutations check lint mypy pyright check-stubs check-protobuf check-ray check-slurm check-machines image-check check-lowest check-newest dist check-install stubs house docs site format constraints clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 17

run: .venv/.run ## train digits with four workers and 4-bit gradients, compare with none; results in runs/
	$(BIN)/gc-run --task digits --workers 4 --compressor 4bit --mode sync --seed 1 --epochs 30 $(ARGS)

test: kernels ## run every test; ARGS="-k name" picks some
	$(BIN)/pytest $(ARGS)

kernels: .venv/.dev ## compile the numeric kernels, once for all processes
	$(BIN)/python -c "from gradwire.compressors import warm_up; warm_up()"

# Hours; for a change to the server's decisions. `make test` has a small share of it.
soak: .venv/.dev ## random histories of jobs in every mode, ten million steps; ARGS="--seed 2" for others
	$(BIN)/python tests/server/histories.py --steps 9000000 $(ARGS)
	$(BIN)/python tests/server/coded_histories.py --steps 1000000 $(ARGS)

faults: kernels ## run the tests of faults that take minutes (docs/reference/faults.md); ARGS="-k partition" picks some
	$(BIN)/pytest -m slow -n 2 $(ARGS)

endurance: kernels ## one job under random faults: does anything grow? ARGS="--minutes 60 --seed 1"
	PYTHONPATH=.typing $(BIN)/python tests/end_to_end/soak.py $(ARGS)

growth: kernels ## 20,000 versions of a tiny model: does the memory of server, workers or DDP ranks grow?
	PYTHONPATH=.typing $(BIN)/python tests/end_to_end/growth.py $(ARGS)

kills: kernels ## one job whose server is killed 200 times: is a bit lost? ARGS="--kills 20 --workers"
	PYTHONPATH=.typing $(BIN)/python tests/end_to_end/kills.py $(ARGS)

same-bits: kernels ## does another checkout train to the same bits? ARGS="--against ../other --only 'sync/*' --quick"
	$(BIN)/python tests/end_to_end/same_bits.py $(ARGS)

fuzz: kernels ## fuzz what is read from the wire; ARGS="payloads --minutes 10"
	PYTHONPATH=.typing $(BIN)/python tests/fuzz/run.py $(ARGS)

mutations: .venv/.dev ## run the tests against mutants, deliberate mistakes that they must notice; ARGS="--only name"
	$(BIN)/python tests/mutations.py $(ARGS)

check: pyright mypy lint check-stubs ## static checks, the longest first, and the budget of tests/house.toml

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/prose.py
	$(BIN)/python tests/house.py --check

mypy: .venv/.dev
	$(BIN)/mypy

pyright: .venv/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/.dev ## apply what lint asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# .venv/.run and .venv/.dev are stamps: the checkout is installed with that extra, as these files now say; with `dev`
# the papers are, too.
.venv/.%: pyproject.toml papers/pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -q -c constraints.txt -e '.[$*]' $(if $(filter dev,$*),-e ./papers)
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

# The generator needs an older protobuf than everything else, hence an environment of its own.
TOOLS_VERSION := $(shell sed -n 's/^TOOLS_VERSION = "\(.*\)"/\1/p' tests/proto/generate.py)
TOOLS := $(CACHE)/protoc-$(TOOLS_VERSION)

check-stubs: $(TOOLS)/.installed ## fail if the committed protobuf stubs are not what the .proto gives
	$(TOOLS)/bin/python tests/proto/generate.py --check

house: kernels ## write the figures of the house, beside their budget, into CONTRIBUTING.md
	$(BIN)/python tests/house.py --write

docs: .venv/.dev ## write the tables of options and metrics into the pages of docs/
	PYTHONPATH=.typing $(BIN)/python -m gradwire.deploy.reference
	PYTHONPATH=.typing $(BIN)/python -m gradwire.benchmarks.reference

# From nothing each time: Sphinx warns only of the pages that it writes anew.
site: .venv/.dev $(CACHE)/sphinx/.installed ## build the docs site, build/site/index.html: pages, API, search; fails on a broken link
	rm -rf build/site $(CACHE)/doctrees
	PYTHONPATH="$(CURDIR)/$(CACHE)/sphinx" $(BIN)/python -m sphinx -q -W --keep-going -c docs -d $(CACHE)/doctrees . build/site
	cp build/site/README.html build/site/index.html

$(CACHE)/sphinx/.installed: .venv/.dev
	rm -rf $(CACHE)/sphinx
	$(BIN)/pip install -q -c constraints.txt --target $(CACHE)/sphinx furo==2025.12.19 myst-parser==5.2.0 sphinx==9.0.4
	@touch $@

stubs: $(TOOLS)/.installed ## write the protobuf stubs
	$(TOOLS)/bin/python tests/proto/generate.py

$(TOOLS)/.installed:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install -q grpcio-tools==$(TOOLS_VERSION)
	@touch $@

# `make test` sees the newest protobuf and grpc that we admit. This is the oldest, laid over .venv.
OLDEST := $(shell sed -n 's/^    "\(grpcio[a-z-]*\|protobuf\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml)
OVERLAY := PYTHONPATH="$(CURDIR)/$(CACHE)/oldest"

check-protobuf: kernels $(CACHE)/oldest/.installed ## test the wire, and train, with the oldest protobuf and grpc admitted
	$(OVERLAY) $(BIN)/python tests/packaging/oldest.py $(OLDEST)
	$(OVERLAY) $(BIN)/pytest -n0 tests/proto  # a process more takes longer to start than the tests
	$(OVERLAY) $(BIN)/gc-run --workers 2 --epochs 1 --no-baseline --out $(CACHE)/oldest-run

$(CACHE)/oldest/.installed: .venv/.dev
	rm -rf $(CACHE)/oldest
	$(BIN)/pip install -q --target $(CACHE)/oldest $(OLDEST)
	@touch $@

# Its packages take 600 MB and half a minute, more than all others together.
RAY := ray[train]==2.60.0

check-ray: kernels $(CACHE)/ray/.installed ## train in Ray Train and on a Ray cluster that loses nodes; its packages take 600 MB
	PYTHONPATH="$(CURDIR)/$(CACHE)/ray" $(BIN)/pytest -n0 tests/integrations/test_ray.py tests/integrations/test_ray_cluster.py

$(CACHE)/ray/.installed: .venv/.dev
	rm -rf $(CACHE)/ray
	$(BIN)/pip install -q -c constraints.txt --target $(CACHE)/ray '$(RAY)'
	@touch $@

# Debian: apt install slurmctld slurmd slurm-client munge. As root, as each emulated node has namespaces of its own.
check-slurm: kernels ## run deploy/slurm on a real Slurm with three emulated nodes; takes minutes
	@command -v slurmctld > /dev/null || { echo "check-slurm needs Slurm; the lines above it in Makefile say how" >&2; exit 2; }
	$(BIN)/pytest -n0 -m slow tests/deploy/test_slurm.py

# Debian: apt install openssh-server iproute2. As root, as each emulated machine has namespaces of its own.
check-machines: kernels ## run deploy/ssh on five emulated machines
	@command -v sshd > /dev/null || { echo "check-machines needs sshd; the lines above it in Makefile say how" >&2; exit 2; }
	$(BIN)/pytest -n0 -m slow tests/deploy/test_machines.py

# Debian: apt install buildah podman runc netavark aardvark-dns, the last two for the names of containers. As root.
# BASE is an image with Python, or the root of one as NAME.tar (apt install mmdebstrap):
#     mmdebstrap --variant=minbase --include=python3-venv,python-is-python3,ca-certificates bookworm base.tar
BASE ?= python:3.11-slim-bookworm

image-check: .venv/.dev $(CACHE)/compose/.installed ## build the image, and run deploy/compose.yaml with it; takes minutes
	@{ command -v buildah && command -v podman && command -v runc; } > /dev/null || { echo "image-check needs buildah, podman and runc; the lines above it in Makefile say how" >&2; exit 2; }
	IMAGE_BASE=$(BASE) $(BIN)/pytest -n0 -m slow tests/deploy/test_containers.py

$(CACHE)/compose/.installed:
	$(PYTHON) -m venv $(CACHE)/compose
	$(CACHE)/compose/bin/pip install -q podman-compose==1.6.0
	@touch $@

dist: $(RELEASE)/.installed ## build wheel, source distribution and bill of materials (CycloneDX) into dist/
	rm -rf dist build
	$(RELEASE)/bin/python -m build
	$(RELEASE)/bin/python tests/packaging/pins.py --bill dist
	rm -rf build gradwire.egg-info

# A user without a checkout has dist/ and a fresh environment.
FRESH_EXTRAS := certs,remote,run,tensorboard
FRESH_TESTS := tests/proto tests/storage tests/common
TORCH ?=
define in_fresh_environment
	rm -rf $(CACHE)/$(1)
	$(PYTHON) -m venv --without-pip $(CACHE)/$(1)
	$(RELEASE)/bin/python tests/packaging/pins.py --$(1) $(CACHE)/$(1) $(FRESH_EXTRAS) $(TORCH)
	$(RELEASE)/bin/pip --python=$(CACHE)/$(1)/bin/python install -q -c $(CACHE)/$(1)/pins.txt \
		"$$(ls dist/*.whl)[$(FRESH_EXTRAS)]" hypothesis 'pytest<9.2' pytest-timeout pytest-xdist
	$(CACHE)/$(1)/bin/pytest -n0 -p no:cacheprovider -W default $(FRESH_TESTS)
	cd $(CACHE)/$(1) && bin/gc-run --workers 2 --epochs 1 --no-baseline
endef

check-lowest: dist ## install dist/ with the lowest version of each dependency, and train; TORCH=2.13.0 for another torch
	$(call in_fresh_environment,lowest)

check-newest: dist ## the same with the newest versions; the default torch of both brings gigabytes of CUDA
	$(call in_fresh_environment,newest)

check-install: $(RELEASE)/.installed ## resolve constraints.txt for every Python and extra; check what only a host reads
	$(RELEASE)/bin/python tests/packaging/pins.py
	$(RELEASE)/bin/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(RELEASE)/bin/check-jsonschema -q --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(RELEASE)/bin/check-jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff

constraints: $(RELEASE)/.installed ## renew every pin except torch's, then check-install
	$(RELEASE)/bin/python tests/packaging/pins.py --renew

$(RELEASE)/.installed:
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install -q build==1.6.1 check-jsonschema==0.39.0 cyclonedx-bom==7.5.0 pip==26.3 uv==0.13.9
	@touch $@

clean: ## remove what make made, except runs/
	rm -rf .venv $(CACHE) build dist *.egg-info papers/build papers/*.egg-info .mypy_cache .pytest_cache .ruff_cache
	rm -rf compressors/kernels/__pycache__  # where numba keeps the compiled kernels
