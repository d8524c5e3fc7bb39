#!/usr/bin/env bash
# Ray Jobs: a run on one node of a Ray cluster. Ray chooses a node with the number of GPUs that the job requests.
#
#   RECIPE=recipes/qwen-image-edit/flow-grpo.jsonnet examples/cluster/ray_job.sh http://HEAD:8265
#
# The same command continues a run that was stopped. For reward servers on the same cluster, see docs/serving.md.
set -euo pipefail
GPUS=${GPUS:-8}
exec ray job submit --address "$1" --entrypoint-num-gpus "$GPUS" --working-dir . -- \
  retouch launch --nproc "$GPUS" "$RECIPE" --set out="${OUT:-/shared/runs}"
