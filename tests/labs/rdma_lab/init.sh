#!/bin/bash
# Runs as process 1 of a node, and gives the node a writable root file system. At first the root is
# the host's file system, read-only. The kernel passes command-line parameters that it does not know
# as environment variables.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
: "${lab_dir:?}" "${lab_share:?}" "${lab_rank:?}"
top=/mnt
root=$top/root

mount -t proc proc /proc
mount -t tmpfs -o size=75% memory "$top"
mkdir "$top/upper" "$top/work" "$root"
mount -t overlay -o "lowerdir=/,upperdir=$top/upper,workdir=$top/work" overlay "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t devtmpfs devices "$root/dev"
mount -t tmpfs memory "$root/run"
mkdir -p "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o size=75% memory "$root/dev/shm"
mount -t devpts terminals "$root/dev/pts"
ln -s /proc/self/fd "$root/dev/fd"
# Mount the folders shared with the host: hostfs under User-mode Linux, 9p (by tag) under QEMU.
if grep -qw hostfs /proc/filesystems; then
  mount -t hostfs -o "$lab_dir" host "$root$lab_dir"
  mount -t hostfs -o "$lab_share" host "$root$lab_share"
else
  mount -t 9p -o trans=virtio,version=9p2000.L dir "$root$lab_dir"
  mount -t 9p -o trans=virtio,version=9p2000.L share "$root$lab_share"
fi
# perftest reads the processor's frequency, which a node's kernel does not report.
mount --bind "$lab_dir/cpuinfo" "$root/proc/cpuinfo"
exec chroot "$root" /bin/bash "$lab_dir/node.sh"
