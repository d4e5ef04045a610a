#!/usr/bin/env bash
# Makes the environments of pipeline_peers.py's peers, which do not fit into tfdist's own: DIR/petastorm, DIR/datasets.
# Petastorm 0.13.1 knows the interfaces of pyarrow before 12 and so needs a pandas and a numpy of that time; Spark is a
# dependency that its installation asks for. TensorFlow is the same release in all environments.
set -euo pipefail

usage="usage: ./run exec benchmarks/make_peers.sh DIR [petastorm] [datasets]   (about 2 GB each)"
[ $# -gt 0 ] || { echo "$usage" >&2; exit 2; }
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
folder=$1
shift
[ $# -gt 0 ] || set -- petastorm datasets
python=${PYTHON:-python}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    { echo "make_peers.sh: expected Python 3.11, got $("$python" --version); set PYTHON to one" >&2; exit 1; }

# The release that tfdist is tested with.
pinned() {
    local name
    for name in "$@"; do
        grep "^$name==" "$root/constraints.txt"
    done
}

for name in "$@"; do
    case "$name" in
        petastorm)
            packages=(petastorm==0.13.1 pyarrow==10.0.1 pandas==2.0.3 numpy==1.26.4 pyspark==3.5.1 'setuptools<81')
            mapfile -t ours < <(pinned tensorflow-cpu keras protobuf)
            ;;
        datasets)
            packages=(datasets==5.2.0)
            mapfile -t ours < <(pinned tensorflow-cpu keras protobuf numpy pyarrow pandas)
            ;;
        *)
            echo "make_peers.sh: expected petastorm or datasets, got $name" >&2
            exit 2
            ;;
    esac
    echo "Making $folder/$name ..." >&2
    "$python" -m venv --clear "$folder/$name"
    env -u PYTHONPATH PIP_DISABLE_PIP_VERSION_CHECK=1 "$folder/$name/bin/python" -m pip install --quiet --no-input \
        "${packages[@]}" "${ours[@]}"
done
