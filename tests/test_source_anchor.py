"""Anchors: a symbol and a marker, found in made-up trees and in the installed vLLM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdlab.errors import PdlabError
from pdlab.paths import repo_root
from pdlab.source import anchor
from pdlab.source.anchor import Anchor, Gone, Place
from pdlab.source.anchors import ANCHORS

SOURCE = '''\
"""A module."""
import functools

if functools:
    def plain(first, second):
        return first

def twice():
    return 1

def twice():
    return 2


class Queue:
    """Holds wait() calls."""

    @functools.cache
    @staticmethod
    def held(
        self,
    ) -> bool:
        # wait() is only talked of here
        """Nor is this wait() a statement."""
        if (
            self.waiting
            # a comment
        ):
            # another comment
            for each in range(3):
                self.wait(
                    each,
                )
            return self.wait()
        return False

    async def pull(self):
        async def task():
            await self.wait()  # as long as it takes
        match self.state:
            case "open":
                return task
        def task2():
            return None
'''


def tree(root: Path, source: str = SOURCE, file: str = "vllm/v1/queue.py") -> Path:
    """A folder that holds a `vllm` package of this one file."""
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return root


def resolve(root: Path, qualname: str, marker: str = "", module: str = "vllm.v1.queue") -> Place:
    return Anchor(f"{module}:{qualname}", marker).resolve(root)


def marked(root: Path, qualname: str, marker: str = "") -> tuple[int, int]:
    place = resolve(root, qualname, marker)
    return place.marked_first, place.marked_last


def digest(root: Path, source: str, qualname: str = "f") -> str:
    return resolve(tree(root, source), qualname).digest


def test_a_symbol_begins_at_its_first_decorator_and_is_marked_at_its_head(tmp_path: Path) -> None:
    place = resolve(tree(tmp_path), "Queue.held")
    assert (place.file, place.first_line, place.last_line) == ("vllm/v1/queue.py", 18, 35)
    assert (place.marked_first, place.marked_last) == (20, 22)


@pytest.mark.parametrize(
    ("qualname", "marker", "lines"),
    [
        ("Queue", "", (15, 15)),
        ("Queue.held", "self.wait(", (31, 33)),  # the first of two, all of it, and not the loop around it
        ("Queue.held", "self.waiting", (25, 28)),  # a compound statement: its head
        ("Queue.held", "range(3)", (30, 30)),
        ("Queue.held", "return self.wait()", (34, 34)),
        ("Queue.held", "wait()", (34, 34)),  # in comments and docstrings it marks nothing
        ("Queue.pull", "", (37, 37)),
        ("Queue.pull", "await", (39, 39)),
        ("Queue.pull", "match", (40, 40)),
        ("Queue.pull", "return task", (42, 42)),
        ("Queue.pull.task", "", (38, 38)),
        ("Queue.pull.<locals>.task2", "return", (44, 44)),
        ("plain", "first", (6, 6)),  # inside the symbol: its own parameters are not
        ("twice", "return", (12, 12)),  # as when the module has run: the last one
    ],
)
def test_marked(tmp_path: Path, qualname: str, marker: str, lines: tuple[int, int]) -> None:
    assert marked(tree(tmp_path), qualname, marker) == lines


@pytest.mark.parametrize(
    ("symbol", "marker", "missing"),
    [
        ("vllm.v2.queue:Queue", "", "there is no module vllm.v2.queue"),
        ("vllm.v1.queue:Queue.push", "", "vllm.v1.queue has no Queue.push"),
        ("vllm.v1.queue:task", "", "vllm.v1.queue has no task"),  # another function's own
        ("vllm.v1.queue:Queue.held.wait", "", "vllm.v1.queue has no Queue.held.wait"),
        ("vllm.v1.queue:Queue.held", "as long as", "vllm.v1.queue:Queue.held has no 'as long as'"),
        ("vllm.v1.queue:Queue.pull", "as long as", "vllm.v1.queue:Queue.pull has no 'as long as'"),
        ("vllm.v1.queue:Queue.held", "talked of", "vllm.v1.queue:Queue.held has no 'talked of'"),
        ("vllm.v1.queue:Queue.held", "Nor is this", "vllm.v1.queue:Queue.held has no 'Nor is this'"),
    ],
)
def test_gone_names_what_is_missing(tmp_path: Path, symbol: str, marker: str, missing: str) -> None:
    with pytest.raises(Gone) as caught:
        Anchor(symbol, marker).resolve(tree(tmp_path))
    assert caught.value.message == missing


def test_a_package_is_a_module_too(tmp_path: Path) -> None:
    tree(tmp_path, "def f(): pass", "vllm/v1/queue/__init__.py")
    assert resolve(tmp_path, "f").file == "vllm/v1/queue/__init__.py"


def test_a_folder_without_the_package_is_not_an_anchor_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(PdlabError, match="holds no vllm package") as caught:
        resolve(tmp_path, "f")
    assert not isinstance(caught.value, Gone) and caught.value.hint


def test_no_vllm_beside_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor, "find_spec", lambda name: None)
    with pytest.raises(PdlabError, match="vllm is not installed beside this Python") as caught:
        Anchor("vllm.v1.queue:Queue").resolve()
    assert not isinstance(caught.value, Gone) and caught.value.hint


def test_comments_docstrings_layout_and_what_is_around_do_not_count(tmp_path: Path) -> None:
    code = digest(tmp_path, "@once\nasync def f(a):\n  if a: return [1, 2]\n")
    text = 'import x\n\n@once  # a\nasync def f(\n    a\n):\n    """Text."""\n    # b\n    if (a):\n'
    assert digest(tmp_path, text + "        return [\n            1, 2,\n        ]\ndef g(): pass\n") == code
    assert len(code) == 16


@pytest.mark.parametrize(
    "other",
    ["def f(a): return a, 1", "async def f(a): return a", "def f(a=None): return a", "@x\ndef f(a): return a"],
)
def test_code_counts(tmp_path: Path, other: str) -> None:
    assert digest(tmp_path, other) != digest(tmp_path, "def f(a): return a")


def test_docstrings_inside_do_not_count_but_other_strings_do(tmp_path: Path) -> None:
    bare = digest(tmp_path, "class f:\n  def g(self):\n    return 'a'\n")
    assert digest(tmp_path, "class f:\n  'x'\n  def g(self):\n    'y'\n    return 'a'\n") == bare
    assert digest(tmp_path, "class f:\n  def g(self):\n    return 'b'\n") != bare


def test_a_digest_is_the_same_on_every_python(tmp_path: Path) -> None:
    # Python 3.12 and 3.13 changed what ast.dump() says of this.
    source = "def f(a: int = 0, *b, **c) -> None:\n  return f'{a} {c!r}', [], None\n"
    assert digest(tmp_path, source) == "9a739868a4c54c1b"


def test_the_text_is_read_when_asked_for(tmp_path: Path) -> None:
    place = resolve(tree(tmp_path), "twice")
    assert place.text() == "def twice():\n    return 2"
    tree(tmp_path, SOURCE.replace("return 2", "return 3"))
    assert place.text() == "def twice():\n    return 3"


def test_a_file_is_parsed_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    tree(tmp_path, "def f(): pass\n")
    resolve(tmp_path, "f")
    parsed = anchor._parse.cache_info().misses
    resolve(tmp_path, "f", "pass")
    assert anchor._parse.cache_info().misses == parsed
    tree(tmp_path, "\ndef f(): pass\n")
    os.utime(tmp_path / "vllm/v1/queue.py", ns=(0, 1))  # whatever the clock's resolution
    assert resolve(tmp_path, "f").first_line == 2


def test_pdlabs_own_symbols_are_found_whatever_the_root(tmp_path: Path) -> None:
    own = Anchor("pdlab.source.anchor:Anchor.resolve", "_base(")
    assert own.resolve(tmp_path) == own.resolve()
    assert own.resolve().file == "pdlab/source/anchor.py"


def test_every_anchor_in_pdlab_resolves() -> None:
    own = {name: each for name, each in ANCHORS.items() if each.module.startswith("pdlab.")}
    assert {name: each.resolve().root for name, each in own.items()} == dict.fromkeys(own, repo_root())
    assert "step.1" in own


def test_the_journey_has_23_steps() -> None:
    steps = [name for name in ANCHORS if name.startswith("step.")]
    assert steps == [f"step.{number}" for number in range(1, 24)]


def test_a_probe_is_named_after_what_it_wraps() -> None:
    probes = {name.removeprefix("probe."): each for name, each in ANCHORS.items() if name.startswith("probe.")}
    assert all(each.qualname.split(".")[-1] == name and not each.marker for name, each in probes.items())


def test_no_marker_is_longer_than_40_characters() -> None:
    assert not [name for name, each in ANCHORS.items() if len(each.marker) > 40]


def test_nothing_imports_vllm_or_torch() -> None:
    code = "import sys; from pdlab.source import drift; from pdlab.source.anchor import Anchor\n"
    code += "try: Anchor('vllm.v1.request:Request').resolve()\nexcept drift.PdlabError: pass\n"
    code += "sys.exit(bool({'vllm', 'torch', 'rich', 'httpx'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=repo_root()).returncode == 0


def test_every_probe_has_an_anchor() -> None:
    from pdlab.inside.probes import PROBES

    assert {probe.symbol for probe in PROBES} <= {anchor.symbol for anchor in ANCHORS.values()}
