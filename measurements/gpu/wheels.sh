#!/bin/sh
# Downloads what a machine with torch, transformers, accelerate, peft and jaxtyping on Python 3.12 still lacks for `make gpu`, as wheels
# for Linux on x86-64: `make gpu` unpacks them there, without a network. Needs PyPI, and pip for any Python.
#
#     measurements/gpu/wheels.sh [FOLDER]       (default: .wheels)
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$root/.wheels}
python=${PYTHON:-python3}
names="diffusers rjsonnet pydantic pydantic-core annotated-types typing-extensions typing-inspection importlib-metadata"
mkdir -p "$folder"
rm -f "$folder"/*.whl
set --
for name in $names; do
    set -- "$@" "$(grep "^$name==" "$root/constraints.txt")"
done
platforms=""
for version in manylinux1 manylinux2014 manylinux_2_17 manylinux_2_27 manylinux_2_28 manylinux_2_34; do
    platforms="$platforms --platform ${version}_x86_64"
done
# shellcheck disable=SC2086
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp $platforms --dest "$folder" "$@"
du -sh "$folder"
