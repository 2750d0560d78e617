"""`helm test`: the API server knows RLJob (dry run), refuses a misspelt field, and the operator serves metrics."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
DEADLINE_SECONDS = 120
JOB = {
    "apiVersion": "rljob.io/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "helm-test"},
    "spec": {
        "algorithm": {"type": "GRPO"},
        "model": {"source": "/models/none"},
        "data": {"train": ["/data/none.jsonl"]},
        "reward": {"functions": [{"type": "GSM8K"}]},
        "training": {"totalSteps": 1},
        "checkpoint": {"storage": {"claimName": "none"}},
        "cluster": {"nodes": 1, "gpusPerNode": 1},
    },
}


def create_dry_run(job: dict) -> tuple[int, str]:
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    address = f"[{host}]" if ":" in host else host
    url = (
        f"https://{address}:{os.environ['KUBERNETES_SERVICE_PORT']}/apis/rljob.io/v1alpha1/namespaces/"
        f"{os.environ['NAMESPACE']}/rljobs?dryRun=All&fieldValidation=Strict"
    )
    with open(f"{ACCOUNT}/token") as file:
        token = file.read()
    request = urllib.request.Request(
        url,
        data=json.dumps(job).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(
            request, timeout=10, context=ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
        ) as response:
            return response.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def fetch_metrics(url: str) -> str:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return response.read().decode()
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"FAIL no metrics from {url} within {DEADLINE_SECONDS} s: {error}")
            time.sleep(2)


status, body = create_dry_run(JOB)
if status != 201:
    sys.exit(f"FAIL the API server refused a valid RLJob ({status}): {body}")
print("ok   the API server accepts an RLJob")

misspelt = {**JOB, "spec": {**JOB["spec"], "trainning": {}}}
status, body = create_dry_run(misspelt)
if status != 400 or "trainning" not in body:
    sys.exit(f"FAIL the API server did not name the unknown field spec.trainning ({status}): {body}")
print("ok   the API server names an unknown field")

if url := os.environ.get("METRICS_URL"):
    if "rljob_operator_" not in fetch_metrics(url):
        sys.exit(f"FAIL {url} has no rljob_operator_ metric")
    print("ok   the operator serves metrics")
