#!/usr/bin/env bash
# Checks and measures everything that wants a GPU, on a machine that has one, torch for CUDA and CUDA's compiler, and need
# not have a network, MPI or root. `make gpu-pack` fills tools/gpu-pack beforehand, where there is a network.
#
#     tools/on_gpu.sh                        # all stages: at most 25 minutes
#     tools/on_gpu.sh --stage 1 --stage 2    # some; on_gpu.py has what they do
#     tools/on_gpu.sh --rehearse             # here, without a GPU, as root: rehearse_gpu.sh
#
# PYTHON names a Python that has torch (default python3), OUT a folder for the results (default runs/gpu). What is built,
# and what earlier calls measured, is kept in the user's cache.
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

# As launch/train_resnet.py reads it.
unpack_data() {
    "$python" - "$pack/data" "$1" <<'PYTHON'
import gzip, lzma, pathlib, shutil, sys

packed, folder = map(pathlib.Path, sys.argv[1:])
folder.mkdir(parents=True, exist_ok=True)
for file in packed.glob("*.xz"):
    with lzma.open(file) as source, gzip.open(folder / f"{file.stem}.gz", "wb", compresslevel=1) as target:
        shutil.copyfileobj(source, target)
PYTHON
}

# A copy: a build leaves files behind, and older ones would be installed with the rest.
install_package() {
    local sum source
    sum=$(find setup.cfg setup.py pyproject.toml hvd_dyncomp -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum)
    [ "$(cat "$venv/package.sums" 2>/dev/null)" != "$sum" ] || return 0
    source=$(mktemp -d)
    cp -r setup.cfg setup.py pyproject.toml README.md LICENSE hvd_dyncomp "$source/"
    "$venv/bin/python" -m pip install -q --no-deps --no-build-isolation --force-reinstall "$source" &&
        printf '%s' "$sum" >"$venv/package.sums"
    rm -rf "$source"
}

key=$(printf '%s' "$("$python" -c 'import sys; print(sys.executable, sys.version)') $torch" | sha256sum)
venv=$cache/gpu/venv-${key:0:12}
[ -e "$venv/made" ] || { rm -rf "$venv" && make_environment && unpack_data "$venv/data" && touch "$venv/made"; }
if [ "$cuda" != none ]; then
    export HOROVOD_GPU=CUDA
    # NCCL takes one rank a GPU, and there are to be two.
    packages=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
    if [ "$gpus" -ge 2 ] && name_nccl_for_the_linker "$packages" && [ -z "$(missing_of_nccl "$packages")" ]; then
        export HOROVOD_GPU_OPERATIONS=NCCL
    fi
fi
install_package &
mkdir -p "$OUT"
tools/build_horovod.sh "$venv" || {
    cp "$cache"/wheels/*.log "$OUT/" # all that comes back from some machines
    die "Horovod could not be built; $OUT has the log"
}
wait $! || die "the package could not be installed; pip's message is above"
echo "on_gpu: what is built and measured is kept in $cache"
export PATH=$venv/bin:$PATH
exec "$venv/bin/python" -P tools/on_gpu.py --cache "$cache/gpu" --data "$venv/data" --built-in $(($(date +%s) - began)) "$@"
