"""Writes docs/what-it-tells-you.md: the other examples here, and what they really print."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "what-it-tells-you.md"

SECTIONS = {
    "residual_overflow": """## A sum that belongs to no module

The monitor names the two modules that the sum lies between, the growth of both branches over the
steps before, and, with `locate=True`, the line and both operands side by side, one step later.
With `skip_step=True` the parameters are as good in that step as they were before.
""",
    "where_trap": """## A finite loss, and a gradient that is NaN

`nanscan.locate(step)` runs the step once, op by op. In backward it names the autograd node, the
forward line that created it, and what that op was given.
""",
    "masked_attention": """## A softmax with nothing to attend to

The NaN rows are dropped before the loss, which stays finite; the gradient of `v` does not.
""",
}

HEAD = """# What it tells you

Made by `python examples/make_page.py`: the code is in [examples](../examples), and the output is
what it printed. Numbers differ a little from machine to machine.
"""


def output(name: str) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", f"examples/{name}.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def body(name: str) -> str:
    """An example's source, without its head and imports."""
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    return source.partition("import nanscan\n")[2].strip()


def section(name: str, text: str, printed: str) -> str:
    """Text, code and output of an example."""
    return f"{text}\n```python\n{body(name)}\n```\n\n```text\n{printed.strip()}\n```\n"


def main() -> None:
    """Runs the examples and writes the page."""
    sections = [section(name, text, output(name)) for name, text in SECTIONS.items()]
    PAGE.write_text("\n".join([HEAD, *sections]), encoding="utf-8")


if __name__ == "__main__":
    main()
