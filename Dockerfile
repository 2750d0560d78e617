# Two images from one file: `--target operator` and `--target trainer`.
# Any Debian-like base with Python 3.11 or newer works; the same base builds and runs, so the virtual environment fits.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# python:* images bring venv and pip; Debian's own Python keeps them in a package.
# hadolint ignore=DL3008
RUN python3 -c 'import ensurepip' 2>/dev/null \
 || { apt-get update && apt-get install --yes --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*; }
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/rljob
WORKDIR /src

FROM build AS build-operator
# The locked dependencies first: this layer changes only with the lock file.
COPY requirements/operator.txt requirements/
RUN /opt/rljob/bin/pip install --require-hashes --no-deps --requirement requirements/operator.txt
COPY pyproject.toml README.md LICENSE ./
COPY crds/rljob_api crds/rljob_api
COPY operator/rljob_operator operator/rljob_operator
COPY trainer/rljob_trainer trainer/rljob_trainer
# The build tools are locked like the rest, and stay out of the image.
RUN /opt/rljob/bin/pip install --no-deps --no-build-isolation --no-index . \
 && /opt/rljob/bin/pip uninstall --yes uv hatchling editables trove-classifiers pip setuptools

FROM build AS build-trainer
# Some of the trainer's dependencies come as source with C in it; the compiler stays in this stage.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && if [ "$(command -v python3)" = /usr/bin/python3 ]; then apt-get install --yes --no-install-recommends python3-dev; fi \
 && rm -rf /var/lib/apt/lists/*
COPY requirements/trainer.txt requirements/
RUN /opt/rljob/bin/pip install --require-hashes --no-deps --requirement requirements/trainer.txt
COPY pyproject.toml README.md LICENSE ./
COPY crds/rljob_api crds/rljob_api
COPY operator/rljob_operator operator/rljob_operator
COPY trainer/rljob_trainer trainer/rljob_trainer
RUN /opt/rljob/bin/pip install --no-deps --no-build-isolation --no-index . \
 && /opt/rljob/bin/pip uninstall --yes uv hatchling editables trove-classifiers

FROM ${BASE} AS operator
LABEL org.opencontainers.image.title="rljob-operator" \
      org.opencontainers.image.source="https://github.com/rljob/rljob" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build-operator /opt/rljob /opt/rljob
# The root file system is read-only in the cluster: nothing may be compiled or written there.
# kopf asks for the user's name, and no numeric user has an entry in /etc/passwd: USER answers for any of them.
ENV PATH=/opt/rljob/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=rljob
WORKDIR /tmp
USER 65532:65532
EXPOSE 8080 8081
ENTRYPOINT ["python", "-m", "rljob_operator"]

FROM ${BASE} AS trainer
LABEL org.opencontainers.image.title="rljob-trainer-native" \
      org.opencontainers.image.source="https://github.com/rljob/rljob" \
      org.opencontainers.image.licenses="Apache-2.0"
# KubeRay's probes call wget and bash; Ray and PyTorch look the user up by name.
# hadolint ignore=DL3008
RUN if ! command -v wget >/dev/null || ! command -v bash >/dev/null; then \
      apt-get update && apt-get install --yes --no-install-recommends wget bash ca-certificates && rm -rf /var/lib/apt/lists/*; \
    fi \
 && echo 'rljob:x:1000:1000:rljob:/home/rljob:/bin/bash' >>/etc/passwd \
 && echo 'rljob:x:1000:' >>/etc/group \
 && mkdir -p /home/rljob /var/lib/rljob && chown 1000:1000 /home/rljob /var/lib/rljob
COPY --from=build-trainer /opt/rljob /opt/rljob
ENV PATH=/opt/rljob/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 HOME=/home/rljob USER=rljob
WORKDIR /home/rljob
USER 1000:1000
# KubeRay replaces the command by `ray start`; the operator submits `python -m rljob_trainer` to that cluster.
ENTRYPOINT []
CMD ["python", "-m", "rljob_trainer"]
