"""GPUs of a Proxmox VE host for its VMs: looked at, judged, set, taken back; VMs of exported images."""
