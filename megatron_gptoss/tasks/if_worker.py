"""The other end of verify_if.py: a process that checks responses with if-verifiable.

In: JSON lines on stdin, {"instructions", "kwargs", "prompt", "response"}. Out: JSON lines on stdout, {"strict": [bool], "loose": [bool],
"errors": [text]}; the first line is {"ready": true} or {"error": text}. {"known": ids} is answered with {"unknown": ids}. It is started by
its path, so that nothing of this package is imported here, and it never touches the network. It ends at the end of stdin.
"""

import importlib.util
import json
import os
import random
import sys
import types

NEEDED = ("tokenizers/punkt_tab", "taggers/averaged_perceptron_tagger_eng", "corpora/stopwords")


def registry() -> dict:
    """Checkers by instruction id, IFEval's and IFBench's. LookupError, in words, where NLTK's data is missing."""
    import nltk

    missing = []
    for path in NEEDED:
        try:
            nltk.data.find(path)
        except LookupError:
            missing.append(path.partition("/")[2])
    if missing:
        wanted, searched = " ".join(missing), ", ".join(nltk.data.path)
        raise LookupError(
            f"NLTK's data is missing: {wanted}. On a machine with a network run: python -m nltk.downloader -d FOLDER {wanted}  Then copy "
            f"FOLDER here and set task.nltk_data (or NLTK_DATA) to it, or put it where NLTK looks: {searched}."
        )
    nltk.download = lambda *_, **__: False  # if-verifiable would fetch what its checkers do not need
    import langdetect

    langdetect.DetectorFactory.seed = 0  # its answer on short texts is a lottery otherwise

    # The package's own __init__ imports Hugging Face's datasets (with pandas and pyarrow) for a downloader that is not used here.
    package = types.ModuleType("if_verifiable")
    spec = importlib.util.find_spec("if_verifiable")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("if-verifiable is not installed; pip install if-verifiable==0.1.2")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["if_verifiable"] = package
    from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT as IFBENCH
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT as IFEVAL

    both = set(IFEVAL) & set(IFBENCH)
    if any(IFEVAL[name] is not IFBENCH[name] for name in both):
        raise ImportError(f"IFEval and IFBench mean different things by {', '.join(sorted(both))}")
    return {**IFEVAL, **IFBENCH}


def judge(request: dict, checkers: dict) -> dict:
    """Each instruction on its own, so that one checker that fails says nothing about the others."""
    from if_verifiable.common import evaluate_instructions

    random.seed(0)  # an instruction without arguments draws them
    strict, loose, errors = [], [], []
    for name, kwargs in zip(request["instructions"], request["kwargs"], strict=True):
        try:
            results, _ = evaluate_instructions(request["response"], [name], [kwargs], request["prompt"], checkers)
        except Exception as error:  # what a checker cannot read does not follow it
            results = []
            errors.append(f"{name}: {type(error).__name__}: {error}"[:200])
        strict.append(bool(results) and results[0].strict_pass)
        loose.append(bool(results) and results[0].loose_pass)
    return {"strict": strict, "loose": loose, "errors": errors}


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # whatever a library prints must not look like an answer
    os.dup2(nowhere, 2)
    try:
        checkers = registry()
    except Exception as error:
        print(json.dumps({"error": str(error)}), file=answers)
        return
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"unknown": sorted(set(request["known"]) - set(checkers))} if "known" in request else judge(request, checkers)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    serve()
