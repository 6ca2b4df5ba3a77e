#!/bin/bash
# Runs as the first process of the login host, and starts the network, munged, the database and
# slurmctld. Arguments: the lab's folder, and whether to enable accounting (yes or no).
set -euo pipefail
lab=$1 accounting=$2
export SLURM_CONF=$lab/slurm.conf PATH=$PATH:/usr/sbin:/sbin

patiently() {
  local rest=200
  until "$@" >/dev/null 2>&1; do
    ((rest -= 1)) || exit 1
    sleep 0.1
  done
}

hostname ctl
mount --bind "$lab/hosts" /etc/hosts
mount --bind "$lab/resolv.conf" /etc/resolv.conf
ip link set lo up
ip link add hub type bridge forward_delay 0
ip address add 10.66.0.1/24 dev hub
ip link set hub up

mungekey --create --keyfile "$lab/munge.key"
munged --force --key-file="$lab/munge.key" --socket="$lab/munge.sock" \
  --pid-file="$lab/munged.pid" --seed-file="$lab/munge.seed" --log-file="$lab/log/munged.log"

if [[ $accounting == yes ]]; then
  mount -t tmpfs none "$lab/database"
  settings=(--no-defaults --user=root --datadir="$lab/database" --innodb-flush-log-at-trx-commit=0
    --innodb-log-file-size=16M --innodb-lock-wait-timeout=900)
  tables=/usr/share/mysql/mysql
  {
    printf '%s;\n' 'create database mysql' 'use mysql' 'set @auth_root_socket=null'
    cat ${tables}_system_tables.sql ${tables}_performance_tables.sql ${tables}_system_tables_data.sql
  } | mariadbd "${settings[@]}" --bootstrap >"$lab/log/bootstrap.log" 2>&1
  # The database is reachable only over this namespace's loopback, so it needs no password.
  mariadbd "${settings[@]}" --skip-grant-tables --bind-address=127.0.0.1 \
    --socket="$lab/mariadb.sock" >"$lab/log/mariadbd.log" 2>&1 &
  patiently grep -q 'ready for connections' "$lab/log/mariadbd.log"
  slurmdbd
  patiently bash -c '</dev/tcp/127.0.0.1/6819'
  sacctmgr -i add cluster lab
fi

slurmctld
patiently bash -c '</dev/tcp/ctl/6817'
touch "$lab/ready"
while :; do
  sleep 3600 &
  wait $! || :
done
