#!/bin/sh
# Lists the GPUs of this host for Spark: the value of spark.executor.resource.gpu.discoveryScript, or of
# spark.worker.resource.gpu.discoveryScript on a standalone Worker. Where a GPU is cut in MIG slices, the slices are
# listed, and everything by UUID, since CUDA takes no mixture. The first argument is the name of the resource (gpu).
set -eu
list=$(nvidia-smi -L)
found=$(printf '%s\n' "$list" | awk '
    function uuid(start) { match($0, start "-[^)]*"); return "\"" substr($0, RSTART, RLENGTH) "\"" }
    /^GPU /   { number = $2; sub(":", "", number); n++; index_of[n] = "\"" number "\""; uuid_of[n] = uuid("GPU") }
    /^ +MIG / { slices[n] = slices[n] (count[n]++ ? "," : "") uuid("MIG"); cut = 1 }
    END {
        for (i = 1; i <= n; i++) printf "%s%s", (i > 1 ? "," : ""), (!cut ? index_of[i] : count[i] ? slices[i] : uuid_of[i])
    }
')
printf '{"name": "%s", "addresses": [%s]}\n' "${1:-gpu}" "$found"
