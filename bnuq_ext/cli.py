"""The command `bnuq`: the experiments, and a report of the installation.

Exit status: 0, 2 for anything that the user can mend (one line on stderr), 130 after Ctrl-C, 1
where whoever reads the result has left.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path

from ._version import __version__
from .chunks import is_out_of_memory

# What the experiments call an argument whose option has another name.
OPTIONS = {"num_samples": "samples", "root": "data_root", "folder": "output"}


def demo(arguments) -> str:
    from .experiments import digits, digits_report
    from .plots.canvas import check_matplotlib

    check_matplotlib()
    settings = digits.QUICK if arguments.quick else digits.Settings()
    if arguments.seeds is not None:
        settings = digits.with_seeds(settings, arguments.seeds)
    default = "demo-output/quick" if arguments.quick else "demo-output"
    folder = default if arguments.output is None else arguments.output
    units = digits.run(folder, settings, progress=not arguments.json)
    results = digits_report.write(folder, units, settings)
    return _shown(arguments, folder, results, digits_report.text(results, settings))


def bbb(arguments) -> str:
    from .experiments import bbb, bbb_report
    from .plots.canvas import check_matplotlib

    check_matplotlib()
    names = ("hidden", "epochs", "scheme", "scaling", "seed")
    chosen = {name: getattr(arguments, name) for name in names}
    settings = bbb.Settings(**chosen, num_samples=arguments.samples)
    options = {"data_root": arguments.data_root, "progress": not arguments.json}
    split, states = bbb.run(arguments.output, arguments.prior, settings, **options)
    results = bbb_report.write(arguments.output, split, states, settings)
    return _shown(arguments, arguments.output, results, bbb_report.text(results))


def _shown(arguments, folder, results: dict, text: str) -> str:
    if arguments.json:
        return json.dumps(results)
    paths = "\n".join(f"  {Path(folder) / name}" for name in results["figures"])
    return f"{text}\n\nFigures:\n{paths}"


def reproduce(arguments) -> str:
    from .plots.canvas import check_matplotlib
    from .protocols import runner

    if arguments.list:
        return _listed(arguments)
    check_matplotlib()
    size = "full" if arguments.full else "quick"
    default = f"reproduce-output/{arguments.name}-{size}"
    folder = default if arguments.output is None else arguments.output
    options = {"data_root": arguments.data_root, "jobs": arguments.jobs}
    options |= {"full": arguments.full, "progress": not arguments.json}
    results = runner.reproduce(arguments.name, folder, **options)
    if arguments.json:
        return json.dumps(results)
    path = Path(folder) / "report.md"
    return f"{path.read_text(encoding='utf-8')}\nThis report: {path}; its tables and figures lie beside it."


def _listed(arguments) -> str:
    from . import protocols

    modules = {name: protocols.protocol(name) for name in protocols.NAMES}
    if arguments.json:
        return json.dumps({name: module.TITLE for name, module in modules.items()})
    rows = [("protocol", "without --data-root", "title")]
    rows += [(name, m.WITHOUT_DATA or "(needs it)", m.TITLE) for name, m in modules.items()]
    return "\n".join(f"{name:<12}  {without:<19}  {title}" for name, without, title in rows)


def doctor(arguments) -> str:
    from .environment import environment

    found = environment()
    if arguments.json:
        return json.dumps(found)
    words = {"None": "-", "True": "yes", "False": "no"}
    shown = {k: words.get(str(v), v) for k, v in found.items()}
    width = max(map(len, shown))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in shown.items())


class Parser(argparse.ArgumentParser):
    """Refuses in one line; how the command is used is what --help tells."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    root = Parser(
        prog="bnuq", description="Uncertainty from batch normalisation and from Gaussian weights."
    )
    root.add_argument("--version", action="version", version=f"bnuq {__version__}")
    commands = root.add_subparsers(dest="command", required=True)
    add_demo(commands)
    add_bbb(commands)
    add_reproduce(commands)
    command = commands.add_parser(
        "doctor", help="versions, libraries and devices of this installation"
    )
    command.set_defaults(run=doctor)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON and no progress")
    return root


def add_demo(commands) -> None:
    command = commands.add_parser(
        "demo",
        help="train on scikit-learn's digits, predict with replicas, print the table, draw the figures",
    )
    add = command.add_argument
    add(
        "--output",
        help="folder (demo-output, with --quick demo-output/quick); a killed run goes on there",
    )
    add("--seeds", type=int, help="number of seeds (10, quick: 2); one alone compares nothing")
    add("--quick", action="store_true", help="check that it runs; no results")
    command.set_defaults(run=demo)


def add_bbb(commands) -> None:
    command = commands.add_parser(
        "bbb",
        help="train by Bayes by Backprop as in the report, print the tables, draw the figures",
    )
    add = command.add_argument
    add(
        "--data-root",
        help="folder of MNIST's idx files, or with mnist in it; without it scikit-learn's digits",
    )
    add("--hidden", type=int, default=400, help="units of each hidden layer (400)")
    add("--epochs", type=int, default=600, help="in all; more of them continue a run (600)")
    known = "gaussian, mixture, mixture-quarter, mixture-narrow (the first two)"
    add("--prior", nargs="+", default=["gaussian", "mixture"], help=f"one run each: {known}")
    add("--scheme", default="geometric", help="KL weights of the batches: geometric, uniform")
    add("--scaling", default="255", help="of the pixels: 255, standard, 126")
    add("--samples", type=int, default=2, help="of the weights in a step (2)")
    add("--seed", type=int, default=0, help="of everything random (0)")
    add("--output", default="bbb-output", help="folder (bbb-output); a killed run goes on there")
    command.set_defaults(run=bbb)


def add_reproduce(commands) -> None:
    command = commands.add_parser(
        "reproduce",
        help="run a protocol of the source papers: its tables beside ours, figures, JSON and CSV",
    )
    add = command.add_argument
    add("name", nargs="?", help="of the protocol, see --list")
    add("--list", action="store_true", help="print the protocols")
    add("--data-root", help="folder of the data sets; --list says what is run without it")
    size = command.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the reduced form (this is the default)")
    size.add_argument("--full", action="store_true", help="the paper's own protocol")
    add(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        help="processes of one thread each (%(default)s)",
    )
    add(
        "--output",
        help="folder (reproduce-output/NAME-quick, or -full); a killed run goes on there",
    )
    command.set_defaults(run=reproduce)


def _as_typed(message: str, arguments) -> str:
    """The message of a refused argument, which is named by its option where it has one."""
    refused = re.match(r"(\w+): (\w+) must ", message)
    option = refused and OPTIONS.get(refused[2], refused[2])
    if option in (None, "name") or option not in vars(arguments):  # a name is given without dashes
        return message
    return f"{refused[1]}: --{option.replace('_', '-')} must {message[refused.end() :]}"


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        text = arguments.run(arguments)
    except Exception as error:
        mendable = isinstance(error, (ValueError, ImportError, OSError)) or is_out_of_memory(error)
        if not mendable:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"bnuq: {_as_typed(message, arguments)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bnuq: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return _show(text)


def _show(text: str) -> int:
    """Prints the result; the status to exit with."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of ASCII has no plus-minus
    try:
        print(text, flush=True)
    except OSError as error:  # nothing is left to be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever reads has seen enough
            return 1
        print(f"bnuq: the result cannot be printed: {error}", file=sys.stderr)
        return 2
    return 0
