#!/bin/sh
# Runs what `cargo xtask bundle` collected, on a machine without Rust.
#
#   ./run.sh [tests | bench | cli] [arguments for the programs]
#
# tests   all test programs (the default); arguments go to each, such as a name to filter by
# bench   all benchmarks
# cli     the asym-gemm program
#
# REQUIRE_GPU=1, REQUIRE_AMX=1   a skipped test is a failure
# TIMEOUT=600                    seconds for each program
set -u
here=$(cd "$(dirname "$0")" && pwd)
ASYM_GEMM_FIXTURES=${ASYM_GEMM_FIXTURES:-$here/fixtures}
export ASYM_GEMM_FIXTURES
what=${1:-tests}
[ $# -gt 0 ] && shift

run_all() {
    passed=0 failed=
    for program in "$here/$1"/*; do
        [ -x "$program" ] || continue
        name=$(basename "$program")
        arguments=$2
        echo "== $name"
        # shellcheck disable=SC2086 # arguments are words
        if env "CARGO_BIN_EXE_asym-gemm=$here/asym-gemm" \
            timeout "${TIMEOUT:-600}" "$program" $arguments; then
            passed=$((passed + 1))
        else
            echo "== $name: FAILED (exit $?)"
            failed="$failed $name"
        fi
    done
    echo "== summary: $passed passed${failed:+, failed:$failed}"
    [ -z "$failed" ]
}

case $what in
    tests) run_all deps "$*" ;;
    bench) run_all bench "$*" ;;
    cli) exec "$here/asym-gemm" "$@" ;;
    *)
        sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
esac
