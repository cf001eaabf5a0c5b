#!/usr/bin/env bash
# Agents of a Weights & Biases sweep (examples/wandb_sweep.yaml), as a job array: each takes runs on one GPU until the
# sweep has no more. Submit from the root of the repository:
#
#   SWEEP_ID=USER/fp8stack/ID sbatch examples/slurm/wandb_agent.sh
#SBATCH --job-name=fp8stack-agent
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%A-%a.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
exec srun wandb agent "${SWEEP_ID:?is what \"wandb sweep examples/wandb_sweep.yaml\" prints}"
