"""DCGM's packages under their real names: a host engine that waits, dcgmi that says what a file says, and an
exporter that serves figures when the engine runs."""

from tests.support.standin.packages import Package

ENGINE_UNIT = """\
[Unit]
Description=stand-in for NVIDIA's DCGM service
[Service]
ExecStart=/usr/bin/nv-hostengine -n --service-account nvidia-dcgm
[Install]
WantedBy=multi-user.target
"""
# The text of NVIDIA's, as far as a drop-in has to do with it.
EXPORTER_UNIT = """\
[Unit]
Description=stand-in for NVIDIA's DCGM exporter
Wants=nvidia-dcgm.service
After=nvidia-dcgm.service
[Service]
StandardOutput=append:/var/log/dcgm-exporter.log
ExecStart=/usr/bin/dcgm-exporter -f /etc/dcgm-exporter/default-counters.csv
[Install]
WantedBy=multi-user.target
"""
DCGMI = """\
#!/bin/sh
[ "$*" = "discovery -l" ] || exit 2
systemctl --quiet is-active nvidia-dcgm || { echo "Unable to connect to host engine."; exit 1; }
cat /srv/discovery
"""
EXPORTER = """\
#!/usr/bin/python3
import argparse, http.server
parser = argparse.ArgumentParser()
for name in ("--address", "--collectors", "--remote-hostengine-info"):
    parser.add_argument(name, required=True)
given = parser.parse_args()
host, _, port = given.address.rpartition(":")
class Figures(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(open(given.collectors).read().encode())
http.server.HTTPServer((host, int(port)), Figures).serve_forever()
"""


def dcgm(version: str, exporter: str, cuda: int = 12) -> list[Package]:
    """DCGM 4 and its exporter.

    Args:
        version: DCGM's full version, for example 1:4.6.1-1.
        cuda: Major version of CUDA.
    """
    name = "datacenter-gpu-manager-4"
    return [
        Package(
            f"{name}-core",
            version,
            conflicts=("datacenter-gpu-manager",),
            files={
                "/usr/bin/nv-hostengine": "#!/bin/sh\nexec sleep infinity\n",
                "/usr/bin/dcgmi": DCGMI,
                "/usr/lib/systemd/system/nvidia-dcgm.service": ENGINE_UNIT,
            },
        ),
        Package(f"{name}-cuda{cuda}", version, (f"{name}-core",)),
        Package(f"{name}-proprietary", version, (f"{name}-core",)),
        Package(f"{name}-proprietary-cuda{cuda}", version, (f"{name}-proprietary",)),
        Package(
            "datacenter-gpu-manager-exporter",
            exporter,
            (f"{name}-core",),
            files={
                "/usr/bin/dcgm-exporter": EXPORTER,
                "/etc/dcgm-exporter/default-counters.csv": "DCGM_FI_DEV_GPU_TEMP 30\n",
                "/usr/lib/systemd/system/nvidia-dcgm-exporter.service": EXPORTER_UNIT,
            },
        ),
    ]
