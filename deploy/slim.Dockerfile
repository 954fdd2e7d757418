# The image of brokers, workers, Titanic and gateways; `Dockerfile` beside it is for Spark.  To build it, in the checkout:
#   docker build -f deploy/slim.Dockerfile -t registry.example/zmdp-slim .
FROM python:3.13-alpine AS build
RUN apk add --no-cache gcc musl-dev
COPY . /src
RUN python -m venv /opt/zmdp \
    && ZMDP_PURE=0 /opt/zmdp/bin/python -m pip install --no-cache-dir --no-compile '/src[web,postgres]' \
    && /opt/zmdp/bin/python -m pip uninstall --yes pip \
    && find /opt/zmdp -name '*.so*' -type f -exec strip --strip-unneeded {} + \
    && python -m compileall -q /opt/zmdp/lib

FROM python:3.13-alpine
COPY --from=build /opt/zmdp /opt/zmdp
ENV PATH=/opt/zmdp/bin:$PATH PYTHONDONTWRITEBYTECODE=1
RUN adduser -D -u 1000 zmdp
USER 1000
# Modules with handlers:
#   COPY yourpackage /opt/app/yourpackage
WORKDIR /opt/app
ENV PYTHONPATH=/opt/app
# The root file system may be read-only; /tmp must be writable for --http, and Titanic's folder with SQLite.
HEALTHCHECK --interval=10s --timeout=30s --start-period=60s CMD ["mdclient", "health"]
CMD ["mdclient"]
