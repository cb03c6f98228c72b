"""Raw disks as sparse files: built, identified, grown, mounted, copied and converted, without device nodes.

Central values: `table.PartitionTable` with its `Partition`s, `identify.Disk` (what boots a disk) and
`loop.LoopDevice`. Modules: `build` packs a root file system into a bootable disk; `table` reads MBR and GPT;
`identify` says which machines boot a disk and refuses files that refer to other files; `sparse` finds, copies
and hashes data without reading holes; `grow` enlarges disk, table and root file system; `mount` mounts a root
file system; `qcow2` writes qcow2 with its digest in one pass; `convert` calls qemu-img and zstd.
"""
