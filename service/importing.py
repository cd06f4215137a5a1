"""The process that checks an uploaded file and stores its good rows, so that the web workers go on answering."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tilewise.data.home import home_dir
from tilewise.errors import InvalidProfileError, TilewiseError
from tilewise.service.processes import be_nice, die_with_parent, module_command
from tilewise.service.settings import Settings

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the share of it or the file is full


class ImportStoppedError(TilewiseError, RuntimeError):
    """The check of an upload was cut off. Nothing is lost that was accepted; the same file may be sent again."""


class Importer:
    """Starts a process for each upload, at most `settings.max_uploads` at once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(settings.max_uploads, "uploads")

    async def run(self, path: Path, options: dict[str, Any]) -> dict[str, Any]:
        """What became of an uploaded file's rows, as `ImportReport.to_dict`.

        Raises InvalidProfileError where the file as a whole cannot be read, ImportStoppedError where its process was
        killed or the service stops before it was, OSError where the disk is full, and RuntimeError where the process
        failed; the log has its traceback.
        """
        settings = self._settings
        options = {**options, "most_rows": settings.max_upload_rows, "nice": settings.job_nice}
        command = module_command("tilewise.service.importing", str(path), str(os.getpid()), json.dumps(options))
        env = {**os.environ, "TILEWISE_HOME": str(settings.home), "OMP_NUM_THREADS": "1"}
        started: list[subprocess.Popen[bytes]] = []

        def work() -> bytes:
            with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
                started.append(process)
                out, _ = process.communicate()
            if process.returncode < 0:  # by a signal
                raise ImportStoppedError(f"the check of the file was cut off ({process.returncode}): send it again")
            if process.returncode:
                raise RuntimeError(f"the check of a file failed ({process.returncode}): see the traceback above")
            return out

        try:
            answer: dict[str, Any] = json.loads(await asyncio.get_running_loop().run_in_executor(self._threads, work))
        except asyncio.CancelledError:  # the service stops, and has waited as long as it does
            for process in started:
                process.kill()
            raise ImportStoppedError("the service stops: send the file again") from None
        if "refused" in answer:
            raise InvalidProfileError(answer["refused"])
        if "no_room" in answer:
            raise OSError(answer["no_room"], os.strerror(answer["no_room"]))
        return answer


def import_here(path: Path, home: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The same in this process."""
    from tilewise.data.store import import_file

    check_rows(path, options["most_rows"])
    return import_file(path, home, defaults=options["defaults"]).to_dict()


def check_rows(path: Path, most: int) -> None:
    """Refuse a file with more rows than are taken, before any is read."""
    with path.open("rb") as file:
        if file.read(4) != b"PAR1":
            file.seek(0)
            rows = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
        else:
            from tilewise.data.convert import require_pyarrow

            pa, pq = require_pyarrow()
            try:
                rows = pq.read_metadata(path).num_rows
            except (pa.ArrowException, OSError, ValueError) as error:
                raise InvalidProfileError(f"the file is not Parquet that can be read: {error}") from error
    if rows > most:
        raise InvalidProfileError(f"a file must have at most {most} rows, got {rows}")


def main() -> int:
    """Import the file that the arguments name, and print the report as JSON."""
    path, parent, options = sys.argv[1:]
    die_with_parent(int(parent), signal.SIGKILL)
    told = json.loads(options)
    be_nice(told["nice"])
    try:
        answer = import_here(Path(path), home_dir(), told)
    except TilewiseError as error:
        # The path is ours, and nobody else's business.
        answer = {"refused": str(error).replace(path, "the file")}
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        answer = {"no_room": error.errno}
    sys.stdout.write(json.dumps(answer))
    return 0
