"""Runs a protocol: its units of work in processes, each result on disk as soon as it is there."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

import torch
from tqdm import tqdm

from .. import __version__
from ..data.parts import as_path
from ..environment import environment
from ..experiments.store import Store, write_json, write_whole
from ..ops.checks import check_integer, refuse
from ..progress import progress_bar
from ..restore import one_thread
from . import protocol
from .results import Report, Unit, crc32_of_files


def reproduce(name: str, folder, *, full=False, data_root=None, jobs=1, progress=True) -> dict:
    """Run a protocol, from where an earlier run in `folder` was stopped,
    and write its report there.

    Args:
        name: one of `protocols.NAMES`.
        folder: receives units/*.json, results.json, report.md, a csv per table and the figures.
        full: the paper's protocol, else a quick one.
        data_root: folder of the data sets; some protocols have a small set of their own without it.
        jobs: processes; each computes in one thread, so that the numbers do not depend on it.
        progress: show a bar over the units on stderr; where that is no terminal, a line a minute.

    Returns:
        what results.json holds: settings, data_root, machine, seconds of computation, tables,
        remarks, figures.

    Raises:
        ValueError: an unknown name, missing data, a folder with another run.
        ChildProcessError: a process was killed; the finished units are kept.
    """
    module = protocol(name)
    return run(
        module, name, folder, module.FULL if full else module.QUICK, data_root, jobs, progress
    )


def run(
    module: ModuleType, name: str, folder, settings, data_root, jobs: int, progress=True
) -> dict:
    """`reproduce` of a module with other settings."""
    jobs = check_integer("reproduce", "jobs", jobs, 1)
    if data_root is not None:
        root = as_path("reproduce", "data_root", data_root)
        if not root.exists():
            refuse("reproduce", "data_root", "be a folder of data sets", str(root))
        data_root = str(root.resolve())
    units = module.make_units(settings, data_root)
    sources = [] if data_root is None else module.sources(settings, data_root)
    depends_on = {
        "protocol": name,
        "bnuq_ext": __version__,
        "torch": torch.__version__,
        "data": crc32_of_files(sources),
    }
    store = Store(folder, {**asdict(settings), **depends_on, "data_root": data_root})
    if all(store.has(unit.name) for unit in units):
        jobs = 1  # they are only read
    compute = partial(_compute, module.compute, settings, data_root, store)
    bar = progress_bar(desc=name, total=len(units), unit="unit", shown=progress)
    found = _run_all(compute, units, jobs, bar)
    report = module.report({u.name: found[u.name]["result"] for u in units}, settings, store.folder)
    about = {
        "protocol": name,
        "title": module.TITLE,
        "settings": asdict(settings),
        "data_root": data_root,
        "machine": environment(),
        "seconds": sum(entry["seconds"] for entry in found.values()),
    }
    return _write(store.folder, about, report)


def _run_all(compute, units: list[Unit], jobs: int, bar: tqdm) -> dict[str, dict]:
    found = {}
    with bar, _executed(compute, units, jobs) as results:
        for name, entry in results:
            found[name] = entry
            bar.set_postfix_str(name, refresh=False)
            bar.update()
    return found


@contextmanager
def _executed(compute, units: list[Unit], jobs: int):
    """The (name, entry) of the units as they are finished."""
    if jobs == 1:
        with one_thread():
            yield map(compute, units)
        return
    # A forked process would inherit the threads' locks without the threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, initializer=_prepare_worker)
    others = set(multiprocessing.active_children())
    try:
        with _ctrl_c_later():
            submitted = [pool.submit(compute, unit) for unit in units]
        yield (future.result() for future in as_completed(submitted))
    except KeyboardInterrupt:
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    except BrokenProcessPool as error:
        text = (
            "reproduce: a process was killed, perhaps for memory, and the same command goes on; or it "
            'could not start, as from a script without `if __name__ == "__main__"`'
        )
        raise ChildProcessError(text) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _ctrl_c_later():
    """SIGINT waits for the end of the body, and in a process that begins there until it is ready."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, and not the unit alone
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    # Its own has a semaphore, which a worker that is ended leaves behind.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Waits for the end of the parent: a killed one cannot end its workers."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _compute(compute, settings, data_root, store: Store, unit: Unit) -> tuple[str, dict]:
    def timed() -> dict:
        start = time.perf_counter()
        result = compute(unit, settings, data_root)
        return {"seconds": time.perf_counter() - start, "result": result}

    return unit.name, store.unit(unit.name, timed)


def _write(folder: Path, about: dict, report: Report) -> dict:
    for table in report.tables:
        write_whole(folder / f"{table.name}.csv", table.csv().encode())
    results = {
        **about,
        "tables": {t.name: t._asdict() for t in report.tables},
        "remarks": report.remarks,
        "figures": report.figures,
    }
    write_json(folder / "results.json", results)
    # A path need not be UTF-8.
    text = markdown(about, report).encode(errors="backslashreplace")
    write_whole(folder / "report.md", text)
    return results


def markdown(about: dict, report: Report) -> str:
    """The report as it is read: what was run, tables, remarks, figures."""
    machine, root = about["machine"], about["data_root"]
    without = "none, so data that needs no files; settings of other data sets are not its own"
    settings = about["settings"] | {"data_root": root or without}
    parts = [
        f"# {about['title']}",
        f"Computed in {about['seconds'] / 60:.1f} core minutes (at most: the units' times, added up) on {machine['processor']}, "
        f"torch {machine['torch']}, bnuq_ext {machine['bnuq_ext']}. Settings:",
        "\n".join(f"- {name}: {value}" for name, value in settings.items()),
        *(f"## {table.title}\n\n{table.markdown()}" for table in report.tables),
    ]
    if report.remarks:
        parts.append("## Remarks\n\n" + "\n".join(f"- {remark}" for remark in report.remarks))
    parts += [f"![{name}]({quote(name)})" for name in report.figures]
    return "\n\n".join(parts) + "\n"
