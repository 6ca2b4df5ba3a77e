#!/bin/bash
# Runs as the first process of a node, waits for its network interface, and starts slurmd.
# Arguments: the lab's folder, the node's name and its address.
set -euo pipefail
lab=$1 name=$2 address=$3
export SLURM_CONF=$lab/slurm.conf PATH=$PATH:/usr/sbin:/sbin
hostname "$name"
mount -t tmpfs -o mode=1777 none /dev/shm
for _ in {1..100}; do
  if ip link show eth0 >/dev/null 2>&1; then break; fi
  sleep 0.1
done
ip address add "$address/24" dev eth0
ip link set lo up
ip link set eth0 up
slurmd -N "$name"
while :; do
  sleep 3600 &
  wait $! || :
done
