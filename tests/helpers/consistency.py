"""What a report must not say: two things that exclude each other."""

import itertools
import math
import re

import pytest

from nanscan._data.result import bad_counts
from nanscan._data.text import dtype_name
from nanscan._locate.building import LocationBuilder

# What an "unlikely" line denies, and what a cause must then not say.
_DENIED = {
    "exploding gradients": r"explod|learning rate is too high|gradients overflow|gradient's square",
    "overflow": r"overflow|does not fit|do not fit|grew beyond|grow towards",
    "bad input batch": r"batch|label|far from unit scale|mean over nothing|single",
    "bad data or weights": r"the batch was bad|was bad before|never initialised",
    "division by zero": r"divi(?!sion by values close to 0)|0 / 0|variance of 0",
    "the torch.where trap": r"torch\.where",
    "a fully masked row": r"fully masked|masked in full",
}
_BAD = re.compile(r"\d(?:[\d,]*) (?:NaN|\+Inf|-Inf)")
_NO_MASK = re.compile(r"\d(?:[\d,]*) (?:NaN|\+Inf)")  # what no mask holds
_LABEL = re.compile(r"^  (\S[\w ]{0,9})  *", re.MULTILINE)


def sections(report: str) -> list[tuple[str, str]]:
    """(label, text) of each block of a report; that of the headline is ""."""
    head, *lines = report.splitlines()
    found = [("", head)]
    for line in lines:
        label, text = line[2:12].strip(), line[12:]
        if label:
            found.append((label, text))
        else:
            found[-1] = found[-1][0], f"{found[-1][1]}\n{text}"
    return found


def contradictions(report: str) -> list[str]:
    """Pairs of sentences of one report that exclude each other."""
    parts = sections(report)
    texts = {label: [text for own, text in parts if own == label] for label, _ in parts}
    causes = [" ".join(text.split()) for text in texts.get("cause", [])]
    found = []
    denials = "\n".join(texts.get("unlikely", [])).replace("\n ", " ")
    for topic, pattern in _DENIED.items():
        if re.search(rf"^{re.escape(topic)}:", denials, re.MULTILINE):
            found += [f"denies {topic}, and: {c}" for c in causes if re.search(pattern, _title(c))]
    given = [line for text in texts.get("given", []) for line in text.splitlines()]
    before = [line for text in texts.get("before", []) for line in text.splitlines()]
    for cause in causes:
        if re.search(r"what it was given is finite|all else that went in is finite", cause):
            found += [f"{cause} | {line}" for line in given if _NO_MASK.search(line)]
        if re.search(r"all \d[\d,]* tensors scanned .* are finite|nothing was bad earlier", cause):
            forward = [
                line for line in before if re.match(r"(\S+ )?(input|output|loss|probe)\S* ", line)
            ]
            found += [f"{cause} | {line}" for line in forward if _NO_MASK.search(line)]
        if re.search(r"gradient is finite", cause):
            found += [f"{cause} | {line}" for line in given if _is_bad(line, "grad")]
        if re.search(r"steps before .*all finite", cause):
            earlier = " ".join(texts.get("history", [])).rpartition(", step")[0]
            found += [f"{cause} | {earlier}"] if "bad)" in earlier else []
    found += [f"made here | {line}" for line in given if "made here" in parts[0][1] and _made(line)]
    return found


def _title(cause: str) -> str:
    return cause.partition(" evidence: ")[0]


def _is_bad(line: str, kind: str) -> bool:
    return bool(re.match(rf"\S+ {kind}\b", line) and _BAD.search(line))


def _made(line: str) -> bool:
    return bool(_NO_MASK.search(line)) and " output" in line


# Locations ----------------------------------------------------------------------------------------

# Of titles: what only a verdict, a direction or an op allows.
_OF_BEFORE = (
    r"was bad before|was there before|a weight of 0 does not hide|is not finite: |not finite$"
)
_IN_BACKWARD = r"derivative|in the backward|does not stop 0 \* Inf"
# Of remedies of two causes: one does what the other warns of, or undoes.
_EXCLUDE = (
    (r"a clamp would hide", r"\.clamp\("),
    (r"keep .* in float32|leave it in float32", r"float64|\.half\(\)"),
    (r"in the place of -inf", r"float\('-inf'\)\)"),
    (r"a lower learning rate", r"param_groups"),
)


