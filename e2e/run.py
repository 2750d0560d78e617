#!/usr/bin/env python3
"""Run the end-to-end cases: on the test cluster (made and removed here), or on the cluster given by KUBECONFIG.

python e2e/run.py                       all cases on IPv4, then the happy path on an IPv6-only cluster
python e2e/run.py --smoke               only the cases of CI, IPv4
python e2e/run.py --keep                leave the cluster running afterwards
KUBECONFIG=... python e2e/run.py        against your own cluster (see e2e/README.md)
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "e2e" / "cluster"))

from testcluster import addons, images, lifecycle, product  # noqa: E402
from testcluster.archive import file_digest  # noqa: E402
from testcluster.config import JOB_NAMESPACE, OPERATOR_NAMESPACE, ClusterConfig, IPFamily, cluster_config  # noqa: E402
from testcluster.errors import ClusterError  # noqa: E402
from testcluster.toolchain import say, tools_dir  # noqa: E402

LOGS = REPO / "e2e" / "logs"
HELM_DEADLINE_SECONDS = 240
CASES_DEADLINE_SECONDS = 3600


def install_chart(config: ClusterConfig, image: str, image_digest: str) -> None:
    """`helm upgrade --install` of the real chart with the image built from the real Dockerfile.

    The digest in the pods' annotations rolls them when the image behind the fixed tag changed.
    """
    repository, tag = image.rsplit(":", 1)
    registry, repository = repository.split("/", 1)
    values = {
        "image.registry": registry,
        "image.repository": repository,
        "image.tag": tag,
        "image.pullPolicy": "Never",
        "fullnameOverride": "rljob",
        "podAnnotations.e2e-image-digest": image_digest[:12],
        # Two cores carry the control plane and the training: the API server may be silent for longer than the default
        # renew deadline of 10 s, and a leader that loses its Lease restarts with the kubelet's growing delay.
        "extraArgs[0]": "--lease-seconds=60",
        "extraArgs[1]": "--lease-renew-deadline-seconds=40",
    }
    settings = [
        word
        for key, value in values.items()
        for word in ("--set-string" if "Annot" in key else "--set", f"{key}={value}")
    ]
    home = config.run_dir / "helm"
    environment = os.environ | {f"HELM_{kind}_HOME": str(home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
    command = [
        *(str(tools_dir() / "helm"), "upgrade", "--install", "rljob", str(REPO / "charts" / "rljob")),
        *("--kubeconfig", str(config.kubeconfig), "--namespace", OPERATOR_NAMESPACE, *settings),
        *("--wait", "--timeout", f"{HELM_DEADLINE_SECONDS}s"),
    ]
    subprocess.run(command, check=True, env=environment, timeout=HELM_DEADLINE_SECONDS + 60)


def run_cases(environment: dict[str, str], arguments: list[str]) -> int:
    """pytest over e2e/cases; returns its exit code."""
    flags = ("-v", "-s", "--timeout=1500", "--durations=0")
    command = [sys.executable, "-m", "pytest", *flags, *arguments, str(REPO / "e2e" / "cases")]
    return subprocess.run(
        command, cwd=REPO, env=os.environ | environment, timeout=CASES_DEADLINE_SECONDS, check=False
    ).returncode


def run_on_test_cluster(family: IPFamily, arguments: list[str], *, keep: bool) -> int:
    """Make the cluster, install the operator, run the cases, keep logs of a failure, remove the cluster."""
    config = cluster_config(family)
    start = time.monotonic()
    code = 1
    try:
        lifecycle.up(config)
        addons.ensure_volume(config)
        image = product.ensure_operator_image(config)
        install_chart(config, image, file_digest(images.images_dir() / "operator.tar"))
        say(f"operator installed on {config.name} ({time.monotonic() - start:.0f} s since start)")
        environment = {
            "KUBECONFIG": str(config.kubeconfig),
            "RLJOB_E2E_KUBECTL": str(tools_dir() / "kubectl"),
            "RLJOB_E2E_NAMESPACE": JOB_NAMESPACE,
            "RLJOB_E2E_IMAGE": images.RAY_IMAGE,
            "RLJOB_E2E_IMAGE_PULL_POLICY": "Never",
            "RLJOB_E2E_CLAIM": addons.CHECKPOINT_CLAIM,
            "RLJOB_E2E_SITE_PACKAGES": str(images.site_packages_dir()),
            "RLJOB_E2E_SOURCE": str(REPO),
            "RLJOB_E2E_AUDIT_LOG": str(config.audit_log),
            "RLJOB_E2E_LOGS": str(LOGS / family.value),
        }
        code = run_cases(environment, arguments)
    finally:
        if code:
            lifecycle.collect_logs(config, LOGS / family.value / "cluster")
            say(f"logs are in {LOGS / family.value}")
        if not keep:
            lifecycle.down(config)
    say(f"{family.value}: {'passed' if code == 0 else 'FAILED'} in {time.monotonic() - start:.0f} s")
    return code


def _stop(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    # In the background a shell ignores SIGINT, and CI ends what is late with SIGTERM: both must remove the cluster.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="only the cases of CI")
    parser.add_argument("--keep", action="store_true", help="leave the cluster running")
    parser.add_argument("--ip-family", choices=[family.value for family in IPFamily], action="append")
    parser.add_argument("-k", dest="expression", help="pytest -k")
    options = parser.parse_args()
    arguments = ["-k", options.expression] if options.expression else []
    if os.environ.get("KUBECONFIG"):
        return run_cases({}, [*arguments, *(["-m", "smoke"] if options.smoke else [])])
    families = options.ip_family or (["IPv4"] if options.smoke else ["IPv4", "IPv6"])
    try:
        for family in families:
            # The other cases do not depend on the family: IPv6 repeats the path from apply to a checkpoint.
            marks = ["-m", "smoke"] if options.smoke or (family == "IPv6" and not options.ip_family) else []
            if run_on_test_cluster(IPFamily(family), [*arguments, *marks], keep=options.keep):
                return 1
    except (ClusterError, subprocess.SubprocessError) as error:
        print(f"e2e: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
