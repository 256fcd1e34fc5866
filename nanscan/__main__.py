"""The command line: python -m nanscan info | demo | run script.py ... | locate script.py ..."""

from __future__ import annotations

import argparse
import contextlib
import platform
import runpy
import sys
from pathlib import Path

import numpy as np
import torch

import nanscan
from nanscan import _C, _demo
from nanscan._api import disable, enable
from nanscan._data.location import Location
from nanscan._data.text import plural
from nanscan._locate.search import Locating
from nanscan._monitor import Monitor
from nanscan._scan import cuda

_ACTIONS = ("warn", "raise", "log")


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and runs one command. Returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.command == "info":
        print(info())  # noqa: T201 - it is a command's output
        return 0
    if options.command == "demo":
        return _demo.main()
    if not options.module and not Path(options.script).exists():
        print(f"nanscan: no such script: {options.script}", file=sys.stderr)  # noqa: T201
        return 2
    return _run(options) if options.command == "run" else _locate(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nanscan", description=nanscan.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, and what this build can use on this machine")
    commands.add_parser("demo", help="a real half-precision run that breaks, found and repaired")
    run = commands.add_parser("run", help="run an unchanged script with nanscan on")
    run.add_argument("--action", choices=_ACTIONS, default="warn", help="default: warn")
    locate = commands.add_parser(
        "locate", help="run an unchanged script op by op, and stop where it makes a bad value"
    )
    for command in (run, locate):
        command.add_argument("-m", dest="module", action="store_true", help="as python -m")
        command.add_argument("script", help="script file, or module with -m")
        command.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def info() -> str:
    """What bug reports need: versions, the build, and what is used here."""
    rows = [
        ("nanscan", nanscan.__version__),
        ("torch", torch.__version__),
        ("numpy", np.__version__),
        ("python", f"{platform.python_version()} on {platform.platform()}"),
        ("CPU kernels", f"{_C.variant()} (this machine can run {', '.join(_C.variants())})"),
        ("threads", f"{torch.get_num_threads()}, torch's own"),
        ("CUDA kernels", _kernels()),
        *((f"cuda:{index}", _device(index)) for index in range(torch.cuda.device_count())),
    ]
    return "\n".join(f"{name:<14}{value}" for name, value in rows)


def _kernels() -> str:
    if not cuda.FATBIN.exists():
        return "source only: NVRTC compiles them when a device is first used"
    return f"image for {_C.CUDA_ARCHITECTURES} by nvcc {_C.CUDA_TOOLKIT}, and source"


def _device(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    name = f"{properties.name} ({properties.major}.{properties.minor})"
    return f"{name}: " + ("kernels load" if cuda.prepare(index) else cuda.why_not(index))


def _run(options: argparse.Namespace) -> int:
    """Runs a script as `python script` would, with every module of the process watched."""
    monitor = enable(action=options.action)
    try:
        _execute(options)
    finally:
        _finish(monitor)
    return 0


def _execute(options: argparse.Namespace) -> None:
    """Runs the script or module in this process, as its `__main__`."""
    sys.argv = [options.script, *options.args]
    if options.module:
        sys.path.insert(0, "")
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        runpy.run_path(options.script, run_name="__main__")


class _Located(BaseException):
    """Ends a script whose search is over; no `except Exception` of its own is to catch it."""


def _locate(options: argparse.Namespace) -> int:
    """Runs a script op by op. Exit status 1: an op made a non-finite value, and it was printed."""
    is_running = True
    ended: SystemExit | None = None  # as scripts do that end in sys.exit(main())

    def stop(location: Location) -> None:
        print(f"nanscan: {location}", file=sys.stderr)  # noqa: T201
        if is_running:  # else it has ended, perhaps by an error of its own
            raise _Located

    with contextlib.suppress(_Located), Locating(on_located=stop) as search:
        try:
            _execute(options)
        except SystemExit as exit_:
            ended = exit_
        finally:
            is_running = False
    if search.location is not None:
        return 1
    print("nanscan: no op made a non-finite value that led anywhere", file=sys.stderr)  # noqa: T201
    if search.scale_searches:
        print(_scale_searches(search.scale_searches), file=sys.stderr)  # noqa: T201
    if search.absorbed is not None:
        print(f"absorbed, so no fault: {search.absorbed}", file=sys.stderr)  # noqa: T201
    if ended is not None:
        raise ended
    return 0


def _finish(monitor: Monitor) -> None:
    monitor._judge_rest()  # noqa: SLF001
    disable()
    faults = [finding for finding in monitor.findings if finding.is_fault]
    searches = {finding.step for finding in monitor.findings if finding.verdict == "scale-search"}
    if faults:
        print(  # noqa: T201
            f"nanscan: {faults[0].site} was the first to go bad, in step {faults[0].step} "
            f"({plural(len(faults), 'finding')} in all)",
            file=sys.stderr,
        )
    elif searches:
        print(f"nanscan: no fault; {_scale_searches(len(searches))}", file=sys.stderr)  # noqa: T201


def _scale_searches(count: int) -> str:
    return f"a GradScaler skipped {plural(count, 'step')} to find its scale, as it should"


if __name__ == "__main__":
    sys.exit(main())
