#!/bin/bash
# Runs on a node once its file system is mounted: sets up the network and the RDMA device, runs the
# command, and writes the exit status to the file that the host polls.
: "${lab_dir:?}" "${lab_rank:?}"
exec </dev/null >>"$lab_dir/output.$lab_rank" 2>&1
# shellcheck source=/dev/null
. "$lab_dir/environment"
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export RANK=$lab_rank
ulimit -l unlimited
ulimit -n 65536
echo "node$RANK" >/proc/sys/kernel/hostname
cat "$lab_dir/hosts" >>/etc/hosts

# Without a link, this node is alone, or QEMU has joined the links. With several links, this node
# joins them with a bridge.
shopt -s nullglob
links=(/sys/class/net/vec*)
links=("${links[@]##*/}")
ip link set lo up
case ${#links[@]} in
  0) if [[ ! -e /sys/class/net/eth0 ]]; then ip link add eth0 type dummy; fi ;;
  1) ip link set "${links[0]}" name eth0 ;;
  *)
    ip link add eth0 type bridge
    for link in "${links[@]}"; do ip link set "$link" mtu 9000 master eth0 up; done
    ;;
esac
ip link set eth0 mtu 9000 up
ip addr add "10.77.0.$((RANK + 1))/24" dev eth0

# The GID of the address appears shortly after the device.
rdma link add "$LAB_RDMA_DEV" type rxe netdev eth0
gids=/sys/class/infiniband/$LAB_RDMA_DEV/ports/1/gids
for ((tries = 0; tries < 100; tries++)); do
  if gid=$(grep -ls ':ffff:0a4d:' "$gids"/*); then break; fi
  sleep 0.1
done
export LAB_RDMA_GID=${gid##*/}

cd "$LAB_CWD" || cd /
bash "$lab_dir/command"
echo "$?" >"$lab_dir/status.$RANK.new"
mv "$lab_dir/status.$RANK.new" "$lab_dir/status.$RANK"
# Other nodes may still need this node. The host kills it when all have finished.
while :; do sleep 60; done
