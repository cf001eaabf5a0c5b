#!/usr/bin/env bash
# Train on all GPUs of one node. Submit from the root of the repository; arguments go to train_gpt.py:
#
#   sbatch examples/slurm/one_node.sh --config examples/configs/fineweb_edu_fp8.yaml
#
# Five minutes before its time is up the run writes a checkpoint, and the job is requeued; then, and when Slurm requeues
# it after a preemption, the run goes on from its newest checkpoint.
#SBATCH --job-name=fp8stack
#SBATCH --nodes=1
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

status=0
srun examples/slurm/node.sh --standalone --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
  examples/train_gpt.py --resume auto "$@" || status=$?
[[ $status == 0 ]] || examples/slurm/requeue.sh "$status" || echo "the job is not requeued" >&2
exit "$status"
