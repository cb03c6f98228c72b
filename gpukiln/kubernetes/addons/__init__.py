"""Add-ons of a cluster with GPU nodes: Helm values for charts of other projects, and manifests of gpukiln.

The central values are `Settings` (what the user chose; the input of every add-on), `AddOnKind` (an add-on
with its files and its install commands) and `AddOns` (what `k8s.addons --json` prints). Nothing here asks a
cluster.

settings      the form of the settings files, and their defaults
options       settings from files and from options
render        the files of the chosen add-ons, and install.sh
listing       the JSON document of the command
helm          which values a chart has, and the command that installs it
plugin        NVIDIA's device plugin with GPU feature discovery
sharing       the plugin's configurations: time slicing, MPS, MIG
node_health   a node condition and a taint for sick GPUs; `health_agent` is the program that sets them
monitoring    dcgm-exporter, recording rules, alerts, dashboard
queue         Kueue with a queue for each team
runners       GitHub Actions runners

Each add-on has `files(settings)`, its files by path, and `install(settings)`, the shell commands that install
them from their folder.
"""
