#!/bin/sh
# Prints the hosts of a hostfile that answer now, for an elastic job. Hosts may be added to the file while the job runs.
#
#   hvlaunch --min-np 2 --host-discovery-script 'hostfiles/discover.sh hosts' python train.py

set -eu
file=${1:?usage: discover.sh HOSTFILE}
command -v ping >/dev/null || { echo "discover.sh: there is no ping on this machine; try: apt-get install iputils-ping" >&2; exit 1; }
answers=$(mktemp -d)
trap 'rm -rf "$answers"' EXIT

# All at the same time, since a host that is down takes a second; the order of the file is the order of ranks.
number=1000000
while read -r line; do
    number=$((number + 1))
    host=${line%%[ :#]*}
    host=${host#*@}
    [ -n "$host" ] || continue
    (ping -c 1 -W 1 "$host" >/dev/null 2>&1 && echo "$line" >"$answers/$number" || true) &
done <"$file"
wait
find "$answers" -type f | sort | xargs -r cat
