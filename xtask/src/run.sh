#!/bin/sh
# Runs what `cargo xtask bundle` collected, on a machine without Rust.
#
#   ./run.sh [tests | bench | cli] [arguments for the programs]
#   ./run.sh record FOLDER
#
# tests   all test programs (the default); arguments go to each, such as a name to filter by
# bench   all benchmarks
# cli     the asym-gemm program
# record  files for docs/records: machine, fixtures, benchmarks, and what compute-sanitizer
#         says of the GPU tests where it is installed
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

# One line of fixtures.csv: the errors and the time of a run of a fixture's layer.
fixture_line() { # fixture layer backend format transfer
    input=$here/fixtures/$1/moe_io.safetensors
    "$here/asym-gemm" moe --json --model "$here/fixtures/$1" --layer "$2" \
        --input "$input:layer$2.input" --expect "$input:layer$2.output" \
        --backend "$3" --format "$4" --transfer "$5" >"$out/line.json"
    status=$?
    value() { sed -n "s/^ *\"$1\": \([^,]*\),\{0,1\}$/\1/p" "$out/line.json"; }
    echo "$1,$3,$4,$5,$(value element_error),$(value element_limit),$(value frobenius_error),$(value frobenius_limit),$(value seconds),$status"
}

record() {
    out=$1
    mkdir -p "$out"
    "$here/asym-gemm" doctor --json >"$out/machine.json"
    {
        echo "fixture,backend,format,transfer,element_error,element_limit,frobenius_error,frobenius_limit,first_call_seconds,exit"
        for fixture in "qwen3_moe_bf16 0" "mixtral_bf16 0" "deepseek_v3_bf16 1" "gpt_oss_bf16 0"; do
            for format in bf16 int8 int8-block128; do
                for way in "cpu auto" "both staged" "gpu staged" "gpu direct" "gpu resident"; do
                    # shellcheck disable=SC2086 # each is two words
                    set -- $fixture $way
                    fixture_line "$1" "$2" "$3" "$format" "$4"
                done
            done
        done
    } >"$out/fixtures.csv"
    rm -f "$out/line.json"
    for program in "$here"/bench/*; do
        "$program" --csv "$out/$(basename "$program").csv"
    done
    command -v compute-sanitizer >/dev/null || return 0
    # The driver layer counts a kernel's parameters by asking until it is refused, so refused
    # calls are no finding. Race checks are slow: the tests with the fewest launches.
    {
        for tool in memcheck racecheck synccheck; do
            for run in "tests-gpu_grouped_gemm skewed_groups odd_shapes padding" \
                "tests-gpu_moe odd_shapes tokens_are_independent"; do
                if [ $tool != memcheck ]; then
                    case $run in
                        *grouped*) run="tests-gpu_grouped_gemm padding" ;;
                        *) run="tests-gpu_moe tokens_are_independent" ;;
                    esac
                fi
                echo "== $tool: $run"
                # shellcheck disable=SC2086 # program and its arguments
                REQUIRE_GPU=1 timeout "${TIMEOUT:-600}" compute-sanitizer --tool $tool \
                    --report-api-errors no "$here"/deps/$run 2>&1 |
                    grep -E '^test |^test result|SUMMARY|Invalid|hazard|Error' || true
            done
        done
    } >"$out/sanitizer.txt"
}

case $what in
    tests) run_all deps "$*" ;;
    bench) run_all bench "$*" ;;
    record) record "${1:?folder for the files}" ;;
    cli) exec "$here/asym-gemm" "$@" ;;
    *)
        sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
esac
