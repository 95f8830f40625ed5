#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --cpus-per-task=16 --time=08:00:00
#
# A study on the nodes of a SLURM job, which is submitted again until the study is done. Correct the
# line above (it counts for the jobs that follow, options of sbatch do not), and in the repository's folder:
#
#     sbatch docs/slurm.sh tinystories --hours 7.8 --runs $SCRATCH/runs --data $SCRATCH/data
#
# What follows the script's name are arguments of `sweep`; --hours is to be less than --time.
set -eu
cd "$SLURM_SUBMIT_DIR"
export TMPDIR=/tmp # the paths of Ray's sockets must be short
cores=$SLURM_CPUS_PER_TASK others=$((SLURM_NNODES - 1))
on=()
if [ $others -gt 0 ]; then
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$SLURM_SUBMIT_DIR/.ray-token-$SLURM_JOB_ID
  (umask 077 && .venv/bin/python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH")
  trap 'kill $(jobs -p) 2> /dev/null; wait; rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT
  port=$((20000 + SLURM_JOB_ID % 10000)) # another job may have a head on this node
  on=(--address "$(hostname):$port")
  start=(.venv/bin/ray start --block --disable-usage-stats "--num-cpus=$cores")
  "${start[@]}" --head "--port=$port" --include-dashboard=false > /dev/null &
  head=$!
  nodes() { .venv/bin/ray status "${on[@]}" 2> /dev/null | grep -c node_ || true; }
  until [ "$(nodes)" = 1 ]; do
    kill -0 $head # ends this if the head has ended
    sleep 1
  done
  # What srun is not told it takes from its defaults, not from this job: a core a task.
  srun --nodes=$others --ntasks=$others --cpus-per-task="$cores" --exclude="$SLURMD_NODENAME" \
    "${start[@]}" "${on[@]}" > /dev/null &
  for _ in {1..60}; do # a node that comes later is used, too
    [ "$(nodes)" = "$SLURM_NNODES" ] && break
    sleep 1
  done
fi
code=0
.venv/bin/python -m tune_study sweep "$@" ${on[@]+"${on[@]}"} || code=$?
if [ $code = 3 ]; then # the time given by --hours is over
  sbatch "$0" "$@"
  code=0
fi
exit $code
