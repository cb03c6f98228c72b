"""GPUs of a Proxmox VE host for its VMs: inspected, checked, set, undone; VMs of exported images."""
