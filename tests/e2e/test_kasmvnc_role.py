"""The role kasmvnc on a booted machine: fetched by its checksum, and a desktop that loopback alone reaches.

What stands in: KasmVNC's package, under the real one's name and with its commands, and the session. The
server refuses to start as the real one does (kasmtech/KasmVNC, unix/vncserver): without a user, or with
somebody's lock on its display.
"""

import pytest

from tests.support.harness import Node

pytestmark = pytest.mark.e2e

PLAYBOOK = """\
- name: A role
  hosts: all
  become: true
  gather_subset: [min]
  tasks:
    - name: What an image gets
      ansible.builtin.include_role: {name: kasmvnc, tasks_from: install}
"""
SERVER = """\
#!/usr/bin/python3
import http.server, os, subprocess, sys, threading
args = sys.argv[1:]
assert args.pop(0) == ":1" and "-fg" in args, args
option = lambda name: args[args.index(name) + 1]
if not os.path.exists(os.path.expanduser("~/.kasmpasswd")):
    sys.exit("No users configured and prompting is prohitibed, exiting.")
if os.path.exists("/tmp/.X1-lock"):
    sys.exit("A VNC server is already running as :1")
open("/tmp/.X1-lock", "w").write("%10d\\n" % os.getpid())
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(401)
        self.end_headers()
address = (option("-interface"), int(option("-websocketPort")))
threading.Thread(target=http.server.HTTPServer(address, Handler).serve_forever, daemon=True).start()
subprocess.call([option("-xstartup")], env={**os.environ, "DISPLAY": ":1"})
os.unlink("/tmp/.X1-lock")
"""
USERS = """\
#!/bin/sh
# kasmvncpasswd -u USER -w -r FILE: twice the same of six characters or more, else nothing is written
read -r one && read -r two || exit 1
[ "$one" = "$two" ] && [ ${#one} -ge 6 ] && [ "$1" = -u ] || exit 1
echo "$2:hash:wr" >"$5"
"""
BUILD = """\
set -e
mkdir -p /srv/deb/DEBIAN /srv/deb/usr/bin /srv/deb/etc/kasmvnc
cd /srv
install -m 755 server deb/usr/bin/kasmvncserver
install -m 755 passwd deb/usr/bin/kasmvncpasswd
printf '#!/bin/sh\\nexec sleep infinity\\n' >deb/usr/bin/startxfce4
chmod 755 deb/usr/bin/startxfce4
echo '# what comes with it' >deb/etc/kasmvnc/kasmvnc.yaml
echo /etc/kasmvnc/kasmvnc.yaml >deb/DEBIAN/conffiles
cat >deb/DEBIAN/control <<END
Package: kasmvncserver
Version: 1.5.0-1
Architecture: all
Depends: python3
Maintainer: a test <test@example.com>
Description: stand-in for KasmVNC
END
dpkg-deb --build deb www.deb
mkdir -p www && mv www.deb www/kasmvncserver.deb
systemd-run --quiet --unit=www python3 -m http.server --bind 127.0.0.1 --directory /srv/www 8099
sha256sum www/kasmvncserver.deb
"""
URL = "http://127.0.0.1:8099/kasmvncserver.deb"
ASKS = (
    "import urllib.request, urllib.error\n"
    "try: urllib.request.urlopen('http://127.0.0.1:6800/', timeout=5)\n"
    "except urllib.error.HTTPError as error: print(error.code)\n"
)
STATE = "dpkg -l | wc -l; ls /etc/systemd/system /usr/local/lib /var/tmp"


@pytest.fixture(scope="module")
def node(here, key, tmp_path_factory):
    with Node(here, key, tmp_path_factory.mktemp("kasmvnc")) as made:
        made.write("/srv/server", SERVER)
        made.write("/srv/passwd", USERS)
        made.write("/srv/build", BUILD)
        made.write("/srv/asks", ASKS)
        digest = made.read("sudo bash /srv/build").split()[-2]
        made.kasmvnc = {
            "kasmvnc_url": URL,
            "kasmvnc_sha256": digest,
            "kasmvnc_desktop_packages": ["dbus"],
        }
        yield made


def test_nothing_is_installed_with_a_wrong_checksum(node):
    before = node.read(STATE)
    wrong = {**node.kasmvnc, "kasmvnc_sha256": "0" * 64}
    assert "did not match" in node.refused(PLAYBOOK, **wrong)
    assert node.read(STATE) == before


@pytest.mark.parametrize("missing", ["kasmvnc_sha256", "kasmvnc_url"])
def test_nothing_is_fetched_without_a_checksum(node, missing):
    said = node.refused(PLAYBOOK, **{**node.kasmvnc, missing: ""})
    assert "Nothing is fetched without a checksum" in said


def test_check_mode_says_what_it_would_do(node):
    before = node.read(STATE)
    done = node.play(PLAYBOOK, "--check", **node.kasmvnc)
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"+kasmvncserver 1.5.0 of {URL}" in done.stdout
    assert node.read(STATE) == before


def test_a_desktop_that_loopback_alone_reaches(node):
    node.converge(PLAYBOOK, **node.kasmvnc)
    assert "kasmvnc" not in node.read("ls /etc/systemd/system/multi-user.target.wants")
    user = node.read("id -un").strip()
    unit = f"kasmvnc@{user}.service"
    # The lock of one that died does not keep it from starting.
    node.read("echo '   4000000' > /tmp/.X1-lock")
    node.read(f"sudo systemctl enable --now {unit}")
    node.read("for i in $(seq 50); do ss -ltn | grep -q :6800 && exit; sleep 0.2; done; exit 1")
    assert node.read("ss -Hltn 'sport = :6800'").split()[3] == "127.0.0.1:6800"
    assert node.read("python3 /srv/asks").strip() == "401"
    assert len(node.read("cat ~/.vnc/password").strip()) == 24
    assert node.read("stat -c %a ~/.vnc/password ~/.kasmpasswd").split() == ["600", "600"]
    assert "startxfce4" in node.read("cat /usr/local/lib/gpukiln/kasmvnc-session")

    password = node.read("cat ~/.vnc/password")
    node.read(f"sudo systemctl restart {unit} && sleep 1 && systemctl is-active {unit}")
    assert node.read("cat ~/.vnc/password") == password
