#!/usr/bin/env bash
# Brings a bare Debian machine to the point where the package can be installed: system packages, the virtual
# environment, the pinned Python packages and Horovod. Safe to run again; what is there already is left alone.
#
# tools/setup.sh .venv-ddp: an environment of that name with what launch/train_resnet.py needs under torchrun. It needs no
# system packages.
#
# Where there are a GPU and CUDA's toolkit, torch is the build for CUDA, and Horovod is built for GPUs; so it is where the
# variables at the top of gpu.sh ask for that.
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

case "${1:-.venv}" in
.venv | .venv-ddp) venv=${1:-.venv} ;;
*) die "usage: tools/setup.sh [.venv-ddp]" ;;
esac
python=${PYTHON:-python3}
# shellcheck source=tools/gpu.sh
. tools/gpu.sh

python_has_headers() {
    "$python" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(
        os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null
}

# Asked of the compiler: Debian's openmpi-bin has mpicxx, too, and the headers are a package of their own. (No pipe: who
# writes into one fails where the other end does not read.)
mpi_has_headers() {
    mpicxx -E -x c++ - <<<'#include <mpi.h>' >/dev/null 2>&1
}

# Debian package names of what the build and the runs cannot do without.
required_packages() {
    command -v mpirun >/dev/null || echo openmpi-bin
    mpi_has_headers || echo libopenmpi-dev
    command -v c++ >/dev/null || echo g++
    command -v cmake >/dev/null || echo cmake
    command -v make >/dev/null || echo make # what cmake calls, and only recommends
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

# What Horovod is to do with GPU tensors: as gpu_wish says, or else "whatever" can be done.
choose_gpu() {
    local version missing
    wish=$(gpu_wish)
    version=$(sed -n 's/^cuda-toolkit==\([0-9]*\.[0-9]*\).*/\1/p' tools/requirements.txt)
    if [ "$wish" != none ]; then
        require_cuda "$version"
    elif machine_has_gpu; then
        missing=$(missing_of_cuda "$version")
        wish=whatever
        [ -z "$missing" ] || wish=none
        [ -z "$missing" ] || echo "setup: there is a GPU, but all is set up for CPUs: $(cuda_sentence "$version" "$missing")"
    fi
}

wish=none
if [ "$venv" = .venv ]; then
    install_system_packages
    choose_gpu
fi
"$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' ||
    die "Python 3.11 or newer is needed, $("$python" --version) was found; name another with PYTHON=..."
[ -x "$venv/bin/pip" ] || "$python" -m venv --clear "$venv" || die "cannot create $venv with $python"

# Wheels whose checksums are listed, and nothing else: a build from source would fetch what it needs unchecked.
install() { "$venv/bin/pip" --disable-pip-version-check install -qq --require-hashes --no-deps --only-binary :all: "$@"; }

# What torch needs, what builds the package, bars, torchvision for data sets and ResNet-18, and of scikit-learn the digits, for which it
# need not work.
without_horovod='torch==|triton==|cuda-|nvidia-|filelock|fsspec|jinja2|markupsafe|mpmath|networkx|sympy|typing-extensions'
without_horovod+='|setuptools|numpy|scikit-learn|tqdm|torchvision|pillow'
for_gpus='torch==|cuda-|nvidia-' # Triton is not: its interpreter runs the GPU kernels in the tests
if [ "$venv" = .venv-ddp ]; then
    packages=$without_horovod for_gpus+='|triton=='
else
    packages=.
fi

# The lock: all that belongs into the environment, less what begins as $1 says.
lock_without() {
    awk -v wanted="^($packages)" -v left_out="^($1)" '/^[a-z]/ { out = $0 !~ wanted || $0 ~ left_out } !out' \
        tools/requirements.txt
}

# To pip the lock's torch is there when a CPU build of the same version is.
remove_cpu_torch() {
    "$venv/bin/python" -c 'from importlib.metadata import version
raise SystemExit(not version("torch").endswith("+cpu"))' 2>/dev/null || return 0
    "$venv/bin/pip" --disable-pip-version-check uninstall -q -y torch
}

# Without GPUs a CPU build of torch saves gigabytes, where pip is configured to find one; the public wheel is for CUDA.
if [ "$wish" != none ]; then
    remove_cpu_torch
    install -r tools/requirements.txt
elif install -r tools/torch_cpu.txt 2>/dev/null; then
    install -r <(lock_without "$for_gpus")
else
    install -r <(lock_without '$')
fi || die "pip could not install what tools/requirements.txt lists; its message is above"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp tools/torchvision_operators.py "$site/"
echo 'import torchvision_operators; torchvision_operators.install()' >"$site/torchvision_operators.pth"
[ "$venv" = .venv ] || exit 0
if [ "$wish" = whatever ]; then
    export HOROVOD_GPU=CUDA
    name_nccl_for_the_linker "$site"
    missing=$(missing_of_nccl "$site")
    if [ -z "$missing" ]; then
        export HOROVOD_GPU_OPERATIONS=NCCL
        echo "setup: there is a GPU; its tensors' collectives are NCCL's, of $(nccl_home "$site")"
    else
        echo "setup: there is a GPU, but no NCCL ($(one_line "$missing")); its tensors go through host memory"
    fi
fi
tools/build_horovod.sh .venv
echo "setup: .venv is ready; 'source .venv/bin/activate' to use it"
