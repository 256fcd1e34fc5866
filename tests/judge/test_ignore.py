"""The option `ignore`: places and kinds that lead to no finding."""

import pytest
import torch
from torch import nn

import nanscan
from helpers.models import (
    SCOPES,
    Do,
    Gap,
    Net,
    batch,
    enable,
    infer,
    set_nan,
    sgd,
    train,
    verdicts,
)
from nanscan._data.site import KINDS

pytestmark = pytest.mark.usefixtures("one_thread")


# -- what is ignored -------------------------------------------------------------------------------


def _bad_everywhere(ignore, scope="model", **options):
    model = Gap(lambda x: x / 0)
    monitor = enable(scope, model, kinds=KINDS, action="log", ignore=ignore, **options)
    train(model, sgd(model), [batch()])
    monitor.close()
    return monitor


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        ((), None),
        ("*", set()),
        ("fc2*", {"fc1", "loss"}),
        (["fc2*", "loss"], {"fc1"}),
        (["fc?.weight"], {"fc1", "fc2", "loss"}),
        (torch.float32, set()),
        (torch.float16, None),
        ([torch.float16, "nothing"], None),
        (lambda site, dtype: site.kind != "loss", {"loss"}),
        (lambda site, dtype: dtype == torch.float32 and site.name.startswith("fc"), {"loss"}),
    ],
)
@SCOPES
def test_ignored_places(scope, ignore, left):
    monitor = _bad_everywhere(ignore, scope)
    found = {f.site.name.partition(".")[0] for f in monitor.findings}
    assert found == ({"fc1", "fc2", "loss"} if left is None else left)
    if left == set():
        assert monitor.healthy
    if left == {"fc1", "fc2", "loss"}:
        assert not any(f.site.name.endswith("weight") for f in monitor.findings)


@pytest.mark.parametrize("kind", KINDS)
def test_ignored_kinds(kind):
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), Do(lambda x: nanscan.probe("p", x + 0) * 1)
    )
    monitor = nanscan.enable(model, kinds=KINDS, action="log", ignore=f"kind:{kind}")
    train(model, sgd(model, momentum=0.9), [set_nan(batch())])
    assert {f.site.kind for f in monitor.findings if f.verdict != "absorbed"} == set(KINDS) - {kind}


@SCOPES
def test_what_an_ignored_place_made_is_called_made_where_it_is_seen_next(scope):
    """It is no place to blame; what comes next is named, not taken for handed on."""
    model = nn.Sequential(nn.Linear(4, 4), Do(lambda x: x / 0), Do(lambda x: x * 1))
    monitor = enable(scope, model, action="log", ignore="1")
    infer(model, batch())
    assert [site for _, site, _ in verdicts(monitor)] == ["2 output"]


@SCOPES
def test_ignored_places_do_not_come_near_the_limit_either(scope):
    model = Do(lambda x: x * 1.0)
    for ignore, count in [((), 1), ("Do", 0), (torch.float16, 0), ("kind:output", 0)]:
        monitor = enable(scope, model, kinds="output", action="log", ignore=ignore)
        infer(model, torch.tensor([60000.0]).half())
        assert len(monitor.findings) == count


@pytest.mark.parametrize(
    ("ignore", "error", "message"),
    [
        (3, TypeError, "not iterable"),
        ([3], TypeError, "ignore takes names, dtypes or a function, got 3"),
        ("kind:moments", ValueError, "unknown kind in 'kind:moments'"),
    ],
)
def test_bad_rules(ignore, error, message):
    with pytest.raises(error, match=message):
        nanscan.enable(Net(), ignore=ignore)
