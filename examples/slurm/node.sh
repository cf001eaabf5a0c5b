#!/usr/bin/env bash
# What the job scripts run on each node: torchrun with these arguments, whose ranks get the job's signals at once.
#
# SIGUSR1 comes when the time is nearly up, SIGTERM with a preemption. The ranks then write a checkpoint and end, and the
# status is 128 and the signal's number. torchrun by itself dies of the first, and kills ranks 30 s after the second.
set -uo pipefail

agent='' stopped=''

# shellcheck disable=SC2329 # traps call it
stop() {
  stopped=$((128 + $(kill -l "$1")))
  [[ -z $agent ]] || cat "/proc/$agent/task/"*/children | xargs -r kill -s "$1"
}

trap 'stop USR1' USR1
trap 'stop TERM' TERM
(trap '' USR1 && exec torchrun "$@") & # some clusters signal all processes, and it has to see its ranks end
agent=$!

while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done # which a signal ends, too
wait "$agent"
status=$?
[[ $status == 0 || -z $stopped ]] || exit "$stopped"
exit "$status"
