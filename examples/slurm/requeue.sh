#!/usr/bin/env bash
# What the job scripts end with: puts the job back into the queue if its run has to go on, by the status it ended with.
#
#   examples/slurm/requeue.sh STATUS
#
# 128 + SIGUSR1: the job's time is nearly up. 128 + SIGTERM: a preemption, unless it was `scancel`, after which nothing
# goes on. Slurm requeues what it has to kill at the end of the partition's GraceTime; a job that ended before has failed.
set -euo pipefail

job=$SLURM_JOB_ID
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # one's number may be the whole array's

preempted() { [[ $(scontrol show job "$job") == *" PreemptTime=2"* ]]; } # of this start; "None" without

if [[ $1 == 138 ]] || { [[ $1 == 143 ]] && preempted; }; then scontrol requeue "$job"; fi
