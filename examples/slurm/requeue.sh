#!/usr/bin/env bash
# What the job scripts end with: puts the job back into the queue if its run has to go on, by the status it ended with.
#
#   examples/slurm/requeue.sh STATUS
#
# 128 + SIGUSR1: the job's time is nearly up. 128 + SIGTERM: of a preemption; scancel's SIGTERM is for good. At the end
# of a GraceTime Slurm requeues (with PreemptMode=REQUEUE) what it has to kill, and a job that ended before has failed.
set -euo pipefail

show() { SLURM_TIME_FORMAT=standard scontrol show job "$1"; }

job=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then # also in a job that a task of an array has submitted
  task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  state=$(show "$task")
  [[ $state != "JobId=$job "* ]] || job=$task # the number of the last task is that of the whole array
fi

if [[ $1 == 143 ]]; then
  state=$(show "$job")
  [[ $state == *" PreemptTime=2"* ]] || exit 0 # a date
fi
[[ $1 != 138 && $1 != 143 ]] || scontrol requeue "$job"
