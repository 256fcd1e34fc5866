"""What a report must not say: two things that exclude each other."""

import re

# What an "unlikely" line denies, and what a cause must then not say.
_DENIED = {
    "exploding gradients": r"explod|learning rate is too high|gradients overflow|gradient's square",
    "overflow": r"overflow|does not fit|do not fit|grew beyond|grow towards",
    "bad input batch": r"batch|label|far from unit scale|mean over nothing|single",
    "bad data or weights": r"the batch was bad|was bad before|never initialised",
    "division by zero": r"divi|0 / 0|variance of 0",
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
