#!/usr/bin/env bash
# Checks and measures everything that wants a GPU, on a machine that has one, torch for CUDA and CUDA's compiler, and need
# not have a network, MPI or root. `make gpu-pack` fills tools/gpu-pack beforehand, where there is a network.
#
#     tools/on_gpu.sh                        # all stages: at most ten minutes
#     tools/on_gpu.sh --stage A --stage C    # some; gpu_checks.py has what they do
#     tools/on_gpu.sh --rehearse             # here, without a GPU, as root: rehearse_gpu.sh
#
# PYTHON names a Python that has torch (default python3), OUT a folder for the results (default runs/gpu). NCCL_LIBRARY
# names a libnccl.so.2, or one that xz has packed, that programs load in place of torch's: from NCCL 2.30 on, several
# ranks may share a GPU. make gpu-pack takes it along. What is built, and what earlier calls measured, is kept in the
# user's cache. Horovod is built while everything that does without it is checked.
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    printf 'on_gpu: %s\n' "$*" >&2
    exit 1
}

if [ "${1:-}" = --rehearse ]; then
    shift
    exec tools/rehearse_gpu.sh "$@"
fi
began=$(date +%s)
python=${PYTHON:-python3}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/hvd_dyncomp
pack=$PWD/tools/gpu-pack
export OUT=${OUT:-runs/gpu}
# Nothing is looked for anywhere else.
export PIP_NO_INDEX=1 PIP_FIND_LINKS=$pack PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_ROOT_USER_ACTION=ignore HOROVOD_WITHOUT_MPI=1
# Horovod 0.28.1 counts on headers that those of GCC 13 and later no longer include.
export CXXFLAGS="-include string -include cstdint ${CXXFLAGS:-}"
# shellcheck source=tools/gpu.sh
. tools/gpu.sh

[ -d "$pack" ] || die "tools/gpu-pack is missing: make gpu-pack, where there is a network, and bring it along"
torch=$("$python" -c 'import torch; print(torch.__version__, torch.version.cuda or "none", torch.cuda.device_count())') ||
    die "$python has no torch; name one that has in PYTHON"
read -r version cuda gpus <<<"$torch"
case " $* " in
*" --pretend "*) ;;
*) [ "$gpus" -gt 0 ] || die "torch $version sees no GPU; tools/on_gpu.sh --rehearse does without" ;;
esac

# What the machine has serves, and beside it is what it lacks: nothing of it is changed.
make_environment() {
    local site
    "$python" -m venv --without-pip "$venv"
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import site; print("import site;", *(f"site.addsitedir({path!r});" for path in site.getsitepackages()))' \
        >"$site/machine.pth"
    "$venv/bin/python" -m pip install -q pytest pytest-timeout pytest-xdist hypothesis psutil pyyaml cloudpickle packaging \
        setuptools wheel tqdm || die "the packages in $pack do not fit; pip's message is above"
}

# What the wheel is made of.
sources() {
    find setup.cfg setup.py pyproject.toml hvd_dyncomp -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum
}

# The pack's wheel, if it is of this source: it serves every CPython and every torch. Compiling takes a minute.
install_package() {
    local sum
    sum=$(sources)
    [ "$(cat "$venv/package.sums" 2>/dev/null)" != "$sum" ] || return 0
    if [ "$(cat "$pack/package.sums" 2>/dev/null)" = "$sum" ]; then
        "$venv/bin/python" -m pip install -q --no-deps --force-reinstall "$pack"/hvd_dyncomp-*.whl
    else
        echo "on_gpu: the package has changed since make gpu-pack, and is compiled here"
        # A copy: a build leaves files behind, and older ones would be installed with the rest.
        local source
        source=$(mktemp -d)
        cp -r setup.cfg setup.py pyproject.toml README.md LICENSE hvd_dyncomp "$source/"
        "$venv/bin/python" -m pip install -q --no-deps --no-build-isolation --force-reinstall "$source"
        rm -rf "$source"
    fi
    printf '%s' "$sum" >"$venv/package.sums"
}

# Sets what has several ranks share a GPU, if there is only one, and the NCCL for it.
use_nccl() {
    local library=${NCCL_LIBRARY:-}
    [ -n "$library" ] || library=$(compgen -G "$pack/libnccl.so*" | head -n 1) || true
    if [ -n "$library" ]; then
        [ -e "$library" ] || die "NCCL_LIBRARY=$library does not exist"
        mkdir -p "$cache/gpu"
        case $library in
        *.xz) "$python" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
            "$library" "$cache/gpu/libnccl.so.2" ;;
        *) cp "$library" "$cache/gpu/libnccl.so.2" ;;
        esac
        export LD_PRELOAD=$cache/gpu/libnccl.so.2${LD_PRELOAD:+:$LD_PRELOAD}
    fi
    # Kernels of the ranks' collectives wait for each other: they must fit on the GPU side by side.
    [ "$gpus" -ne 1 ] || export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4
}

# Leaves the status in $built when it is over. Other programs come first.
build_horovod() {
    local status=0 packages
    if [ "$cuda" != none ]; then
        export HOROVOD_GPU=CUDA
        packages=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
        if [ "$gpus" -ge 2 ] && name_nccl_for_the_linker "$packages" && [ -z "$(missing_of_nccl "$packages")" ]; then
            export HOROVOD_GPU_OPERATIONS=NCCL
        fi
    fi
    nice tools/build_horovod.sh "$venv" || status=$?
    [ "$status" -eq 0 ] || cp "$cache"/wheels/*.log "$OUT/" || true # all that comes back from some machines
    echo "$status" >"$built"
}

key=$(printf '%s' "$("$python" -c 'import sys; print(sys.executable, sys.version)') $torch" | sha256sum)
venv=$cache/gpu/venv-${key:0:12}
built=$cache/gpu/horovod-${key:0:12}.status
[ -e "$venv/made" ] || { rm -rf "$venv" && make_environment && touch "$venv/made"; }
install_package || die "the package could not be installed; pip's message is above"
mkdir -p "$OUT"
rm -f "$built"
build_horovod &
builder=$!
[ "$cuda" = none ] || use_nccl
echo "on_gpu: what is built and measured is kept in $cache"
export PATH=$venv/bin:$PATH
status=0
"$venv/bin/python" -P tools/on_gpu.py --cache "$cache/gpu" --built "$built" --began "$began" "$@" || status=$?
# Its descendants, too: where the time is over, the compiler may still run.
[ -e "$built" ] || "$venv/bin/python" -P -c '
import sys
sys.path.insert(0, "launch")
from common.launcher import end
end(int(sys.argv[1]))' "$builder"
exit "$status"
