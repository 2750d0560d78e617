"""A real etcd + kube-apiserver for tests: schema, server-side apply, watches and conflicts are the genuine ones.

There are no controllers: nothing collects garbage, creates pods or schedules (`fake_kuberay` plays that part).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

_TOKEN: Final = "envtest-admin-token"
START_TIMEOUT_SECONDS: Final = 180.0
_REPOSITORY: Final = Path(__file__).resolve().parents[3]
_KUBERAY_CRD: Final = "ray.io_rayclusters.yaml"

# Metadata is enough to count writes; reads would only fill the disk.
_AUDIT_POLICY: Final = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  verbs: [create, update, patch, delete, deletecollection]
"""


class EnvtestUnavailableError(Exception):
    """A program or file that the test API server needs is missing; the message says where it was looked for."""


@dataclass
class Envtest:
    """A running API server."""

    kubeconfig: Path
    """Admin kubeconfig."""
    server: str
    """https://127.0.0.1:<port>"""
    token: str
    """Bearer token of the admin."""
    ca_path: Path
    """Certificate authority of the server."""
    audit_log: Path
    """JSON lines, one per write."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def stop(self) -> None:
        """Stop both processes, the API server first."""
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=15)
        self.processes.clear()

    def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """One synchronous API call; raises urllib.error.HTTPError. For test set-up, not for product code."""
        request = urllib.request.Request(
            self.server + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": content_type},
        )
        context = ssl.create_default_context(cafile=str(self.ca_path))
        try:
            with urllib.request.urlopen(request, timeout=60, context=context) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:  # the server's explanation is in the body
            error.msg = f"{error.msg}: {error.read().decode(errors='replace')[:4000]}"
            raise

    def count_writes(self, *, user_agent_prefix: str, namespace: str) -> Counter[tuple[str, str]]:
        """Writes the audit log holds, by (verb, resource/subresource), of one client in one namespace."""
        counts: Counter[tuple[str, str]] = Counter()
        for entry in self._read_audit_log(namespace):
            if entry.get("userAgent", "").startswith(user_agent_prefix):
                counts[entry["verb"], _describe_reference(entry["objectRef"])] += 1
        return counts

    def list_created(self, *, resource: str, namespace: str) -> list[str]:
        """Names of the objects that were ever created there, repetitions included."""
        return [
            entry["objectRef"].get("name", "")
            for entry in self._read_audit_log(namespace)
            if _describe_reference(entry["objectRef"]) == resource and entry["responseStatus"].get("code") == 201
        ]

    def _read_audit_log(self, namespace: str) -> Iterator[dict[str, Any]]:
        for line in self.audit_log.read_text().splitlines():
            if namespace not in line:
                continue  # most are of other tests
            entry = json.loads(line)
            if entry.get("objectRef", {}).get("namespace") == namespace and entry["stage"] == "ResponseComplete":
                yield entry


def find_free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def find_binaries() -> Path:
    """Folder with etcd and kube-apiserver: KUBEBUILDER_ASSETS, else the cache that `make test` fills.

    Raises EnvtestUnavailableError.
    """
    candidates = [Path(os.environ["KUBEBUILDER_ASSETS"])] if os.environ.get("KUBEBUILDER_ASSETS") else []
    candidates.append(_cache_dir() / "envtest")
    for folder in candidates:
        if all(os.access(folder / name, os.X_OK) for name in ("etcd", "kube-apiserver")):
            return folder
    looked_in = " or ".join(str(folder) for folder in candidates)
    raise EnvtestUnavailableError(
        f"no etcd and kube-apiserver in {looked_in}: run `python e2e/cluster/toolchain.py envtest` or set "
        "KUBEBUILDER_ASSETS"
    )


def find_kuberay_crd() -> Path:
    """KubeRay's RayCluster CRD: RLJOB_KUBERAY_CRDS (a folder), the cache, or the Go module cache.

    Raises EnvtestUnavailableError.
    """
    candidates: list[Path] = []
    if os.environ.get("RLJOB_KUBERAY_CRDS"):
        candidates.append(Path(os.environ["RLJOB_KUBERAY_CRDS"]))
    candidates += sorted(_cache_dir().glob("kuberay-crds-*"), reverse=True)
    candidates.append(_cache_dir() / "envtest" / "crds")
    module_cache = Path(
        os.environ.get("GOMODCACHE") or Path(os.environ.get("GOPATH") or Path.home() / "go") / "pkg/mod"
    )
    candidates += sorted((module_cache / "github.com/ray-project/kuberay").glob("ray-operator@v*/config/crd/bases"))
    for folder in candidates:
        if (folder / _KUBERAY_CRD).is_file():
            return folder / _KUBERAY_CRD
    raise EnvtestUnavailableError(
        f"no {_KUBERAY_CRD} in the cache or the Go module cache: run `python e2e/cluster/toolchain.py crds` or set "
        "RLJOB_KUBERAY_CRDS to a folder that holds it"
    )


def find_rljob_crd() -> Path:
    """The generated CRD of this project. Raises EnvtestUnavailableError."""
    path = _REPOSITORY / "crds" / "rljob.io_rljobs.yaml"
    if not path.is_file():
        raise EnvtestUnavailableError(f"no {path.name}: run `python -m rljob_api.crdgen`")
    return path


def start_envtest(work: Path) -> Envtest:
    """Start etcd and kube-apiserver on free loopback ports, their files in `work`, and wait until the server is ready.

    Raises EnvtestUnavailableError when a binary is missing, RuntimeError (with the log) when the server
    does not come up.
    """
    binaries = find_binaries()
    (work / "policy.yaml").write_text(_AUDIT_POLICY)
    (work / "tokens.csv").write_text(f'{_TOKEN},admin,admin,"system:masters"\n')
    subprocess.run(
        ["openssl", "genrsa", "-out", str(work / "service-account.key"), "2048"], check=True, capture_output=True
    )
    etcd_port, peer_port, api_port = find_free_port(), find_free_port(), find_free_port()
    environment = Envtest(
        kubeconfig=work / "kubeconfig",
        server=f"https://127.0.0.1:{api_port}",
        token=_TOKEN,
        ca_path=work / "certificates" / "apiserver.crt",
        audit_log=work / "audit.log",
    )
    try:
        environment.processes.append(_spawn(work / "etcd.log", _etcd_command(binaries, work, etcd_port, peer_port)))
        environment.processes.append(
            _spawn(work / "kube-apiserver.log", _apiserver_command(binaries, work, etcd_port, api_port))
        )
        _wait_until_ready(environment, work)
    except BaseException:
        environment.stop()
        raise
    environment.kubeconfig.write_text(yaml.safe_dump(_kubeconfig(environment)))
    return environment


def apply_crd(environment: Envtest, path: Path) -> None:
    """Server-side apply a CRD file and wait until the server serves it."""
    document = yaml.safe_load(path.read_text())
    name = document["metadata"]["name"]
    resource = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
    environment.request(
        "PATCH", f"{resource}?fieldManager=envtest&force=true", document, content_type="application/apply-patch+yaml"
    )

    def is_established() -> bool:
        conditions = environment.request("GET", resource).get("status", {}).get("conditions") or []
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    _wait_for(is_established, f"CRD {name} to be established")
    plural, group = name.split(".", 1)
    version = next(v["name"] for v in document["spec"]["versions"] if v["storage"])

    def is_served() -> bool:
        try:
            environment.request("GET", f"/apis/{group}/{version}/{plural}?limit=1")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return False
        return True

    _wait_for(is_served, f"{plural}.{group} to be served")


def _describe_reference(reference: dict[str, Any]) -> str:
    return "/".join(filter(None, (reference["resource"], reference.get("subresource"))))


def _cache_dir() -> Path:
    return Path(os.environ.get("RLJOB_CACHE") or Path.home() / ".cache" / "rljob") / "bin"


def _etcd_command(binaries: Path, work: Path, port: int, peer_port: int) -> list[str]:
    return [
        str(binaries / "etcd"),
        f"--data-dir={work / 'etcd'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls=http://127.0.0.1:{port}",
        f"--advertise-client-urls=http://127.0.0.1:{port}",
        f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peer_port}",
        f"--initial-cluster=default=http://127.0.0.1:{peer_port}",
        "--log-level=warn",
    ]


def _apiserver_command(binaries: Path, work: Path, etcd_port: int, port: int) -> list[str]:
    return [
        str(binaries / "kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        f"--cert-dir={work / 'certificates'}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--authorization-mode=RBAC",
        f"--token-auth-file={work / 'tokens.csv'}",
        f"--service-account-key-file={work / 'service-account.key'}",
        f"--service-account-signing-key-file={work / 'service-account.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        # No controller creates service accounts here, so admission would refuse every pod.
        "--disable-admission-plugins=ServiceAccount",
        f"--audit-policy-file={work / 'policy.yaml'}",
        f"--audit-log-path={work / 'audit.log'}",
        "--audit-log-mode=blocking",
        "--shutdown-delay-duration=0s",
    ]


def _spawn(log: Path, command: list[str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=_die_with_parent)


def _die_with_parent() -> None:
    """A killed test run must not leave an etcd behind (PR_SET_PDEATHSIG, Linux; elsewhere nothing is set)."""
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _kubeconfig(environment: Envtest) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "envtest",
                "cluster": {"server": environment.server, "certificate-authority": str(environment.ca_path)},
            }
        ],
        "users": [{"name": "admin", "user": {"token": environment.token}}],
        "contexts": [{"name": "envtest", "context": {"cluster": "envtest", "user": "admin", "namespace": "default"}}],
        "current-context": "envtest",
    }


def _wait_until_ready(environment: Envtest, work: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    last_error = "no answer yet"
    while time.monotonic() < deadline:
        for process, name in zip(environment.processes, ("etcd", "kube-apiserver"), strict=True):
            if process.poll() is not None:
                log = (work / f"{name}.log").read_text()[-4000:]
                raise RuntimeError(f"{name} exited with {process.returncode}: {log}")
        try:
            # The default namespace is made by a post-start hook a moment after the server answers.
            environment.request("GET", "/api/v1/namespaces/default")
            return
        except (urllib.error.URLError, OSError) as error:
            last_error = str(error)
        time.sleep(0.1)
    log = (work / "kube-apiserver.log").read_text()[-4000:]
    raise RuntimeError(f"kube-apiserver was not ready after {START_TIMEOUT_SECONDS:.0f} s ({last_error}): {log}")


def _wait_for(condition: Callable[[], bool], what: str, timeout_seconds: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {timeout_seconds:.0f} s for {what}")
        time.sleep(0.05)
