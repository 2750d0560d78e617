"""Certificates, tokens and kubeconfigs of one cluster, made by the openssl program."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from testcluster.config import CLUSTER_DOMAIN, NODE_NAME, ClusterConfig
from testcluster.shell import run

# User and groups of each client. Each has its own name, so that the audit log tells who wrote what.
CLIENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "admin": ("rljob-e2e:admin", ("system:masters",)),
    "kube-controller-manager": ("system:kube-controller-manager", ()),
    "kube-scheduler": ("system:kube-scheduler", ()),
    "kube-proxy": ("system:kube-proxy", ()),
    "kubelet": (f"system:node:{NODE_NAME}", ("system:nodes",)),
    "kuberay-operator": ("rljob-e2e:kuberay-operator", ("system:masters",)),
    "coredns": ("rljob-e2e:coredns", ("system:masters",)),
}
_VALID_DAYS = "3650"


def _subject_alternative_names(config: ClusterConfig) -> str:
    names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    names.append(f"kubernetes.default.svc.{CLUSTER_DOMAIN}")
    addresses = [config.addresses.node, config.addresses.loopback, config.addresses.kubernetes_service]
    return ",".join([*(f"DNS:{name}" for name in names), *(f"IP:{address}" for address in addresses)])


def _certificate(folder: Path, name: str, subject: str, usage: str, alternative_names: str | None = None) -> None:
    """A key and a certificate signed by the folder's CA: ``<name>.key``, ``<name>.crt``."""
    key, request, certificate = (folder / f"{name}.{end}" for end in ("key", "csr", "crt"))
    run(["openssl", "req", "-new", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request, "-subj", subject])
    extensions = [
        "basicConstraints=critical,CA:FALSE",
        "keyUsage=critical,digitalSignature,keyEncipherment",
        f"extendedKeyUsage={usage}",
        "authorityKeyIdentifier=keyid",
        "subjectKeyIdentifier=hash",
        *([f"subjectAltName={alternative_names}"] if alternative_names else []),
    ]
    extension_file = folder / f"{name}.ext"
    extension_file.write_text("\n".join(extensions) + "\n")
    signed_by = ["-CA", f"{folder}/ca.crt", "-CAkey", f"{folder}/ca.key", "-CAcreateserial"]
    form = ["-days", _VALID_DAYS, "-extfile", f"{extension_file}", "-out", f"{certificate}"]
    run(["openssl", "x509", "-req", "-in", f"{request}", *signed_by, *form])
    request.unlink()
    extension_file.unlink()


def kubeconfig(config: ClusterConfig, client: str, token: str) -> str:
    """A kubeconfig document (JSON, which is YAML) for ``client``."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": config.name,
                    "cluster": {
                        "server": config.server_url,
                        "certificate-authority": str(config.pki_dir / "ca.crt"),
                    },
                }
            ],
            "users": [{"name": client, "user": {"token": token}}],
            "contexts": [{"name": config.name, "context": {"cluster": config.name, "user": client}}],
            "current-context": config.name,
        },
        indent=1,
    )


def client_kubeconfig(config: ClusterConfig, client: str) -> Path:
    """Where the kubeconfig of one of ``CLIENTS`` is."""
    return config.kubeconfig if client == "admin" else config.pki_dir / f"{client}.kubeconfig"


def ensure_pki(config: ClusterConfig) -> None:
    """Make the certificate authority, certificates, tokens and kubeconfigs once; ``complete`` marks the end."""
    folder = config.pki_dir
    complete = folder / "complete"
    if complete.exists():
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ca = ["-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.crt", "-days", _VALID_DAYS]
    subject = ["-subj", f"/CN={config.name}"]
    # keyUsage is spelled out: Python 3.13 and later refuse a CA certificate without it.
    usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"]
    run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *ca, *subject, *usage])
    _certificate(folder, "apiserver", "/CN=kube-apiserver", "serverAuth", _subject_alternative_names(config))
    _certificate(folder, "kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", "clientAuth")
    _certificate(folder, "front-proxy-client", "/CN=front-proxy-client", "clientAuth")
    run(["openssl", "genrsa", "-out", folder / "service-account.key", "2048"])
    lines = []
    for client, (user, groups) in CLIENTS.items():
        token = secrets.token_hex(24)
        lines.append(",".join([token, user, user, *([f'"{",".join(groups)}"'] if groups else [])]))
        path = client_kubeconfig(config, client)
        path.write_text(kubeconfig(config, client, token))
        path.chmod(0o600)
    tokens = folder / "tokens.csv"
    tokens.write_text("\n".join(lines) + "\n")
    tokens.chmod(0o600)
    complete.touch()
