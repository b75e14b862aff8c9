# `make` alone lists what there is: the lines below that begin with two hashes.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Two workers on few cores: more threads than cores only get in each other's way.
export OMP_NUM_THREADS ?= 1

PACKAGE_FILES := setup.cfg setup.py pyproject.toml $(shell find hvd_dyncomp -name '*.py' -o -name '*.html' -o -path '*/csrc/*')
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train train-ddp test thorough test-all soak mutants faults lint lock audit docs dist versions study bench figures gpu-pack gpu clean

help:
	@sed -n 's/^## //p' $(firstword $(MAKEFILE_LIST))

## make setup       a virtual environment in .venv, with Horovod and this package
setup: .venv/package.stamp

.venv/setup.stamp .venv-ddp/setup.stamp: $(wildcard tools/*.sh tools/*.txt) tools/torchvision_operators.py
	tools/setup.sh $(@D)
	@touch $@

# Installed, not linked: what is tested is what a user gets. Stale modules in build/ would be installed with the rest.
%/package.stamp: %/setup.stamp $(PACKAGE_FILES)
	rm -rf build/lib* build/bdist* build/temp*
	$*/bin/pip install -q --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	@touch $@

## make train       the same, then train a ResNet on two workers under horovodrun; ARGS="--epochs 3"
train: setup
	horovodrun -np 2 python launch/train_resnet.py $(ARGS)

## make train-ddp   the same under torchrun, without Horovod: needs no compiler and no root
# In the environment of make setup, or else in a small one.
DDP := $(if $(wildcard .venv/package.stamp),.venv,.venv-ddp)
train-ddp: $(DDP)/package.stamp
	$(DDP)/bin/torchrun --standalone --nproc-per-node 2 launch/train_resnet.py $(ARGS)

# What starts ranks, or times something, has the machine to itself; all else goes to two processes.
STARTS_RANKS := ^from (launchers|torchrun|netlab|runs|common\.launcher)\b|^from common import launcher
ALONE := tests/clusters tests/release \
	$(shell grep -rlE '$(STARTS_RANKS)' --include='test_*.py' tests/on_horovod tests/ddp tests/fsdp tests/launch)

## make test        the same set-up, then the tests; ARGS="-k meter": some of them
test: setup
ifeq ($(ARGS),)
	pytest -n 2 $(ALONE:%=--ignore=%)
	pytest $(ALONE)
else
	pytest $(ARGS)
endif

# Checks that are repeated on other ranks, that wait, or that test tools.
THOROUGH := -m "thorough and not soak and not clusters and not release"
thorough: setup
	pytest -n 2 $(THOROUGH) $(ALONE:%=--ignore=%)
	pytest $(THOROUGH) $(ALONE)

## make test-all    make test, then checks on other ranks and of tools
test-all: test thorough

## make soak        tests that take too long for every day: about an hour
soak: setup
	pytest -m soak $(ARGS)

## make mutants     do the tests notice small changes of the library?
# Do the tests notice small changes of the library, as a tool makes them? ARGS="session.py policies --minutes 10": of which
# files, and for how long.
mutants: setup
	python tests/mutants/drawn.py $(ARGS)

## make faults      do they notice the known faults?
# The same for the faults in tests/mutants/faults.toml, which no tool thinks of. ARGS="--only residuals.py": some of them.
faults: setup
	python tests/mutants/mutate.py $(ARGS)

## make lint        ruff, mypy, shellcheck, codespell, words
lint: setup
	ruff check .
	ruff format --check .
	mypy
	shellcheck tools/*.sh .ci/run
	git ls-files -z | xargs -0 codespell
	python tools/words.py

# The tools of the next four, apart from what is tested.
MAINTAIN := .venv-maintain

# The versions in tools/*.in, with all that they need and the checksums of all files, for every platform. Versions that
# are in the locks already stay; ARGS=--upgrade takes the newest ones.
LOCK := $(MAINTAIN)/bin/uv pip compile -q --no-config --no-header --universal --python-version 3.11 \
	--fork-strategy fewest --generate-hashes
lock: $(MAINTAIN)/stamp
	$(LOCK) $(ARGS) tools/requirements.in -o tools/requirements.txt
	$(LOCK) $(ARGS) tools/maintain.in -o tools/maintain.txt

# Strict: a package that the database does not answer for is a failure, not a pass.
audit: $(MAINTAIN)/stamp
	$(MAINTAIN)/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off \
		-r tools/requirements.txt -r tools/maintain.txt -r tools/horovod.txt $(ARGS)

## make docs        the site, in build/docs
# Its only warning that is no error is one about the future of MkDocs.
docs: $(MAINTAIN)/stamp $(DDP)/package.stamp
	$(MAINTAIN)/bin/python docs/site/api.py && $(MAINTAIN)/bin/ruff format -q docs/api
	$(DDP)/bin/python docs/site/commands.py
	NO_MKDOCS_2_WARNING=1 $(MAINTAIN)/bin/mkdocs build --quiet --strict -f docs/site/mkdocs.yml $(ARGS)

## make dist        the source distribution and a wheel, checked, in dist/
# The wheel is built from the source distribution, with the versions of build tools that the lock has. auditwheel refuses one
# without compiled kernels, or that Linuxes of the last years would not run; abi3audit, one that some Python would not.
dist: $(MAINTAIN)/stamp
	rm -rf dist build/dist *.egg-info
	PIP_CONSTRAINT=tools/requirements.txt $(MAINTAIN)/bin/python -m build --outdir build/dist
	PATH="$(abspath $(MAINTAIN))/bin:$$PATH" auditwheel repair --plat manylinux_2_28_$$(uname -m) -w dist build/dist/*.whl
	$(MAINTAIN)/bin/abi3audit --strict dist/*.whl
	mv build/dist/*.tar.gz dist/
	$(MAINTAIN)/bin/twine check --strict dist/*

# The wheel with each version of torch that pip finds, which is hours and many gigabytes. ARGS="2.8.0 2.13.0": these.
versions: dist
	tools/versions.sh $(ARGS)

$(MAINTAIN)/stamp: tools/maintain.txt
	python3 -m venv --clear $(MAINTAIN)
	$(MAINTAIN)/bin/pip install -q --require-hashes --no-deps --only-binary :all: -r tools/maintain.txt
	@touch $@

## make study       train what the study lacks; write its tables and figures
# Trains what the study lacks, which is hours of it, and writes docs/study.md's tables and figures. ARGS=--quick: what fits
# into five minutes; ARGS=paper: the paper's scenarios on real ranks.
study: setup
	python launch/study $(ARGS)

## make bench       benchmarks, as root
# As root: the links are network namespaces.
bench: setup
	python launch/bench $(ARGS)

## make figures     what the pages show and the record lacks, or has of another wire version; ARGS=missing: say what
# As root. Hours of it: both programs go on where they were interrupted.
figures: setup
ifeq ($(ARGS),missing)
	python launch/bench missing
	python launch/study --missing
else
	python launch/bench
	python launch/study
endif

# What a machine with a GPU and no network is to be brought: tools/gpu-pack.
gpu-pack: setup dist
	tools/gpu_pack.sh

## make gpu         on a machine with a GPU: everything that needs one
# On such a machine, or with ARGS=--rehearse without one: everything that wants a GPU, in stages (ARGS="--stage A").
gpu:
	tools/on_gpu.sh $(ARGS)

## make clean       remove environments and builds
clean:
	rm -rf tools/gpu-pack .venv .venv-ddp $(MAINTAIN) build dist *.egg-info
