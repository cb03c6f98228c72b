"""Disks of images outside EC2: exported to a file, prepared for their machine, imported again as an AMI.

`source.Source` is an image with its root disk, `run.ExportOptions` says what is written and
`run.ExportResult` what was; `import_disk.DiskFile` is a file that becomes an AMI. `run.py` exports: it reads
the disk (`ebs.py`, by the EBS direct APIs), changes it (`prepare.py`), converts it (`formats.py` with
`netboot.py` and `installer.py`, whose initramfs `initramfs.py` makes) and writes the files next to it
(`sidecars.py`). `firmware.py` finds what a disk can boot on, `import_disk.py` makes an AMI of a file.
"""
