#!/usr/bin/env bash
# Slurm: one task per GPU, on two nodes of 8 GPUs.
#
#   RECIPE=recipes/qwen-image-edit/flow-grpo.jsonnet sbatch examples/cluster/slurm.sh
#
# srun starts the ranks itself: torchrun would forward Slurm's SIGTERM a second time, and a second signal ends a run at once.
#SBATCH --job-name=retouch
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600      # ten minutes before the end: the run finishes its step and saves a checkpoint
#SBATCH --requeue              # the same command continues the run
#SBATCH --open-mode=append
set -euo pipefail

export RECIPE
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export WORLD_SIZE=$SLURM_NTASKS
export RETOUCH_RANK_TIMEOUT=${RETOUCH_RANK_TIMEOUT:-1800}

# --kill-on-bad-exit: if one rank fails, the others are ended too.
srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
  exec retouch train "$RECIPE"
'
