#!/usr/bin/env bash
# Train on several nodes: one torchrun on each, which meet at the first. Submit from the root of the repository, which
# all nodes must see under the same path; arguments go to train_gpt.py:
#
#   sbatch --nodes=4 examples/slurm/many_nodes.sh --config examples/configs/fineweb_edu_fp8.yaml --data data/fineweb-edu
#
# Five minutes before its time is up the run writes a checkpoint, and the job is requeued; then, and when Slurm requeues
# it after a preemption, the run goes on from its newest checkpoint, also with another number of nodes.
#SBATCH --job-name=fp8stack
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"

read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs on one node do not meet

status=0
srun examples/slurm/node.sh --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
  --rdzv-backend c10d --rdzv-endpoint "$first:$port" --rdzv-id "$SLURM_JOB_ID" \
  examples/train_gpt.py --resume auto "$@" || status=$?
[[ $status == 0 ]] || examples/slurm/requeue.sh "$status" || echo "the job is not requeued" >&2
exit "$status"
