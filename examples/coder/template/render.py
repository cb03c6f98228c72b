"""Writes what Terraform's module needs, for `data "external"`.

Reads {"gpukiln", "contract", "folder"} from standard input, all of them texts, and answers {"rendered": PATH}
(Terraform, "External Data Source": JSON in, JSON out, and words of an error to standard error).
"""

import json
import subprocess
import sys
from pathlib import Path

query = json.load(sys.stdin)
folder = Path(query["folder"])
contract, rendered = folder / "contract.json", folder / "rendered.json"
contract.write_text(query["contract"])
command = [f"{query['gpukiln']}/scripts/run", "invoke", "workspace.render"]
command += ["--from", str(contract), "--to", "tfvars"]
done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
if done.returncode:
    sys.exit(f"{' '.join(command)} ended with {done.returncode}")
rendered.write_text(done.stdout)
print(json.dumps({"rendered": str(rendered)}))
