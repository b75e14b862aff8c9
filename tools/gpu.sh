# shellcheck shell=bash
# What a build of Horovod for GPUs needs of a machine, and where it is: for setup.sh and build_horovod.sh to source.
#
# HOROVOD_GPU_OPERATIONS=NCCL has NCCL do the collectives of GPU tensors; HOROVOD_GPU=CUDA alone copies them to host memory
# and back. Other variables of Horovod's name folders: HOROVOD_CUDA_HOME, HOROVOD_NCCL_HOME, HOROVOD_NCCL_INCLUDE and
# HOROVOD_NCCL_LIB; HOROVOD_NCCL_LINK is STATIC or SHARED, and SHARED if it is not set.

# What is asked for: nccl, host or none. An error for what Horovod knows and this build does not.
gpu_wish() {
    local name
    for name in HOROVOD_GPU_{ALLREDUCE,ALLGATHER,BROADCAST,ALLTOALL,REDUCESCATTER}; do
        [ -z "${!name:-}" ] || die "$name is not supported: HOROVOD_GPU_OPERATIONS=NCCL is for all collectives"
    done
    case "${HOROVOD_GPU:-}" in
    '' | CUDA) ;;
    *) die "HOROVOD_GPU must be CUDA, got '$HOROVOD_GPU'" ;;
    esac
    case "${HOROVOD_GPU_OPERATIONS:-}" in
    NCCL) echo nccl ;;
    '') if [ -n "${HOROVOD_GPU:-}" ]; then echo host; else echo none; fi ;;
    *) die "HOROVOD_GPU_OPERATIONS must be NCCL, got '$HOROVOD_GPU_OPERATIONS'; HOROVOD_GPU=CUDA alone goes through host memory" ;;
    esac
}

machine_has_gpu() {
    nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null
}

# The first of the folders behind $1 that has file $1.
first_with() {
    local file=$1 folder
    shift
    for folder in "$@"; do
        if [ -e "$folder/$file" ]; then
            printf '%s\n' "$folder"
            return
        fi
    done
    return 1
}

# The folder of the CUDA toolkit: HOROVOD_CUDA_HOME, or else CUDA_HOME, that of the nvcc in PATH, or the usual one.
cuda_home() {
    local nvcc top
    if [ -n "${HOROVOD_CUDA_HOME:-}" ]; then
        first_with bin/nvcc "$HOROVOD_CUDA_HOME"
    elif [ -n "${CUDA_HOME:-}" ]; then
        first_with bin/nvcc "$CUDA_HOME"
    elif nvcc=$(command -v nvcc); then
        # It may be a script that calls the toolkit's own, which knows where that is.
        top=$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
        nvcc=$(readlink -f "$nvcc")
        readlink -f "${top:-${nvcc%/bin/nvcc}}"
    else
        first_with bin/nvcc /usr/local/cuda
    fi
}

# "13.0", of the toolkit in $1.
cuda_release() {
    "$1/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p'
}

# Where the linker finds a library of the toolkit or of NCCL below $1.
library_folders() {
    printf '%s\n' "$1/lib64" "$1/lib" "$1/lib/$(uname -m)-linux-gnu" "$1"/targets/*/lib
}

# What of the toolkit is missing, a line for each; nothing if nothing is. $1: CUDA's version, which torch was built for.
missing_of_cuda() {
    local home release folders
    if ! home=$(cuda_home); then
        echo "nvcc (not in PATH, HOROVOD_CUDA_HOME, CUDA_HOME or /usr/local/cuda)"
        return
    fi
    mapfile -t folders < <(library_folders "$home")
    [ -e "$home/include/cuda_runtime.h" ] || echo "cuda_runtime.h (not in $home/include)"
    first_with libcudart.so "${folders[@]}" >/dev/null || echo "libcudart.so (not below $home)"
    release=$(cuda_release "$home")
    [ "${release%%.*}" = "${1%%.*}" ] ||
        echo "CUDA ${1%%.*}, which torch is built for ($home has ${release:-a release that nvcc does not tell})"
}

one_line() {
    printf '%s\n' "$1" | paste -sd';' | sed 's/;/; /g'
}

# $1: CUDA's version; $2: what missing_of_cuda says.
cuda_sentence() {
    echo "Horovod for GPUs needs CUDA's toolkit. Missing: $(one_line "$2").
    Install NVIDIA's package cuda-toolkit-${1/./-}, and name its folder in HOROVOD_CUDA_HOME if it is not found"
}

# $1: CUDA's version.
require_cuda() {
    local missing
    missing=$(missing_of_cuda "$1")
    [ -z "$missing" ] || die "$(cuda_sentence "$1" "$missing")"
}

# The folder of NCCL: HOROVOD_NCCL_HOME, or else that of pip's package in the environment whose packages are in $1, which is
# what torch loads; or the toolkit's, or the system's. A process has one library of that name, and torch's is there first.
nccl_home() {
    if [ -n "${HOROVOD_NCCL_HOME:-}" ]; then
        printf '%s\n' "$HOROVOD_NCCL_HOME"
    else
        first_with include/nccl.h "$1/nvidia/nccl" "$(cuda_home || true)" /usr || echo /usr
    fi
}

# pip's package has no libnccl.so, the name that linkers look for. $1: as for nccl_home.
name_nccl_for_the_linker() {
    local lib=$1/nvidia/nccl/lib
    [ ! -e "$lib/libnccl.so.2" ] || [ -e "$lib/libnccl.so" ] || ln -s libnccl.so.2 "$lib/libnccl.so"
}

# As missing_of_cuda. $1: as for nccl_home.
missing_of_nccl() {
    local home library=libnccl.so folders
    home=$(nccl_home "$1")
    [ "${HOROVOD_NCCL_LINK:-SHARED}" != STATIC ] || library=libnccl_static.a
    mapfile -t folders < <(library_folders "$home")
    first_with nccl.h "${HOROVOD_NCCL_INCLUDE:-$home/include}" >/dev/null ||
        echo "nccl.h (not in ${HOROVOD_NCCL_INCLUDE:-$home/include})"
    first_with "$library" ${HOROVOD_NCCL_LIB:+"$HOROVOD_NCCL_LIB"} "${folders[@]}" >/dev/null ||
        echo "$library (not in or below ${HOROVOD_NCCL_LIB:-$home})"
}

# "2.29.7", of the header that will be used. $1: as for nccl_home.
nccl_version() {
    awk '$1 == "#define" && $2 ~ /^NCCL_(MAJOR|MINOR|PATCH)$/ { version = version separator $3; separator = "." }
        END { print version }' "${HOROVOD_NCCL_INCLUDE:-$(nccl_home "$1")/include}/nccl.h"
}
