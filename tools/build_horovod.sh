#!/usr/bin/env bash
# Installs Horovod with MPI and Gloo into the virtual environment given as $1, built against the torch that is in it; for
# GPUs, too, where the variables at the top of gpu.sh ask for that. With HOROVOD_WITHOUT_MPI=1 Gloo does without MPI.
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
# shellcheck source=tools/gpu.sh
. "$tools/gpu.sh"
wish=$(gpu_wish)
readonly wish

case "${HOROVOD_WITHOUT_MPI:-}" in
'')
    mpi=(HOROVOD_WITH_MPI=1)
    mpi_version=$(mpirun --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
    ;;
1)
    mpi=()
    mpi_version=none
    ;;
*) die "HOROVOD_WITHOUT_MPI must be 1 or not be set, got '$HOROVOD_WITHOUT_MPI'" ;;
esac
readonly mpi mpi_version
build_key=$("$venv/bin/python" -c '
import platform, sys, sysconfig, torch
print("-".join(["torch" + torch.__version__, sysconfig.get_config_var("SOABI"), platform.machine()]))')
gpu_key=gpunone
environment=()
# Sets gpu_key, and in environment what Horovod's build looks at; or says what is missing, before anything is compiled.
prepare_for_gpu() {
    local torch_cuda site missing cuda nccl
    torch_cuda=$("$venv/bin/python" -c 'import torch; print(torch.version.cuda or "")')
    [ -n "$torch_cuda" ] || die "the torch in $venv is a CPU build, and Horovod for GPUs needs one for CUDA.
    HOROVOD_GPU=CUDA tools/setup.sh installs it"
    site=$("$venv/bin/python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
    require_cuda "$torch_cuda"
    cuda=$(cuda_home)
    # Horovod asks torch where CUDA is, and takes the nvcc in PATH before that in HOROVOD_CUDA_HOME.
    environment=(HOROVOD_GPU=CUDA "HOROVOD_CUDA_HOME=$cuda" "CUDA_HOME=$cuda" "PATH=$venv/bin:$cuda/bin:$PATH")
    gpu_key=gpuhost-cuda$(cuda_release "$cuda")
    [ "$wish" = nccl ] || return 0
    name_nccl_for_the_linker "$site"
    missing=$(missing_of_nccl "$site")
    [ -z "$missing" ] || die "HOROVOD_GPU_OPERATIONS=NCCL needs NCCL. Missing: $(one_line "$missing").
    Install NVIDIA's packages libnccl2 and libnccl-dev, or name a folder with include/ and lib/ in HOROVOD_NCCL_HOME"
    nccl=$(nccl_home "$site")
    environment+=(HOROVOD_GPU_OPERATIONS=NCCL "HOROVOD_NCCL_HOME=$nccl" "HOROVOD_NCCL_LINK=${HOROVOD_NCCL_LINK:-SHARED}")
    gpu_key=gpuNCCL$(nccl_version "$site")-cuda$(cuda_release "$cuda")
}
[ "$wish" = none ] || prepare_for_gpu
# What is changed in Horovod before it is built is this script's, so the script is a part of the key.
script_key=$(sha256sum "$0" | cut -c-8)
readonly key="horovod$VERSION-$build_key-mpi$mpi_version-$gpu_key-$script_key"
readonly cache="${XDG_CACHE_HOME:-$HOME/.cache}/hvd_dyncomp/wheels/$key"

build() {
    local work log
    work=$(mktemp -d)
    log=$cache.log
    # shellcheck disable=SC2064  # expand now: 'work' is local
    trap "rm -rf '$work'" EXIT
    mkdir -p "$(dirname "$cache")"
    echo "build_horovod: compiling Horovod $VERSION (some 3 minutes on two cores, once a machine); log: $log"
    # pip runs a source distribution's setup.py as soon as it has it, so pip must compare the checksum, before that.
    "$venv/bin/python" -m pip download -q --require-hashes --no-deps --no-binary horovod --no-build-isolation -d "$work" \
        -r "$tools/horovod.txt" >"$log" 2>&1 ||
        die "cannot download the source distribution, or it is not the one this script was written for; see $log"
    tar -xzf "$work/horovod-$VERSION.tar.gz" -C "$work"
    # torch >= 2.1 needs C++17 and 2.13's headers C++20; Horovod pins 14 in both places.
    sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' \
        "$work/horovod-$VERSION/CMakeLists.txt" "$work/horovod-$VERSION/horovod/torch/CMakeLists.txt"
    # Horovod's kernels ask for C++11, which CUDA's headers outgrew, too.
    sed -i 's/set(CMAKE_CUDA_STANDARD 11)/set(CMAKE_CUDA_STANDARD 17)/' \
        "$work/horovod-$VERSION/horovod/common/ops/cuda/CMakeLists.txt"
    # It lists cffi for versions of torch that built extensions with it, and nothing in it imports that.
    sed -i "s/require_list.append('cffi>=1.4.0')/pass/" "$work/horovod-$VERSION/setup.py"
    # Horovod's libraries ask for a cmake of before 3.5, which cmake 4 no longer stands in for unless it is told to.
    # Under make, whose child has no jobs of its own to give, its make would compile one file after the other.
    env -u MAKELEVEL -u MFLAGS "PATH=$venv/bin:$PATH" "${environment[@]}" MAKEFLAGS="-j$(nproc)" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
        HOROVOD_WITH_PYTORCH=1 "${mpi[@]}" HOROVOD_WITH_GLOO=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        "$venv/bin/python" -m pip wheel --no-deps --no-build-isolation -w "$work/wheel" "$work/horovod-$VERSION" \
        >>"$log" 2>&1 || die "the build failed; see $log (its last error is usually a missing package)"
    # Two clones may build at once: the rename is atomic, and the loser keeps the winner's wheel.
    mv -T "$work/wheel" "$cache" 2>/dev/null || [ -d "$cache" ] || die "cannot write $cache"
}

compgen -G "$cache/horovod-*.whl" >/dev/null || build
"$venv/bin/python" -m pip install -q --no-deps --force-reinstall "$cache"/horovod-*.whl
"$venv/bin/python" -c '
import sys
import horovod.torch as hvd
wish, mpi = sys.argv[1:]
assert hvd.gloo_built() and hvd.mpi_built() == (mpi != "none"), "the wheel lacks Gloo, or MPI, or has MPI unasked"
assert wish == "none" or hvd.cuda_built(), "the wheel lacks CUDA"
assert wish != "nccl" or hvd.nccl_built(), "the wheel lacks NCCL"' "$wish" "$mpi_version" ||
    die "the wheel in $cache does not load; remove that directory and try again"
with="MPI and Gloo"
[ "$mpi_version" != none ] || with="Gloo alone"
case $wish in
nccl) with="$with, and NCCL for GPU tensors" ;;
host) with="$with, GPU tensors through host memory," ;;
esac
echo "build_horovod: Horovod $VERSION with $with is installed"
