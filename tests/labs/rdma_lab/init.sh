#!/bin/bash
# Process 1 of a node: gives it a root that it can write. So far its root is the file system of the
# host, read-only. The kernel hands on what it does not know of its command line as variables.
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
# What it shares with the host: a file system of User-mode Linux, or one that QEMU offers by tag.
if grep -qw hostfs /proc/filesystems; then
  mount -t hostfs -o "$lab_dir" host "$root$lab_dir"
  mount -t hostfs -o "$lab_share" host "$root$lab_share"
else
  mount -t 9p -o trans=virtio,version=9p2000.L dir "$root$lab_dir"
  mount -t 9p -o trans=virtio,version=9p2000.L share "$root$lab_share"
fi
# perftest wants the processor's frequency, which the kernel of a node does not tell.
mount --bind "$lab_dir/cpuinfo" "$root/proc/cpuinfo"
exec chroot "$root" /bin/bash "$lab_dir/node.sh"
