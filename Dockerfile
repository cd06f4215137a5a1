# The service, as an unprivileged user. All that it keeps is in /data.
FROM python:3.12-slim AS build
COPY . /src
RUN python -m venv /venv && /venv/bin/pip install --no-cache-dir '/src[train,server,postgresql]'

FROM python:3.12-slim
RUN useradd --system --uid 10001 --home-dir /data --create-home tilewise
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH TILEWISE_HOME=/data TILEWISE_LOG_FORMAT=json
USER tilewise
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
# Reached from outside the container, so that callers need tokens: docker exec ... tilewise token add NAME --scope admin
CMD ["tilewise", "serve", "--host", "0.0.0.0", "--workers", "2"]
