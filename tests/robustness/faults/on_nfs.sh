#!/bin/sh
# The races of builders on a real NFS, in a kernel of its own that runs as a process, where this one
# has no NFS: on_nfs.sh [VERSION …], by default 4.2 and 3. Server and client are that kernel's, over
# its loopback; the root file system is this machine's.
#
# Needs root, Debian's user-mode-linux, kmod and nfs-kernel-server, and two minutes for each version.
set -eu
if [ -z "${NFS_FOLDER:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    here=$(realpath "$0")
    cat > "$folder/init" << END
#!/bin/sh
export NFS_FOLDER=$folder PATH=$PATH HOME=$folder
sh "$here" ${*:-4.2 3} > "$folder/log" 2>&1 && touch "$folder/passed"
sync
echo o > /proc/sysrq-trigger
sleep 9
END
    chmod +x "$folder/init"
    linux.uml mem=1500M root=/dev/root rootfstype=hostfs rootflags=/ rw init="$folder/init" \
        uml_dir="$folder" con=null con0=null,fd:2 < /dev/null > "$folder/console" 2>&1 || true
    cat "$folder/log"
    [ -e "$folder/passed" ] || { tail -n 20 "$folder/console"; exit 1; }
    exit
fi

cd "$(dirname "$0")/../../.."
mount -t proc proc /proc
mount -t sysfs sysfs /sys
for place in /mnt /run /var/lib/nfs; do mount -t tmpfs tmpfs "$place"; done
mkdir -p /var/lib/nfs/sm /var/lib/nfs/v4recovery /mnt/disk /mnt/nfs
: > /var/lib/nfs/etab
: > /var/lib/nfs/rmtab
modules=/usr/lib/uml/modules/$(uname -r)
for name in fs/nfs/nfsv3.ko fs/nfs/nfsv4.ko fs/nfsd/nfsd.ko; do
    for module in $(sed -n "s|^kernel/$name: *||p" "$modules/modules.dep" | tr ' ' '\n' | tac) \
        "kernel/$name"; do
        insmod "$modules/$module" 2> /dev/null || true # loaded before
    done
done
ip link set lo up
mount -t nfsd nfsd /proc/fs/nfsd
mount -t tmpfs tmpfs /mnt/disk
rpcbind -w
exportfs -o rw,no_root_squash,fsid=0,no_subtree_check,insecure,sync 127.0.0.1:/mnt/disk
rpc.nfsd -G 10 -L 10 8
rpc.statd --no-notify
rpc.mountd 2> /dev/null # says that there is no IPv6
for version in "$@"; do
    case $version in 3) path=/mnt/disk ;; *) path=/ ;; esac
    mount -t nfs -o "vers=$version" "127.0.0.1:$path" /mnt/nfs
    grep " /mnt/nfs nfs" /proc/mounts
    .venv/bin/python -m pytest -q -p no:cacheprovider -m "not slow" --basetemp=/mnt/nfs/t \
        tests/robustness/faults/test_races.py tests/cache/test_claim.py
    umount /mnt/nfs
done
