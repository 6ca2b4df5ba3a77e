#!/bin/busybox sh
# shellcheck shell=dash
# Process 1 of a node under QEMU: gives it the file system of the host as its root, read-only, and
# goes on as the nodes of User-mode Linux begin.
# What is on the kernel's command line and not for it, it hands on as variables.
: "${lab_init:?}"
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devices /dev
for module in /modules/*; do insmod "$module"; done
# The host's files do not change under a node, so that they may be cached.
mount -t 9p -o ro,cache=loose,trans=virtio,version=9p2000.L,msize=512000 host /host
exec chroot /host "$lab_init"
