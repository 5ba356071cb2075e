"""Results of a run that may be killed: one JSON file per finished unit of work, written whole or not at all."""

import json
import os
from pathlib import Path

from ..ops.checks import refuse


def write_json(path: Path, value) -> None:
    write_whole(path, json.dumps(value, indent=1).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write through a temporary file beside `path`, synced, then renamed: a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path):
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        refuse("store", str(path), "hold JSON (delete it to compute it again)", error)


class Store:
    """The units of one run in a folder; a rerun with the same settings computes only what is missing.

    Args:
        folder: made if it does not exist.
        settings: what the results depend on, as JSON values.

    Raises:
        ValueError: the folder holds a run of other settings.
    """

    def __init__(self, folder, settings: dict):
        self.folder = Path(folder)
        try:
            (self.folder / "units").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refuse("store", "folder", "be a folder to write to", error)
        path = self.folder / "settings.json"
        settings = json.loads(json.dumps(settings))
        if path.exists():
            self._compare(read_json(path), settings)
        else:
            write_json(path, settings)

    def _compare(self, found: dict, settings: dict) -> None:
        other = [k for k in sorted({*found, *settings}) if found.get(k) != settings.get(k)]
        if other:
            requirement = f"be empty or hold a run of the same settings ({self.folder})"
            refuse("store", "folder", requirement, f"another {', '.join(other)}")

    def unit(self, name: str, compute):
        """The unit's result: read if it is finished, else `compute()`d and stored."""
        path = self.folder / "units" / f"{name}.json"
        if not path.exists():
            write_json(path, compute())
        return read_json(path)
