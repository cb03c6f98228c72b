"""Package sources: their versions, whether they can be reached, and root file systems made of them.

Central values: `Decision` (whether a build installs a component, from where, and why) and `Probes` (the
functions that ask the network, which tests replace).

- `decisions`: decides about every component of an image.
- `apt`: this machine's Debian mirror, through a private apt; `ubuntu`, `rpm`: read an archive's metadata
  without its package manager; `mirror`: creates a Debian root file system.
"""
