#!/usr/bin/env bash
# Fills tools/gpu-pack with what tools/on_gpu.sh may not find on a machine with a GPU and no network: Horovod's source, the
# small packages of tests and benchmarks, and the images that are trained with. Under 40 MB; for x86-64, Python 3.11 to 3.13.
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
for folder in /usr/share/datasets/fashion-mnist /usr/share/dataset-fashion-mnist; do
    for file in "$folder"/*.gz; do
        # Packed tighter: a seventh of the whole.
        [ ! -e "$file" ] || { mkdir -p "$pack/data" && zcat "$file" | xz -9e >"$pack/data/$(basename "$file" .gz).xz"; }
    done
done
[ -d "$pack/data" ] || echo "gpu_pack: Debian's dataset-fashion-mnist is missing: stage 4 will train on scikit-learn's digits" >&2

read -r kilobytes _ < <(du -sk "$pack")
[ "$kilobytes" -le "$most_kilobytes" ] || die "$pack has $kilobytes KB, more than $most_kilobytes"
echo "gpu_pack: $pack has $kilobytes KB; now tools/on_gpu.sh, on a machine with a GPU, or tools/on_gpu.sh --rehearse"
