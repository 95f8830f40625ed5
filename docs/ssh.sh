#!/bin/bash
# A study on several machines that ssh reaches without a password:
#
#     HOSTS="a b c" docs/ssh.sh tinystories
#
# The study's folder will be on the first. The repository with its .venv lies at the same path on each, `tune_study` in
# the home folder or where FOLDER says. Arguments are those of `sweep`, NODE has more for `ray start`, such as
# --num-cpus=8, PORT another port for the head. The cluster lives as long as this script.
set -eu
read -ra hosts <<< "$HOSTS"
folder=${FOLDER:-tune_study}
head=${hosts[0]} address=${hosts[0]}:${PORT:-6379}
ready=".venv/bin/ray status --address=$address 2> /dev/null | grep node_" # a line each

there() { # [OPTION OF SSH]... HOST COMMAND: runs it there, in the repository's folder
  local last=${*: -1}
  ssh "${@:1:$#-1}" "cd $folder && export TMPDIR=/tmp RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=\$HOME/.ray-token-$$ && $last"
}

node() { # HOST PREPARATION OPTION: a node of the cluster there, until $hold is closed, whatever closes it
  there "$1" "{ ($2; exec .venv/bin/ray start --block --disable-usage-stats ${NODE:-} $3 > /dev/null) & node=\$!; \
    cat > /dev/null; kill \$node; wait; rm -f ~/.ray-token-$$; }" < "$hold" &
}

hold=$(mktemp -d)/hold
mkfifo "$hold"
trap 'exec 9>&-; wait; rm -r "${hold%/*}"' EXIT
token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
for host in "${hosts[@]}"; do
  printf %s "$token" | ssh "$host" "umask 077 && cat > ~/.ray-token-$$"
done
node "$head" true "--head --port=${address##*:} --include-dashboard=false"
for host in "${hosts[@]:1}"; do
  node "$host" "until $ready -q; do sleep 1; done" "--address=$address"
done
exec 9> "$hold"
terminal=() && [ ! -t 0 ] || terminal=(-t)
words=$(printf ' %q' "$@")
# A machine that does not come is done without; if none does, the sweep says so.
all="for i in \$(seq 60); do [ \$($ready -c) = ${#hosts[@]} ] && break; sleep 1; done"
there ${terminal[@]+"${terminal[@]}"} "$head" \
  "{ $all; .venv/bin/python -m tune_study sweep$words --address $address; }" 9>&-
