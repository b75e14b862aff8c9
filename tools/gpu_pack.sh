#!/usr/bin/env bash
# Fills tools/gpu-pack with what tools/on_gpu.sh may not find on a machine with a GPU and no network: the wheel of `make dist`,
# Horovod's source, the small packages of tests and benchmarks, and the NCCL that NCCL_LIBRARY names. Under 40 MB; for
# x86-64, Python 3.11 to 3.13.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly pack=tools/gpu-pack
readonly pip=(.venv/bin/python -m pip --disable-pip-version-check download -q --require-hashes --no-deps)
readonly most_kilobytes=40000

die() {
    printf 'gpu_pack: %s\n' "$*" >&2
    exit 1
}

# With their checksums, from the lock. Torch, Triton, numpy and torchvision are the machine's own.
locked() {
    local names='pytest pytest-timeout pytest-xdist execnet iniconfig pluggy pygments hypothesis sortedcontainers'
    names+=' psutil pyyaml cloudpickle packaging setuptools wheel tqdm'
    awk -F== -v names=" $names " '/^[a-z]/ { wanted = index(names, " " $1 " ") } wanted' tools/requirements.txt
}

rm -rf "$pack" && mkdir -p "$pack"
"${pip[@]}" --no-binary horovod --no-build-isolation -d "$pack" -r tools/horovod.txt ||
    die "cannot download Horovod's source; pip's message is above"
for version in 3.11 3.12 3.13; do
    "${pip[@]}" --only-binary :all: --python-version "$version" --implementation cp --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 \
        --platform manylinux2010_x86_64 -d "$pack" -r <(locked) ||
        die "cannot download the packages for Python $version; pip's message is above"
done
# It serves every CPython from 3.11 on and every torch; on_gpu.sh compares the sums.
cp dist/hvd_dyncomp-*-abi3-*.whl "$pack" || die "there is no wheel in dist/: make dist"
find setup.cfg setup.py pyproject.toml hvd_dyncomp -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum \
    >"$pack/package.sums"
[ -z "${NCCL_LIBRARY:-}" ] || cp "$NCCL_LIBRARY" "$pack/libnccl.so.2$(case $NCCL_LIBRARY in *.xz) echo .xz ;; esac)"

read -r kilobytes _ < <(du -sk "$pack")
[ "$kilobytes" -le "$most_kilobytes" ] || die "$pack has $kilobytes KB, more than $most_kilobytes"
echo "gpu_pack: $pack has $kilobytes KB; now tools/on_gpu.sh, on a machine with a GPU, or tools/on_gpu.sh --rehearse"
