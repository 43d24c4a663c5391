#!/usr/bin/env bash
# One run on one or more hosts under torchrun: start it on every host with the same arguments.
#
#   one host:    NPROC=2 tools/launch/torchrun.sh train CONFIG [section.key=value ...]
#   two hosts:   on the first   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 NPROC=8 tools/launch/torchrun.sh train CONFIG ...
#                on the second  NNODES=2 NODE_RANK=1 MASTER_ADDR=host0 NPROC=8 tools/launch/torchrun.sh train CONFIG ...
#
#   NPROC        processes on this host (default: its GPUs, or 1 without)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as torchrun has them (1, 0, localhost, 29500)
#   PYTHON       the interpreter (default python3)
# The run directory must lie on a file system that all hosts share. On CPUs with several interfaces set
# GLOO_SOCKET_IFNAME, on GPUs NCCL_SOCKET_IFNAME, to the one that reaches the other hosts.
set -eu -o pipefail

python=${PYTHON:-python3}
nproc=${NPROC:-$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( $(nproc) / nproc > 0 ? $(nproc) / nproc : 1 ))}

exec "$python" -m torch.distributed.run \
    --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$nproc" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \
    -m grpo_mc "$@"