def contradictions_of(location) -> list[str]:
    """Sentences of a location that its numbers, its verdict or each other exclude."""
    found = contradictions(str(location))
    found += _against_the_verdict(location)
    found += _against_numbers(location)
    titles = [cause.title for cause in location.causes]
    found += [f"twice: {title}" for title in titles if titles.count(title) > 1]
    for a, b in itertools.permutations(location.causes, 2):
        for one, other in _EXCLUDE:
            if re.search(one, a.remedy) and re.search(other, b.remedy):
                found.append(f"remedies: {a.remedy} | {b.remedy}")
    return found


def _against_the_verdict(location) -> list[str]:
    results = [r for r in location.at.results if r.stats is not None]
    read_bad = any(o.stats is not None and not o.stats.is_finite for o in location.operands)
    is_handed_on = location.verdict == "propagated"
    found = []
    if not is_handed_on and results and all(r.stats.is_finite for r in results):
        found.append("what it made is finite")
    if is_handed_on and not read_bad:
        found.append("what it read is finite")
    if "out of finite values" in location.how and read_bad:
        found.append(f"{location.how} | it read what is not finite")
    hides = location.hidden_by is not None
    dtypes = {dtype_name(r.dtype) for r in location.at.results}
    for cause in location.causes:
        title, text = cause.title, f"{cause.title}: {cause.evidence}"
        named = re.search(r"overflows (float\w+|bfloat16|complex\w+)", title)
        wrong = {
            "handed on, and no cause of before": is_handed_on and not re.search(_OF_BEFORE, title),
            "made here, and bad before": not is_handed_on and "was bad before" in title,
            "no optimizer": "optimizer" in title and location.direction != "optimizer",
            "no backward": re.search(_IN_BACKWARD, title)
            and location.direction != "backward"
            and not hides,
            "nothing hides it": "hides that" in title and not hides,
            "overflow": "no score overflows" in text
            and any("overflows" in c.title for c in location.causes),
            "it took what is not finite": "are finite" in text and read_bad,
            "another dtype": named and named[1] not in dtypes,
        }
        found += [f"{what} | {text}" for what, is_so in wrong.items() if is_so]
    return found


def _against_numbers(location) -> list[str]:
    """Numbers in sentences that no tensor of the location has."""
    ops = (location.at, location.forward, location.consequence, location.hidden_by)
    tensors = [t for op in ops if op is not None for t in (*op.operands, *op.results)]
    tensors += [o.maker.operands[0] for o in tensors if o.maker is not None and o.maker.operands]
    scanned = [t for t in tensors if t.stats is not None]
    counts = {f"{bad_counts(t.stats)} of {t.stats.numel:,}" for t in scanned}
    zeros = {f"{t.stats.zero_count:,} of {t.stats.numel:,}" for t in scanned if t.has_moments}
    tops = _extremes(tensors)
    found = []
    for text in (*(cause.evidence for cause in location.causes), *location.unlikely):
        said = re.findall(r"(?:\d[\d,]* (?:NaN|\+Inf|-Inf)(?:, )?)+ of \d+(?:,\d{3})*", text)
        found += [f"no tensor has {each} | {text}" for each in said if each not in counts]
        said = re.findall(r"(\d[\d,]*) exact zeros? (of \d+(?:,\d{3})*)", text)
        found += [f"no tensor has {a} zeros {b}" for a, b in said if f"{a} {b}" not in zeros]
        for name, said_top in re.findall(_REACHES, text):
            top = float(said_top.rstrip(",.").replace(",", ""))
            known = tops.get(name, {top})
            if not any(math.isclose(top, value, rel_tol=1e-3) for value in known):
                found.append(f"{name} reaches no {top}, but {sorted(known)} | {text}")
    return found


_REACHES = r"(\w+)(?: \([^)]*\))? reaches (-?[\d.,]+(?:e[+-]\d+)?)"


def _extremes(tensors) -> dict[str, set[float]]:
    """Extremes of tensors by the names of their arguments."""
    tops: dict[str, set[float]] = {}
    for tensor in tensors:
        for stats in (tensor.stats, tensor.integers):
            values = () if stats is None else (stats.absmax, stats.max, stats.min)
            known = tops.setdefault(tensor.name.partition("[")[0], set())
            known.update(value for value in values if value is not None)
    return tops


@pytest.fixture
def consistent_locations(monkeypatch):
    """Every location that a test makes is looked through for contradictions."""
    made = []
    build = LocationBuilder.build

    def kept(self, *args, **kwargs):
        made.append(build(self, *args, **kwargs))
        return made[-1]

    monkeypatch.setattr(LocationBuilder, "build", kept)
    yield
    found = [text for location in made for text in contradictions_of(location)]
    if found:
        pytest.fail("\n".join(found), pytrace=False)
