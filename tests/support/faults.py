"""Faults for a machine booted from an image: what breaks it, for the check that must notice.

Each is a shell command run as root on the machine; none of `FAULTS` is in another one's way.
"""

UNIT = "[Service]\\nType=oneshot\\nExecStart=/bin/false\\n"
LIBRARY = "$(readlink -f /usr/lib/x86_64-linux-gnu/libcuda.so.1)"
MODULES = "/lib/modules/*/updates/dkms"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA builder"

# Check id -> (command, words that the failure must say).
FAULTS = {
    "hygiene.host-keys": ("touch -d 2020-01-01 /etc/ssh/ssh_host_ed25519_key", "ssh_host_ed25519_key"),
    "hygiene.identities": (
        "mkdir -p /etc/nvme && touch -d 2020-01-01 /etc/nvme/hostnqn",
        "/etc/nvme/hostnqn of 2020",
    ),
    "hygiene.machine-id": ("touch -d 2020-01-01 /etc/machine-id", "baked in"),
    "hygiene.package-cache": ("touch /var/cache/apt/archives/x_1_amd64.deb", "x_1_amd64.deb"),
    "hygiene.authorized-keys": (f"echo {KEY} >>/home/admin/.ssh/authorized_keys", "builder"),
    "hygiene.history": ("echo ls >/root/.bash_history", "/root/.bash_history"),
    "hygiene.credentials": ("echo AKIA$(printf %016d 1) >/root/notes", "/root/notes:1"),
    "hygiene.dkms-trees": (
        "mkdir -p /var/lib/dkms/nvidia-current/1/build",
        "/var/lib/dkms/nvidia-current/1/build",
    ),
    "hygiene.build-tools": ("touch -d 2020-01-01 /tmp/packer-shell1", "packer-shell1"),
    "versions.packages": (
        r"sed -i '/^Package: nvtop$/,/^$/s/^Version: .*/Version: 0.1-1/' /var/lib/dpkg/status",
        "nvtop 0.1-1",
    ),
    "versions.driver-agrees": (
        f"l={LIBRARY} && d=$(dirname $l) && mv $l $d/libcuda.so.535.309.02"
        " && ln -sfn libcuda.so.535.309.02 $d/libcuda.so.1 && ldconfig",
        "libcuda.so.1): 535.309.02",
    ),
    "versions.library-path": (
        f"s=/usr/local/cuda-12.2/lib64/stubs && mkdir -p $s && cp {LIBRARY} $s/libcuda.so"
        " && echo $s >/etc/ld.so.conf.d/zz-cuda.conf && ldconfig",
        "by /etc/ld.so.conf.d/zz-cuda.conf",
    ),
    "versions.holds": ("apt-mark unhold nvidia-smi", "nvidia-smi"),
    "modules.loads": (
        # of several commands for a module, modprobe takes that of the first file
        "echo 'install nvidia-modeset /bin/false' >/etc/modprobe.d/aa-blocked.conf",
        "`/bin/false` is run instead of loading it",
    ),
    "modules.rivals": (
        "echo 'softdep nvidia pre: vfio-pci' >/etc/modprobe.d/zz-passthrough.conf",
        "loads vfio-pci first",
    ),
    "modules.vermagic": (
        f"sed -i 's/vermagic=6\\.1\\.0-../vermagic=6.1.0-00/' {MODULES}/nvidia-current-uvm.ko",
        "6.1.0-00",
    ),
    "modules.nouveau-blocked": (
        "sed -i /nouveau/d $(grep -Rl nouveau /etc/modprobe.d /lib/modprobe.d)",
        "has no `blacklist nouveau`",
    ),
    "boot.failed-units": (
        f"printf '{UNIT}' >/etc/systemd/system/broken.service && ! systemctl start broken",
        "broken.service",
    ),
    "boot.disk-space": (
        "mkdir -p /var/lib/kubelet && mount -t tmpfs -o size=1M tmpfs /var/lib/kubelet"
        " && ! dd if=/dev/zero of=/var/lib/kubelet/fill bs=1M count=2",
        "/var/lib/kubelet has 0 of 1 MiB free",
    ),
    "boot.state": (":", "degraded"),
    "boot.units-enabled": (
        "systemctl disable nvidia-persistenced",
        "nvidia-persistenced.service is disabled",
    ),
    "runtime.docker": ("systemctl stop docker.socket docker", "docker.service is inactive"),
    "runtime.daemon-json": ("echo '{\"runtimes\": [' >/etc/docker/daemon.json", "not JSON"),
    "runtime.containerd": (
        "mkdir -p /etc/containerd && echo 'version = = 2' >/etc/containerd/config.toml",
        "exits 1",
    ),
}

# Without a module there is nothing to judge the others by: after all of the above.
LAST = {
    "modules.installed-kernels": ("mkdir -p /lib/modules/6.1.0-99-amd64/kernel", "6.1.0-99-amd64"),
    "modules.present": (
        f"rm {MODULES}/nvidia-current-modeset.ko && depmod -a $(ls /boot/vmlinuz-* | cut -d- -f2-)",
        "nvidia_modeset",
    ),
}
