#!/usr/bin/env bash
# Runs tools/on_gpu.sh as on a machine with a GPU that has next to nothing: no network, no MPI, nothing of this checkout or
# of the user's cache, and a Python that has torch and what usually comes with it. Horovod is really built; the rest runs
# on CPUs, small, with Gloo in NCCL's place (tests/as_nccl.py). At most ten minutes on two cores. Needs root (network and
# mount namespaces), make setup and make gpu-pack.
set -euo pipefail
cd "$(dirname "$0")/.."

die() {
    printf 'rehearse_gpu: %s\n' "$*" >&2
    exit 1
}

[ "$(id -u)" -eq 0 ] || die "needs root, for namespaces in which there is no network"
[ -x .venv/bin/python ] || die "there is no .venv: make setup"
[ -d tools/gpu-pack ] || die "there is no tools/gpu-pack: make gpu-pack"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
out=${OUT:-runs/gpu-rehearsal}
mkdir -p "$folder/checkout" "$folder/home" "$out"
git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C "$folder/checkout"
cp -r tools/gpu-pack "$folder/checkout/tools/"

# The machine's Python: ours, by links, without what the machine would not have.
python3 -m venv "$folder/machine"
site=$("$folder/machine/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
ours=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
python3 - "$ours" "$site" <<'PYTHON'
import os, shutil, sys

def link(source, target):
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)

names = ("horovod", "hvd_dyncomp", "mpi4py", "pytest", "hypothesis", "psutil", "yaml", "cloudpickle", "tqdm")
missing = [pattern for name in names for pattern in (name, f"{name}-*", f"{name}.*", f"py{name}-*", f"{name}_*-*")]
ignored = shutil.ignore_patterns("__pycache__", *missing)
shutil.copytree(sys.argv[1], sys.argv[2], copy_function=link, ignore=ignored, dirs_exist_ok=True)
PYTHON

# Paths as they are, but for what is not to be seen.
# shellcheck disable=SC2016  # expanded in there
unshare --net --mount --propagation private sh -ec '
    ip link set lo up
    mount -t tmpfs none "$1"
    mkdir -p /run/netns
    for program in mpirun mpicxx mpic++ horovodrun; do
        found=$(command -v $program) && mount --bind /bin/false "$(readlink -f "$found")" || true
    done
    folder=$2
    shift 2
    cd "$folder/checkout"
    exec env -i HOME="$folder/home" TERM=dumb PATH="$folder/machine/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
        OUT="$folder/out" tools/on_gpu.sh --pretend "$@"
' rehearsal "$PWD" "$folder" "$@" && status=0 || status=$?
cp -r "$folder/out/." "$out/" 2>/dev/null || true
[ "$status" -eq 0 ] || die "not all stages passed; $out/gpu.log has what they said"
echo "rehearse_gpu: all stages passed; $out has what they wrote"
