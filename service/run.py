"""`tilewise serve`: the sockets, the worker processes, and the process that runs jobs."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import signal
import ssl
import sys
from collections.abc import Iterable, Iterator

from fastapi import FastAPI

from tilewise.kernels.arch import get_arch
from tilewise.service import metrics
from tilewise.service.app import create_app
from tilewise.service.catalogue import Catalogue, CatalogueError
from tilewise.service.files import clear_left, reconcile
from tilewise.service.listen import adopt, is_loopback, listen
from tilewise.service.logs import log_config
from tilewise.service.processes import Kept, die_with_parent, module_command
from tilewise.service.settings import SettingError, Settings

SETTINGS = "TILEWISE_SERVICE"  # variable that hands the arguments to worker processes
GRACE_S = 10
RESERVED_FILES = 128  # of a process, for other things than connections
SWITCH_INTERVAL_S = 0.001

_log = logging.getLogger("tilewise.service")


def app_from_environment() -> FastAPI:
    """The app as `serve` describes it to the processes that it starts."""
    given = json.loads(os.environ[SETTINGS])
    if given["parent"] != os.getpid():
        die_with_parent(given["parent"])
    # Threads check uploads' bytes and answer batches: they must not keep the loop waiting for 5 ms each time.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    settings = Settings.from_env()
    limit_connections(settings)
    hosts = None if given["hosts"] is None else frozenset(given["hosts"])
    return create_app(
        settings=settings, arch_names=given["arch_names"] or None, tokens_needed=given["tokens_needed"], hosts=hosts
    )


def limit_connections(settings: Settings) -> None:
    """Bound the connections of this process by the settings, and by the files that it may open."""
    from tilewise.service.protocol import Protocol

    Protocol.header_timeout_s = settings.header_timeout_s
    Protocol.max_connections = settings.max_connections
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = settings.max_connections + RESERVED_FILES
        if soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        Protocol.max_connections = max(8, min(settings.max_connections, soft - RESERVED_FILES))


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    arch_names: Iterable[str] = (),
    workers: int = 1,
    home: str | os.PathLike[str] | None = None,
    log_level: str = "info",
    fd: int | None = None,
    tls_certificate: str | None = None,
    tls_key: str | None = None,
) -> None:
    """Run the service until it is stopped. `arch_names` empty is every known GPU; `fd` is an open socket to serve on.

    Raises OSError where the address or the socket cannot be listened on, SettingError for a variable that is none and
    for a certificate that cannot be used.
    """
    import uvicorn
    from uvicorn.supervisors import Multiprocess

    settings = Settings.from_env(home=home)
    check_certificate(tls_certificate, tls_key)
    names = [get_arch(name).name for name in arch_names]  # a wrong one is refused here, not in each worker
    listeners = listen(host, port) if fd is None else [adopt(fd)]
    addresses = [one.getsockname() for one in listeners]
    host, port = host if fd is None else addresses[0][0], addresses[0][1]
    alone = all(is_loopback(address[0]) for address in addresses)
    needed = settings.auth == "on" or (settings.auth == "auto" and not alone)
    # On loopback, pages of other hosts are kept out by the names that they must use.
    hosts = ["localhost", "127.0.0.1", "::1", *(address[0] for address in addresses)] if alone else None
    os.environ["TILEWISE_HOME"] = str(settings.home)
    os.environ[SETTINGS] = json.dumps(
        {"arch_names": names, "tokens_needed": needed, "hosts": hosts, "parent": os.getpid()}
    )
    config = uvicorn.Config(
        "tilewise.server:app_from_environment",
        factory=True,
        host=host,
        port=port,
        workers=workers,
        log_level=log_level,
        log_config=log_config(settings.log_format, log_level),
        access_log=False,
        server_header=False,
        http="tilewise.service.protocol:Protocol",
        ws="none",
        ssl_certfile=tls_certificate,
        ssl_keyfile=tls_key,
        timeout_graceful_shutdown=GRACE_S,
    )
    if not alone and not needed:
        _log.warning("%s is no loopback address, and TILEWISE_AUTH is off: whoever reaches it may do everything", host)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    scheme = "http" if tls_certificate is None else "https"
    with _beside(settings):
        _log.info("Serving on %s://%s (Press CTRL+C to quit)", scheme, address)
        server = uvicorn.Server(config)
        if workers == 1:
            config.load_app()
            server.run(sockets=listeners)
            if not server.started:
                sys.exit(1)
            return
        wanted = inspect.signature(Multiprocess).parameters  # older versions of uvicorn are given the target
        Multiprocess(config, sockets=listeners, **({"target": server.run} if "target" in wanted else {})).run()


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Raise SettingError where HTTPS cannot be served with these files; uvicorn would say so late, and not which."""
    if certificate is None:
        if key is not None:
            raise SettingError(f"--tls-key {key} needs --tls-certificate")
        return
    for option, path in (("--tls-certificate", certificate), ("--tls-key", key)):
        try:
            if path is not None:
                open(path, "rb").close()
        except OSError as error:
            raise SettingError(f"{option} {path} cannot be read: {error.strerror}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        given = f"--tls-certificate {certificate}" + (f" with --tls-key {key}" if key else "")
        raise SettingError(f"{given} cannot be used: {error}") from error


@contextlib.contextmanager
def _beside(settings: Settings) -> Iterator[None]:
    """What runs beside the workers: the folder of their counts, and the process that runs jobs."""
    # uvicorn sends a signal that it has dealt with once more when it is done, and the default would end us here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    tidy(settings)
    forget_metrics = metrics.prepare()
    runner = None
    if settings.jobs:
        command = module_command("tilewise.service.runner", str(os.getpid()))
        runner = Kept(command, os.environ, lambda text: _log.warning("jobs: %s", text))
    try:
        yield
    finally:
        if runner is not None:
            runner.stop(GRACE_S)
        forget_metrics()


def tidy(settings: Settings) -> None:
    """Bring the catalogue up to date and in line with the files, and remove what killed processes left.

    Where the catalogue does not answer, that is logged: selections need none.
    """
    catalogue = Catalogue(settings.url)
    try:
        reconcile(catalogue, settings.home)
        clear_left(catalogue, settings.home)
    except CatalogueError as error:
        _log.warning("%s; selections are answered all the same", error)
    except OSError as error:
        _log.warning("%s cannot be tidied up: %s", settings.home, error)
    finally:
        catalogue.dispose()
