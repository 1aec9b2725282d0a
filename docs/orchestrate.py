"""Run one federation over the REST API with nothing but httpx: create, invite devices, watch, export.

python orchestrate.py http://127.0.0.1:8750 coordinator/operator-token my-bundle/ state.safetensors
"""

import json
import sys
from pathlib import Path

import httpx

url, token_file, bundle, output = sys.argv[1:]
token = Path(token_file).read_text().strip()
http = httpx.Client(base_url=f"{url}/v1", headers={"Authorization": f"Bearer {token}"}, timeout=60, trust_env=False)


def ask(method: str, path: str, **body):
    answer = http.request(method, path, **body)
    if answer.is_error:  # every error is a problem that says what to do
        sys.exit(answer.json()["detail"])
    return answer


made = ask("POST", "/bundles", content=Path(bundle, "manifest.json").read_bytes()).json()
for part in made["missing"]:
    ask("PUT", f"/bundles/{made['digest']}/parts/{part}", content=Path(bundle, part).read_bytes())
settings = {"name": "night", "bundle": made["digest"], "method": {"name": "lattice"}, "rounds": 3, "cohort": 2}
ask("POST", "/federations", json={**settings, "min_devices": 2})
print("join token:", ask("POST", "/federations/night/tokens", json={"uses": 2}).json()["token"], flush=True)
with http.stream("GET", "/federations/night/events", timeout=None) as stream:
    for line in stream.iter_lines():
        said = json.loads(line[len("data: ") :]) if line.startswith("data: ") else {}
        if said.get("kind") == "round_closed":
            record = ask("GET", f"/federations/night/rounds/{said['round']}").json()
            print(f"round {said['round']}: score {record['score_after']['mean']:.3f}", flush=True)
        if said.get("phase") in ("finished", "stopped", "paused"):
            break
Path(output).write_bytes(ask("GET", "/federations/night/state").content)
