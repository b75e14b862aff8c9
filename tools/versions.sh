#!/usr/bin/env bash
# Runs tests/release/works.py with several versions of torch: each in an environment of its own, with the wheel in dist/,
# deleted afterwards. Prints a table, for docs/dev/contributing.md. Status 1: with one of them it did not end, or failed.
#
#     tools/versions.sh                # the newest release of each minor version from 2.3 on that pip finds
#     tools/versions.sh 2.8.0 2.13.0   # these
#
# A public build of torch brings CUDA: 3 GB to download, 7 on disk while it is tried. PYTHON names the Python (default:
# python3); TMPDIR, where there is space.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly python=${PYTHON:-python3}
readonly install_seconds=3600 run_seconds=1200
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/dev/null # none that is configured here
export OMP_NUM_THREADS=1

die() {
    printf 'versions: %s\n' "$*" >&2
    exit 1
}

wheel=$(compgen -G 'dist/hvd_dyncomp-*.whl') || die "there is no wheel in dist/: make dist"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

found_versions() {
    "$python" -m pip index versions torch 2>/dev/null | sed -n 's/^Available versions: //p' | tr -d ' ' | tr ',' '\n' |
        grep -E '^[0-9]+(\.[0-9]+){2}$' | sort -V | awk -F. '$1 > 2 || ($1 == 2 && $2 >= 3) { newest[$1 "." $2] = $0 }
            END { for (each in newest) print newest[each] }' | sort -V
}

# What works.py says in its last line; of a failure, all goes to stderr.
try() {
    local torch=$1 log=$folder/log
    rm -rf "$folder/environment"
    "$python" -m venv "$folder/environment" || return 1
    timeout -k 30 "$install_seconds" "$folder/environment/bin/pip" install -q "torch==$torch" "${wheel}[report]" psutil \
        >"$log" 2>&1 || { cat "$log" >&2 && echo "could not be installed" && return 1; }
    timeout -k 30 "$run_seconds" "$folder/environment/bin/python" -P tests/release/works.py >"$log" 2>&1 ||
        { cat "$log" >&2 && echo "failed" && return 1; }
    tail -n 1 "$log"
}

if [ $# -gt 0 ]; then versions=("$@"); else mapfile -t versions < <(found_versions); fi
[ ${#versions[@]} -gt 0 ] || die "pip finds no torch"
status=0
printf '| torch | run on | what ran |\n|---|---|---|\n'
for torch in "${versions[@]}"; do
    said=$(try "$torch") || status=1
    printf '| %s | %s | %s |\n' "$torch" "$(date -u +%F)" "$said"
done
exit "$status"
