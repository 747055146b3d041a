"""Names that say nothing of what they name, and other habits of the code that may only fall."""

import ast
import io
import keyword
import re
import tokenize
from collections import Counter

from house_measures import CORE, File
from workspace import MEMBERS, UI, source

WORDS = frozenset(
    {
        *("each", "own", "found", "given", "made", "place", "places", "whole", "what", "known"),
        *("seen", "said", "having", "taken", "handed_on", "asked", "added"),
    }
)
"""Pronouns and participles that are no name: of a variable, a parameter, an attribute, a
function."""
MOST_PHRASES = {"the core": 20, "packages": 15}
"""How often "that of", "those of" and "of which" take the place of a noun, in code and prose."""
MOST_SIGNATURES = {"commands": 5, "diagnostics": 4, "previews": 8, "run": 31}
"""How many functions of a folder of the core take a `RunContext`, and fields are one."""
_WORD_OUTSIDE_OF_TEXT = re.compile(
    r'''"""(?s:.*?)"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|#.*|\b('''
    + "|".join(sorted(WORDS))
    + r")\b"
)
"""A text or a comment, or else one of the words: most files have none, and need not be taken apart
into tokens, which takes four times as long."""
_PHRASE = re.compile(r"\b(?:that|those)\s+of\b|\bof\s+which\b", re.IGNORECASE)


def words_of(file: File) -> list[str]:
    """The names of a file that are among the words, with their lines."""
    if not any(_WORD_OUTSIDE_OF_TEXT.findall(file.text)):
        return []
    return [
        f"{file.path}:{token.start[0]}: {token.string}"
        for token in tokenize.generate_tokens(io.StringIO(file.text).readline)
        if token.type == tokenize.NAME
        and token.string in WORDS
        and not keyword.iskeyword(token.string)
    ]


def takes_run(node: ast.AST) -> bool:
    """Whether a function takes a run, or a field is one."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        annotations = [argument.annotation for argument in arguments]
    else:
        annotations = [node.annotation] if isinstance(node, ast.AnnAssign) else []
    return any(
        re.search(r"\bRunContext\b", ast.unparse(annotation))
        for annotation in annotations
        if annotation
    )


def sources() -> list[File]:
    """The files of the core without `testing`, and of the packages."""
    members = [member for member in MEMBERS if member is not UI]
    files = [source(path) for member in members for path in member.modules]
    return [file for file in files if not file.path.startswith(f"{CORE}testing/")]


def all_sources() -> list[File]:
    """These, `testing`, and the page in the browser."""
    return [source(path) for member in MEMBERS for path in member.modules]


TEXT = '''"""That of a neighbour, and those
of another; the unit of which is a byte."""
from a import own

def f(run: RunContext, each: int, *, other: "list[RunContext]") -> None:
    """each found"""
    place = own.seen + placed

class Job:
    run: RunContext
    def g(self, context) -> RunContext: ...
'''


def test_words_phrases_and_signatures_are_found_in_code_and_prose() -> None:
    file = File.parse("a.py", TEXT)
    # from a import `own`; `each`; `place` = `own`.`seen`: names, and no words of a docstring
    found = [line.rpartition(" ")[2] for line in words_of(file)]
    assert found == ["own", "each", "place", "own", "seen"]
    assert len(_PHRASE.findall(TEXT)) == 3
    assert sum(map(takes_run, file.nodes)) == 2


def test_no_pronoun_and_no_participle_is_a_name() -> None:
    assert len(all_sources()) > len(sources()) + 80 > 380
    assert [line for file in all_sources() for line in words_of(file)] == [], "use a noun"


def test_phrases_in_place_of_a_noun_only_fall() -> None:
    counts: Counter[str] = Counter()
    for file in sources():
        part = "the core" if file.path.startswith(CORE) else "packages"
        counts[part] += len(_PHRASE.findall(file.text))
    grown = {part: count for part, count in counts.items() if count > MOST_PHRASES[part]}
    assert grown == {}, "say the noun; after they fell, lower the number"


def test_functions_that_take_a_run_only_become_fewer() -> None:
    counts: Counter[str] = Counter()
    for file in sources():
        if file.path.startswith(CORE):
            folder = file.path.removeprefix(CORE).partition("/")[0]
            counts[folder] += sum(map(takes_run, file.nodes))
    grown = {name: num for name, num in counts.items() if num > MOST_SIGNATURES.get(name, 0)}
    assert grown == {}, "take what is needed of a run; then lower the number"
