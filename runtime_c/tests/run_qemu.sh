#!/bin/sh
# SPDX-License-Identifier: MIT
#
# The engine on CPUs this machine is not, under qemu-user: each picks the tier it should, no
# kernel meets an instruction it lacks, all give the scalar kernels' bits, and a model's logits
# have the same hash on every CPU of both architectures.
#
#     runtime_c/tests/run_qemu.sh [BUILD_DIR]         BUILD_DIR: build/qemu
#
# What is missing is skipped and said. Environment: AARCH64_CC, CMAKE_GENERATOR.

set -eu
source=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:-$source/build/qemu}
PATH=$PATH:$source/.venv/bin # where `make` puts cmake
mkdir -p "$build"
build=$(cd "$build" && pwd)
hash=

have() {
    command -v "$1" >/dev/null 2>&1
}

# compile NAME [cmake options]: the library and two tests into $build/NAME
compile() {
    name=$1
    shift
    if ! { cmake -S "$source" -B "$build/$name" -DBITNET_TESTS=ON -DBITNET_WERROR=ON "$@" &&
        cmake --build "$build/$name" --parallel --target check_kernels logits_hash; } \
        >"$build/$name.log" 2>&1; then
        tail -n 40 "$build/$name.log"
        echo "error: the build for $name failed; all of it is in $build/$name.log"
        exit 1
    fi
}

# on CPU TIER NAME CASES COMMAND...: COMMAND starts the tests of $build/NAME on a CPU whose best tier
# is TIER (-: any), beside the others
on() {
    cpu=$1 tier=$2 dir=$build/$3 cases=$4 brief=--brief
    shift 4
    [ "$cpu" != native ] || brief=
    echo "$cpu $tier $dir" >>"$build/started"
    { "$@" "$dir/check_kernels" --seed 1 --cases "$cases" && "$@" "$dir/logits_hash" $brief && echo passed; } \
        >"$dir/$cpu.log" 2>&1 &
}

# judge CPU TIER DIR: what `on` has found there
judge() {
    log=$3/$1.log
    if [ "$(tail -n 1 "$log")" != passed ]; then
        cat "$log"
        echo "error: the tests failed on $1"
        exit 1
    fi
    best=$(sed -n '/thread/{s/^[0-9a-f]*  *\([^ ]*\).*/\1/p;q;}' "$log")
    if [ "$2" != - ] && [ "$best" != "$2" ]; then
        echo "error: $1 chose the tier $best, expected $2"
        exit 1
    fi
    found=$(sed -n 's/^logits //p' "$log")
    if [ "${hash:=$found}" != "$found" ]; then
        echo "error: logits on $1 hash to $found, on the CPUs before to $hash"
        exit 1
    fi
    printf '%-14s %-11s kernels equal, logits %s\n' "$1" "$best" "$found"
}

if ! have cmake; then
    echo "skip: all of it, because there is no cmake (make .venv/installed)"
    exit 0
fi

rm -f "$build/started"
compile native
on native - native 100 env

machine=$(uname -m)
if [ "$machine" != x86_64 ]; then
    echo "skip: old x86 CPUs, because this machine is $machine"
elif ! have qemu-x86_64; then
    echo "skip: old x86 CPUs, because there is no qemu-x86_64 (package qemu-user)"
else
    # Few cases: these tiers run natively, too, and here it counts which instructions they have.
    on Nehalem scalar native 20 qemu-x86_64 -cpu Nehalem
    on Haswell avx2 native 20 qemu-x86_64 -cpu Haswell
fi

# qemu has neither AVX-512, AVX-VNNI nor AMX; a CPU with the first runs the second's code in another
# encoding, and AMX in C. There ASan sees what its instructions read and write, on CPUs that have it, too.
vnni=native
if grep -qs avx512_vnni /proc/cpuinfo; then
    evex=ON
    if grep -qs avx_vnni /proc/cpuinfo; then evex=OFF; else vnni=amx; fi
    # With the flags of `make sanitize`: a compiler's cache has most files then.
    compile amx -DBITNET_AMX_IN_C=ON -DBITNET_AVXVNNI_AS_EVEX=$evex \
        -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DBITNET_SANITIZE=address;undefined"
    on amx amx amx 100 env
else
    echo "AMX is not tested: this CPU has no AVX-512 VNNI"
    if ! grep -qs avx_vnni /proc/cpuinfo; then
        echo "AVX-VNNI is not tested: this CPU has neither it nor AVX-512 VNNI"
        vnni=
    fi
fi

cc=${AARCH64_CC:-aarch64-linux-gnu-gcc}
if ! have "$cc"; then
    echo "skip: ARM CPUs, because there is no $cc (package gcc-aarch64-linux-gnu)"
elif ! have qemu-aarch64; then
    echo "skip: ARM CPUs, because there is no qemu-aarch64 (package qemu-user)"
else
    compile aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_C_COMPILER="$cc" -DCMAKE_EXE_LINKER_FLAGS=-static -DBUILD_SHARED_LIBS=OFF
    on cortex-a53 neon aarch64 100 qemu-aarch64 -cpu cortex-a53
    on neoverse-n1 dotprod aarch64 100 qemu-aarch64 -cpu neoverse-n1
    on max i8mm aarch64 100 qemu-aarch64 -cpu max
fi

wait
while read -r cpu tier dir; do
    judge "$cpu" "$tier" "$dir"
done <"$build/started"
if [ "$vnni" ] && ! grep -q avxvnni "$build/$vnni/$vnni.log"; then
    echo "error: no AVX-VNNI in $build/$vnni"
    exit 1
fi
