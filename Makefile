# make train: sets up whatever is missing, then trains a ResNet on two workers.
# make test:  the same set-up, then every test.

export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Two workers on few cores: more threads than cores only get in each other's way.
export OMP_NUM_THREADS ?= 1

PACKAGE_FILES := setup.cfg setup.py pyproject.toml $(shell find hvd_dyncomp -name '*.py' -o -path '*/csrc/*')
ARGS ?=

.PHONY: setup train test soak lint study bench clean

setup: .venv/package.stamp

.venv/setup.stamp: tools/setup.sh tools/build_horovod.sh tools/constraints.txt
	tools/setup.sh
	@touch $@

# Installed, not linked: what is tested is what a user gets. Stale modules in build/ would be installed with the rest.
.venv/package.stamp: .venv/setup.stamp $(PACKAGE_FILES)
	rm -rf build
	pip install -q --disable-pip-version-check --no-deps --no-build-isolation --force-reinstall .
	@touch $@

train: setup
	horovodrun -np 2 python launch/train_resnet.py $(ARGS)

test: setup
	pytest $(ARGS)

# What takes too long for every day: about an hour.
soak: setup
	pytest -m soak $(ARGS)

lint: setup
	ruff check .
	ruff format --check .
	mypy
	shellcheck tools/*.sh .ci/run

study: setup
	python launch/study.py $(ARGS)

# As root: the links are network namespaces.
bench: setup
	python launch/bench.py $(ARGS)

clean:
	rm -rf .venv build *.egg-info
