#!/usr/bin/env bash
# Installs Horovod with MPI and Gloo into the virtual environment given as $1, built against the torch that is in it.
#
# Horovod publishes source only, and its last release asks for C++14, which torch's headers outgrew. The wheel that comes
# out of the patched build is kept in the user's cache under a key of everything its binary depends on, so that the
# minutes of compiling are spent once a machine and not once a clone.
set -euo pipefail

tools=$(dirname "$0")
VERSION=$(sed -n 's/^horovod==\([0-9.]*\).*/\1/p' "$tools/horovod.txt")
readonly tools VERSION

die() {
    printf 'build_horovod: %s\n' "$*" >&2
    exit 1
}

[ $# -eq 1 ] || die "usage: tools/build_horovod.sh VENV"
readonly venv=$1
[ -x "$venv/bin/python" ] || die "$venv has no bin/python: run 'make setup', which creates it"

cmake_major=$(cmake --version | sed -n '1s/[^0-9]*\([0-9]*\).*/\1/p')
[ "$cmake_major" -lt 4 ] || die "Horovod $VERSION does not configure with cmake $cmake_major; put a cmake 3 first in PATH"

mpi_version=$(mpirun --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
build_key=$("$venv/bin/python" -c '
import platform, sys, sysconfig, torch
print("-".join(["torch" + torch.__version__, sysconfig.get_config_var("SOABI"), platform.machine()]))')
readonly key="horovod$VERSION-$build_key-mpi$mpi_version-gpu${HOROVOD_GPU_OPERATIONS:-none}"
readonly cache="${XDG_CACHE_HOME:-$HOME/.cache}/hvd_dyncomp/wheels/$key"

build() {
    local work log
    work=$(mktemp -d)
    log=$cache.log
    # shellcheck disable=SC2064  # expand now: 'work' is local
    trap "rm -rf '$work'" EXIT
    mkdir -p "$(dirname "$cache")"
    echo "build_horovod: compiling Horovod $VERSION (3 to 6 minutes, once a machine); log: $log"
    # pip runs a source distribution's setup.py as soon as it has it, so pip must compare the checksum, before that.
    "$venv/bin/pip" download -q --require-hashes --no-deps --no-binary horovod --no-build-isolation -d "$work" \
        -r "$tools/horovod.txt" >"$log" 2>&1 ||
        die "cannot download the source distribution, or it is not the one this script was written for; see $log"
    tar -xzf "$work/horovod-$VERSION.tar.gz" -C "$work"
    # torch >= 2.1 needs C++17 and 2.13's headers C++20; Horovod pins 14 in both places.
    sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' \
        "$work/horovod-$VERSION/CMakeLists.txt" "$work/horovod-$VERSION/horovod/torch/CMakeLists.txt"
    PATH="$venv/bin:$PATH" MAKEFLAGS="-j$(nproc)" \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        "$venv/bin/pip" wheel --no-deps --no-build-isolation -w "$work/wheel" "$work/horovod-$VERSION" \
        >>"$log" 2>&1 || die "the build failed; see $log (its last error is usually a missing package)"
    # Two clones may build at once: the rename is atomic, and the loser keeps the winner's wheel.
    mv -T "$work/wheel" "$cache" 2>/dev/null || [ -d "$cache" ] || die "cannot write $cache"
}

compgen -G "$cache/horovod-*.whl" >/dev/null || build
"$venv/bin/pip" install -q --no-deps --force-reinstall "$cache"/horovod-*.whl
"$venv/bin/python" -c '
import horovod.torch as hvd
assert hvd.mpi_built() and hvd.gloo_built(), "the wheel lacks MPI or Gloo"' ||
    die "the wheel in $cache does not load; remove that directory and try again"
echo "build_horovod: Horovod $VERSION with MPI and Gloo is installed"
