"""Disks as files: partition tables, holes, formats, loop devices, mounts."""
