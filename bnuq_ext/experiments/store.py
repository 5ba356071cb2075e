"""Results of a run that may be killed: one JSON file per finished unit of work,
written whole or not at all."""

import hashlib
import io
import json
import os
from pathlib import Path

from ..bank_file import replace_whole
from ..ops.checks import refuse


def write_json(path: Path, value) -> None:
    write_whole(path, json.dumps(value, indent=1).encode())


def write_whole(path: Path, content: bytes) -> None:
    """A reader never sees half of the content."""
    replace_whole("store", os.path.realpath(path), lambda stream: stream.write(content))


def save_figures(folder, figures: dict, dpi: int = 120, **options) -> list[str]:
    """Figures of matplotlib as files of these names, which are returned."""
    for name, figure in figures.items():
        path, image = Path(folder) / name, io.BytesIO()
        figure.savefig(image, format=path.suffix[1:], dpi=dpi, **options)
        write_whole(path, image.getvalue())
    return list(figures)


def read_json(path: Path, advice: str):
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        refuse("store", str(path), f"hold JSON ({advice})", error)


class Store:
    """The units of one run in a folder; a rerun with the same settings computes only what is
    missing.

    Args:
        folder: made if it does not exist; what else lies in it is left alone.
        settings: what the results depend on, as JSON values.

    Raises:
        ValueError: the folder has no name, or holds a run of other settings, or of none that are
            known.
    """

    def __init__(self, folder, settings: dict):
        if folder == "":
            refuse("store", "folder", "have a name", repr(folder))
        self.folder = Path(folder)
        self.settings = json.loads(json.dumps(settings))
        try:
            (self.folder / "units").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refuse("store", "folder", "be a folder to write to", error)
        self._is_claimed()

    def claim(self) -> None:
        """Write the settings down, if they are not yet:
        from here on the folder is no other run's."""
        if not self._is_claimed():
            write_json(self.folder / "settings.json", self.settings)

    def _is_claimed(self) -> bool:
        """Whether the folder has settings; others than these are refused."""
        path, advice = self.folder / "settings.json", f"delete {self.folder} to begin anew"
        if not path.exists():
            if results := len(list((self.folder / "units").iterdir())):
                requirement = f"lie beside the results of a run ({advice})"
                refuse("store", str(path), requirement, f"{results} without it")
            return False
        found, settings = read_json(path, advice), self.settings
        if not isinstance(found, dict):
            requirement = f"hold the settings of a run ({advice})"
            refuse("store", str(path), requirement, type(found).__name__)
        other = [k for k in sorted({*found, *settings}) if found.get(k) != settings.get(k)]
        if other:
            requirement = (
                f"hold no run but one of the same settings ({self.folder}; choose another, or "
                "delete it)"
            )
            refuse("store", "folder", requirement, _differences(found, settings, other))
        return True

    def unit(self, name: str, compute) -> dict:
        """The unit's result, a dict: read if it is finished, else `compute()`d and stored.

        The first result claims the folder: a run that failed before it stands in no other's way,
        and of two that were started in one folder the slower is refused.
        """
        if not self.has(name):
            result = compute()
            self.claim()
            write_json(self._path(name), {**result, "sha256": _digest(result)})
        return self._read(self._path(name))

    def _read(self, path: Path) -> dict:
        advice = "delete it to compute it again"
        found = read_json(path, advice)
        if not isinstance(found, dict) or found.pop("sha256", "") != _digest(found):
            got = "other content than its SHA-256 states"
            refuse("store", str(path), f"hold what was computed ({advice})", got)
        return found

    def has(self, name: str) -> bool:
        """Whether the unit is finished."""
        return self._path(name).exists()

    def _path(self, name: str) -> Path:
        return self.folder / "units" / f"{name}.json"


def _differences(found: dict, settings: dict, names: list[str]) -> str:
    """What two runs have otherwise; of runs of two protocols nothing else matters."""
    shown = ["protocol"] if "protocol" in names else names
    parts = [f"{n} {found.get(n)!r}, not {settings.get(n)!r}" for n in shown[:3]]
    return f"one with {'; '.join(parts)}{'; ...' * (len(shown) > 3)}"


def _digest(result: dict) -> str:
    """SHA-256 of a result, which is the same once it has been to JSON and back."""
    return hashlib.sha256(json.dumps(result).encode()).hexdigest()
