"""The examples run, and the page that shows them is what they print today, but for the numbers."""

import sys

import pytest

from helpers.paths import ROOT
from helpers.text import without_numbers

sys.path.insert(0, str(ROOT / "examples"))
import make_page

ESSENCE = {
    "residual_overflow": [
        "1.pool input[0] is non-finite in step",
        "two branches meet here, and their sum does not fit into float16",
        "examples/residual_overflow.py:20 in forward: x_out = x_1 + x_3",
        "one branch of a residual sum has outgrown the other",
    ],
    "where_trap": [
        "aten.div.Tensor made non-finite values in SqrtBackward0, output 0",
        "examples/where_trap.py:16 in forward",
        "torch.where does not stop 0 * Inf = NaN in the backward of square root",
    ],
    "masked_attention": [
        "aten._softmax.default made non-finite values in Attention",
        "examples/masked_attention.py:17 in forward",
        "6 rows of the softmax are fully masked",
    ],
}


@pytest.mark.parametrize("name", make_page.SECTIONS)
def test_an_example_and_its_place_on_the_page(name):
    printed = make_page.output(name)
    for words in ESSENCE[name]:
        assert words in printed
    page = make_page.PAGE.read_text(encoding="utf-8")
    assert make_page.body(name) in page
    if name == "residual_overflow":  # how many steps it takes, float16 on this CPU decides
        assert all(words in page for words in ESSENCE[name])
    else:
        assert without_numbers(printed.strip()) in without_numbers(page)
