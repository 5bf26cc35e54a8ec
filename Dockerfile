# Headgate: API, controller and command line in one image.
#
#   docker build -t headgate:0.2.0 .
#
# The digest is that of the index for all architectures.
ARG PYTHON=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# The environment has no pip of its own: nothing can be installed into it later.
RUN ["python", "-m", "venv", "--without-pip", "/opt/headgate"]
# Exactly the packages that were tested, those for traces (HEADGATE_OTEL) among them, by their hashes; a layer of its
# own, since they change seldom.
COPY .ci/image.lock .ci/
RUN ["pip", "--python", "/opt/headgate", "install", "--require-hashes", "--only-binary", ":all:", "-r", ".ci/image.lock"]
COPY pyproject.toml README.md LICENSE ./
COPY lua lua
COPY api api
COPY headgate headgate
COPY limiter limiter
RUN ["pip", "--python", "/opt/headgate", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "/wheel", "."]
RUN ["pip", "--python", "/opt/headgate", "install", "--no-deps", "--no-index", "--find-links", "/wheel", "headgate"]
# What only building needed.
RUN ["pip", "--python", "/opt/headgate", "uninstall", "--yes", "editables", "hatchling"]
RUN ["install", "--directory", "--owner", "10001", "--group", "10001", "/var/lib/headgate"]

FROM ${PYTHON}
LABEL org.opencontainers.image.title="Headgate" \
      org.opencontainers.image.description="A distributed, work-based rate limiter and overload controller on Redis" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/headgate /opt/headgate
COPY --from=build --chown=10001:10001 /var/lib/headgate /var/lib/headgate
# Reachable from outside the container, which is why the API asks for HEADGATE_API_KEYS.
ENV PATH=/opt/headgate/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HEADGATE_HOST=0.0.0.0 \
    HEADGATE_DATA_DIR=/var/lib/headgate
# By number, so that Kubernetes can tell that it is not root.
USER 10001:10001
WORKDIR /var/lib/headgate
EXPOSE 8080
# Of the API, by its own settings (HEADGATE_PORT, HEADGATE_TLS_…); a container with the controller is started with
# --no-healthcheck. Kubernetes has probes of its own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["python", "-m", "limiter.cli.liveness"]
ENTRYPOINT ["headgate"]
CMD ["api"]
