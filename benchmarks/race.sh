#!/usr/bin/env bash
# What DESIGN.md's "The race" says of a card, measured on this one, part by part:
#
#   benchmarks/race.sh FOLDER [PART …]     (all parts, in this order: half an hour on an H200)
#
#   races       three sweeps of eight shapes, each with an empty Triton cache
#   repeats     ten more in processes of their own, after 3 s idle, with the binaries of the first
#   key         one key: a sweep, and @triton.autotune over 40 configs, extrapolated
#   autotune    @triton.autotune over the configs within 10% of a best, in five processes
#   copies, bench, overlap     see trials.py
#   exhaustive  the same shapes, every config by itself
#   yardstick   the same, as the articles did it
#   judge       how far behind the best each choice above is
#
# Everything that a part prints goes to FOLDER, and its seconds to FOLDER/seconds. Exits with 1 when
# something failed.
set -uo pipefail
shopt -s nullglob
(($#)) || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2; }
folder=$(mkdir -p "$1" && cd "$1" && pwd) failed=0
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
recorded=sweeps/h200_v6_heads_first_bf16_D64.parquet

timed() { # NAME COMMAND…
    local name=$1 start status=0
    shift
    start=$(date +%s.%N)
    "$@" >"$folder/$name.out" 2>"$folder/$name.err" || status=$? failed=1
    awk -v name="$name" -v start="$start" -v end="$(date +%s.%N)" -v status="$status" \
        'BEGIN {printf "%s %.1f s%s\n", name, end - start, status ? " (exit " status ")" : ""}' |
        tee -a "$folder/seconds"
}

sweep() { # NAME CACHE OPTION…
    local name=$1 cache=$2
    shift 2
    if [ -e "$folder/$name" ]; then
        echo "$folder/$name exists, and a sweep would go on with it: take an empty folder." >&2
        exit 2
    fi
    TRITON_CACHE_DIR=$folder/cache/$cache timed "$name" \
        python3 -m flashtune sweep "$@" --out "$folder/$name"
}

all_shapes=(--N 512,1024,2048,4096 --both)
run() { # PART
    case $1 in
    races) for i in 1 2 3; do sweep "race$i" "$i" "${all_shapes[@]}"; done ;;
    repeats) for i in {1..10}; do sleep 3 && sweep "race_again$i" 1 "${all_shapes[@]}"; done ;;
    key)
        sweep key key --N 4096 --causal
        TRITON_CACHE_DIR=$folder/cache/autotuned timed key_autotuned \
            python3 benchmarks/triton_autotune.py --sample 40 --N 4096 --mask causal
        ;;
    autotune)
        for i in {1..5}; do
            TRITON_CACHE_DIR=$folder/cache/1 timed "autotuned$i" \
                python3 benchmarks/triton_autotune.py --near "$recorded"
        done
        ;;
    judge)
        local options=(--seconds 3 --out "$folder/judge.json")
        local autotuned=("$folder"/autotuned?.out)
        if ((${#autotuned[@]})); then
            cat "${autotuned[@]}" >"$folder/autotuned.jsonl"
            options+=(--autotuned "$folder/autotuned.jsonl")
        fi
        if [ -e "$folder/yardstick.json" ]; then options+=(--yardstick "$folder/yardstick.json"); fi
        timed judge python3 benchmarks/judge.py "$folder"/{race*,exhaustive}/*.parquet "${options[@]}"
        ;;
    copies | bench | overlap) timed "$1" python3 benchmarks/trials.py --only "$1" ;;
    exhaustive) sweep exhaustive exhaustive "${all_shapes[@]}" --exhaustive ;;
    yardstick) timed yardstick python3 benchmarks/yardstick.py --out "$folder/yardstick.json" ;;
    esac
}

parts=" races repeats key autotune copies bench overlap exhaustive yardstick judge "
# shellcheck disable=SC2086
(($#)) || set -- $parts
for part; do
    if [[ $parts != *" $part "* ]]; then
        echo "There is no part $part, only$parts" >&2
        exit 2
    fi
done
for part; do run "$part"; done
exit "$failed"
