"""Shows everything: runs the four benchmarks one after the other, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from _measure import arguments


def main() -> None:
    """Stops at the first that fails to run; a bar that is missed is no failure."""
    out = arguments(__doc__)
    begin = time.perf_counter()
    for name in ("call_overhead", "training_overhead", "locate", "bandwidth"):
        script = Path(__file__).with_name(f"{name}.py")
        subprocess.run([sys.executable, str(script), "--out", str(out)], check=True)
    print(f"{time.perf_counter() - begin:.0f} s in all; tables, JSON and plots are in {out}")


if __name__ == "__main__":
    main()
