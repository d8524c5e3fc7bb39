#!/usr/bin/env bash
# Slurm: one node; `retouch launch` starts a rank per GPU of the job.
#
#   RECIPE=recipes/sd3/prompt-enhancer.jsonnet sbatch --gpus-per-node=3 examples/cluster/slurm_one_node.sh --nproc 1
#   RECIPE=recipes/qwen-image-edit/flow-grpo.jsonnet sbatch --gpus-per-node=8 examples/cluster/slurm_one_node.sh
#
# Arguments are passed to `retouch launch`. Without --nproc, there are as many ranks as GPUs; a recipe that distributes its models
# over GPUs with `devices` needs one rank (--nproc 1). For several nodes, see slurm.sh.
#SBATCH --job-name=retouch
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600    # ten minutes before the end: this script forwards the signal, and the run saves a checkpoint
#SBATCH --requeue              # the same command continues the run
#SBATCH --open-mode=append
set -euo pipefail

export RETOUCH_RANK_TIMEOUT=${RETOUCH_RANK_TIMEOUT:-1800}
if [[ " $* " != *" --nproc "* ]]; then
  set -- --nproc "${SLURM_GPUS_ON_NODE:-1}" "$@"
fi

# A signal that arrives before the run is started is remembered, and forwarded as soon as the run is started.
stopped=
trap 'stopped=1' TERM
retouch launch "$@" "$RECIPE" &
run=$!
trap 'kill -TERM "$run" || true' TERM
if [[ -n "$stopped" ]]; then kill -TERM "$run" || true; fi
# The first wait ends at the signal, the second when the run has saved its checkpoint.
wait "$run" || true
trap - TERM
wait "$run"
