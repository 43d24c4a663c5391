#!/usr/bin/env bash
# Two hosts on one machine: two network namespaces joined by a virtual cable, one torchrun in each. Needs root and `ip`.
#
#   tools/launch/two_hosts.sh -m grpo_mc train configs/smoke/cpu.yaml parallel.tp=2
#
#   NPROC      processes a host (default 1)
#   LIMIT_S    bound of the whole run in seconds (default 600)
#   PYTHON     the interpreter (default python3)
# Both hosts see the same files, as on a shared file system. The exit status is the first failing host's. Whatever was
# started is ended and the namespaces are removed, also on Ctrl-C.
set -u -o pipefail

nproc=${NPROC:-1}
limit_s=${LIMIT_S:-600}
python=${PYTHON:-python3}
tag=grpo$$
port=29531
[ $# -gt 0 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2; }
[ "$(id -u)" = 0 ] || { echo "two_hosts: network namespaces need root" >&2; exit 2; }
command -v ip >/dev/null || { echo "two_hosts: the program ip is missing; install iproute2" >&2; exit 2; }

hosts=()
clean_up() {
    trap - EXIT INT TERM
    for host in 0 1; do
        # everything inside the namespace, and nothing else; torchrun gets a moment to end its workers
        pids=$(ip netns pids "$tag-$host" 2>/dev/null)
        [ -n "$pids" ] && kill -TERM $pids 2>/dev/null && sleep 1
        pids=$(ip netns pids "$tag-$host" 2>/dev/null)
        [ -n "$pids" ] && kill -KILL $pids 2>/dev/null
        ip netns del "$tag-$host" 2>/dev/null
    done
    wait 2>/dev/null
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

set -e
ip netns add "$tag-0"
ip netns add "$tag-1"
# made inside a namespace, so that two runs on one machine may both call their cable eth0
ip -n "$tag-0" link add eth0 type veth peer name eth0 netns "$tag-1"
for host in 0 1; do
    ip -n "$tag-$host" addr add "10.77.0.$((host + 1))/24" dev eth0
    ip -n "$tag-$host" link set lo up
    ip -n "$tag-$host" link set eth0 up
done
set +e

for host in 0 1; do
    ip netns exec "$tag-$host" env \
        GLOO_SOCKET_IFNAME=eth0 TP_SOCKET_IFNAME=eth0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
        timeout --kill-after=20 "$limit_s" "$python" -m torch.distributed.run \
        --nnodes 2 --nproc-per-node "$nproc" --rdzv-id "$tag" --rdzv-backend c10d \
        --rdzv-endpoint "10.77.0.1:$port" --rdzv-conf "is_host=$((host == 0)),join_timeout=60" \
        --local-addr "10.77.0.$((host + 1))" "$@" \
        > >(sed -u "s/^/[host $host] /") 2>&1 &
    hosts+=($!)
done

status=0
while [ ${#hosts[@]} -gt 0 ]; do
    wait -n -p ended "${hosts[@]}"
    code=$?
    hosts=($(printf '%s\n' "${hosts[@]}" | grep -vx "$ended"))
    if [ "$code" -ne 0 ]; then
        status=$code
        [ "$code" = 124 ] && echo "two_hosts: stopped after $limit_s s" >&2
        break  # clean_up ends the other host
    fi
done
exit "$status"
