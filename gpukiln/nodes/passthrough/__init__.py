"""GPUs of a Proxmox VE host for its VMs: inspected, checked, set, undone; VMs of exported images.

Values: `PveFacts`, everything that was read of node, VMs and devices; `Evaluation`, the checks on it and
the one `ConfigChange` that would be written; `Undo`, the file that takes a change back.

    api, pvesh    the only modules that talk to Proxmox VE: over HTTPS with a token, or by pvesh as root
    host          drivers, kernel arguments and leases of the host, by probe/passthrough.py
    facts         gathers all of it, changes nothing
    evaluate      the checks: a function of the facts
    apply         writes one `hostpciN` and reads it back; undoes it
    create        creates a VM of an exported image, and removes it on a failure
    values        Proxmox VE's notation: addresses, hostpciN, mappings
    model, view   the documents that are printed, and their text for people

A new check is a `PassthroughCheck` of evaluate.py, with its fault in `test_what_is_examined`;
tests/support/pve.py is a Proxmox VE that refuses as the real one does.
"""
