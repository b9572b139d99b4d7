#!/bin/sh
# SPDX-License-Identifier: MIT
#
# How much of what reads hostile bytes the C tests run: lines, and branches taken at least once, of
# each file. Fails below 95 % of the lines or 90 % of the branches of all together.
#
#     runtime_c/tests/coverage.sh [BUILD_DIR]         BUILD_DIR: build/coverage
#
# Needs gcc and gcov, which is part of it. `gcov -b FILE.gcda` there shows what was not run.

set -eu
source=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$source/build/coverage}
PATH=$PATH:$source/.venv/bin # where `make` puts cmake

cmake -S "$source" -B "$build" -DCMAKE_C_COMPILER="${CC:-gcc}" -DCMAKE_BUILD_TYPE=Debug \
    -DBITNET_TESTS=ON -DBITNET_COVERAGE=ON --log-level=WARNING >/dev/null
tests=$(cd "$source/runtime_c/tests" && ls test_file*.c test_mapping.c test_changing.c test_failures.c | sed 's/\.c$//')
cmake --build "$build" --parallel --target $tests >/dev/null
find "$build" -name '*.gcda' -delete
ctest --test-dir "$build" -R "^($(echo $tests | tr ' ' '|'))\$" --output-on-failure --quiet

cd "$build/CMakeFiles/bitnet_engine.dir/runtime_c/src"
LC_ALL=C gcov -b -n file/*.gcda linear/encodings.c.gcda linear/sizes.c.gcda linear/sketch.c.gcda \
    linear/values.c.gcda | awk '
    /^File/ {
        name = $0; sub(/\047$/, "", name); sub(/.*\/src\//, "", name)
        ours = name ~ /^(file\/.*|linear\/(encodings|sizes|sketch|values))\.c$/
    }
    !ours { next }
    { split($0, part, /[:%]/); share = part[2]; of = $NF }
    /^Lines executed/ { lines = share; all_lines += of; run_lines += share * of }
    /^Taken at least once/ {
        branches += of; taken += share * of
        printf "%-20s %6.2f %% of lines, %6.2f %% of branches\n", name, lines, share
        ours = 0
    }
    END {
        if (!branches) {
            print "error: gcov said nothing of the files"
            exit 1
        }
        lines = run_lines / all_lines; share = taken / branches
        printf "%-20s %6.2f %% of %d lines, %.2f %% of %d branches\n", "together", lines, \
            all_lines, share, branches
        if (lines < 95 || share < 90) {
            print "error: expected at least 95 % of lines and 90 % of branches"
            exit 1
        }
    }'
