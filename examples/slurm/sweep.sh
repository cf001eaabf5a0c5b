#!/usr/bin/env bash
# A sweep, as a job array: every level at every learning rate, each on one GPU; arguments go to train_gpt.py:
#
#   sbatch examples/slurm/sweep.sh --model gpt2 --data data/fineweb-edu --steps 2000
#   python examples/compare.py runs/sweep-off-6e-4-bf16 runs/sweep-O2-6e-4-fp8-o2
#SBATCH --job-name=fp8stack-sweep
#SBATCH --array=0-7
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%A-%a.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"

levels=(off O0 O1 O2)
rates=(3e-4 6e-4)
level=${levels[SLURM_ARRAY_TASK_ID % ${#levels[@]}]}
rate=${rates[SLURM_ARRAY_TASK_ID / ${#levels[@]}]}

status=0
srun python examples/train_gpt.py --resume auto --opt-level "$level" --max-lr "$rate" \
  --run-name "sweep-$level-$rate" "$@" || status=$?
[[ $status == 0 ]] || examples/slurm/requeue.sh "$status" || echo "the job is not requeued" >&2
exit "$status"
