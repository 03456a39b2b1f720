#!/bin/busybox sh
# First program of a guest of the density benchmark: what a sandbox does, in phases whose lengths are given, not measured.
/bin/busybox --install -s /bin 2>/dev/null
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
say() { echo "density: $*" > /dev/ttyS0; }
for word in $(cat /proc/cmdline); do
  case $word in density.*=*) name=${word%%=*}; eval "${name#density.}='${word#*=}'" ;; esac
done
for module in $(cat /mods/order); do insmod /mods/$module || say "module $module"; done
i=0
while [ ! -b $metadata ] || [ ! -b $data ] || [ ! -b $disk ]; do
  i=$((i + 1)); [ $i -gt 400 ] && say failed devices && poweroff -f; sleep 0.05
done
mkdir -p /layer /disk /tmp
mount -t erofs -o ro,device=$data$options $metadata /layer || { say failed layer; poweroff -f; }
mount -t ext4 $disk /disk || { say failed disk; poweroff -f; }
mount -t tmpfs tmpfs /tmp
[ "$damon" = 1 ] && while read path value; do echo $value > $path || say failed $path; done < /writes
say ready
sleep $delay
# It starts: the interpreter and what it loads.
cat /layer/hot/* > /dev/null
round=0
while [ $round -lt $rounds ]; do
  # A call of a tool: part of the layers that no other call reads, what all of them read, a build with temporary memory, files written and read.
  cat /layer/hot/* /layer/part-$round/* > /dev/null
  dd if=/dev/zero of=/tmp/build bs=1M count=$build 2>/dev/null
  cat /layer/part-$round/* | dd of=/disk/round-$round bs=64k count=$((write * 16)) iflag=fullblock 2>/dev/null
  sync
  cat /disk/round-$round > /dev/null
  rm /tmp/build
  say round $round
  # The model thinks.
  sleep $think
  round=$((round + 1))
done
say idle $(grep -E '^(Cached|MemFree|Active.file|Inactive.file)' /proc/meminfo | tr -s ' ' | tr '\n' ' ')
sleep $idle
say done $(grep -E '^(Cached|MemFree)' /proc/meminfo | tr -s ' ' | tr '\n' ' ')
# Until all are.
while :; do sleep 1000; done
