"""An anchor: a symbol and a short marker, found in the source that is installed and never by a line number of ours.

The source is parsed, not imported, so this works beside any vLLM and without torch.
"""

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from pdlab.errors import PdlabError
from pdlab.paths import repo_root

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Gone(PdlabError):
    """What an anchor names is not in the source: the module, the symbol in it, or the marker in that."""


@dataclass(frozen=True)
class Place:
    """Where an anchor is. Lines count from 1, both ends belong to it; a symbol begins at its first decorator."""

    file: str  # relative to the folder that holds the package
    first_line: int
    last_line: int
    marked_first: int  # the marked statement, of a compound one its head; the symbol's own head without a marker
    marked_last: int
    digest: str  # of the symbol's code: comments, docstrings and layout don't count
    root: Path = field(repr=False)

    def text(self) -> str:
        """The symbol's source, read now: it is shown and never kept. Raises OSError where the file has gone since."""
        lines = (self.root / self.file).read_text(encoding="utf-8").split("\n")
        return "\n".join(lines[self.first_line - 1 : self.last_line])


@dataclass(frozen=True)
class Anchor:
    """A statement of a symbol.

    Args:
        symbol: module:qualname of a function, a class or a method; of names bound twice, the last one.
        marker: text of the statement, as it stands on one line: the first statement that has it is meant. "" is the
            symbol as a whole.
    """

    symbol: str
    marker: str = ""

    @property
    def module(self) -> str:
        return self.symbol.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.symbol.partition(":")[2]

    def resolve(self, root: Path | None = None) -> Place:
        """Find the anchor.

        Args:
            root: the folder that holds the `vllm` package. None: the installed one. pdlab's own symbols are found in
                this pdlab whatever the root.

        Raises:
            Gone: the module, the symbol or the marker is not there; says which.
            PdlabError: there is no such package at all.
        """
        base = _base(self.module.partition(".")[0], root)
        path = _file(base, self.module)
        mtime = path.stat().st_mtime_ns
        symbol, digest = _definition(path, mtime, self.qualname)
        if symbol is None:
            raise Gone(f"{self.module} has no {self.qualname}")
        _, code = _parse(path, mtime)
        marked = self._marked(symbol, code)
        file, last = path.relative_to(base).as_posix(), symbol.end_lineno or symbol.lineno
        return Place(file, _first_line(symbol), last, marked.lineno, _head_end(marked, code), digest, base)

    def _marked(self, symbol: Definition, code: list[str]) -> ast.stmt:
        if not self.marker:
            return symbol
        inside = [node for node in ast.walk(symbol) if isinstance(node, ast.stmt) and node is not symbol]
        for node in sorted(inside, key=lambda node: (node.lineno, node.col_offset)):
            if not _is_text(node) and self.marker in "\n".join(code[node.lineno - 1 : _head_end(node, code)]):
                return node
        raise Gone(f"{self.symbol} has no {self.marker!r}")


def _base(package: str, root: Path | None) -> Path:
    """The folder that holds `package`. Raises PdlabError where there is none."""
    if package == "pdlab":
        return repo_root()
    if root is None:
        spec = find_spec(package)  # of a top-level name: imports nothing
        if spec is None or spec.origin is None:
            hint = "python3 -m pdlab lab sets up an environment that has it"
            raise PdlabError(f"{package} is not installed beside this Python", hint)
        return Path(spec.origin).parent.parent
    if not (root / package).is_dir():
        raise PdlabError(f"{root} holds no {package} package", f"name the folder in which {package}/ lies")
    return root


def _file(base: Path, module: str) -> Path:
    stem = base.joinpath(*module.split("."))
    for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
        if path.is_file():
            return path
    raise Gone(f"there is no module {module}")


@cache
def _parse(path: Path, mtime: int) -> tuple[ast.Module, list[str]]:
    """The file's tree, and its lines without comments: a marker in a comment marks nothing."""
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column]
    return ast.parse(text), lines


@cache
def _definition(path: Path, mtime: int, qualname: str) -> tuple[Definition | None, str]:
    """The definition of `qualname` in a file and the digest of its code; (None, "") where it has none."""
    found: Definition | None = None
    scope: ast.AST = _parse(path, mtime)[0]
    for name in qualname.replace("<locals>.", "").split("."):
        found = next((node for node in reversed([*_definitions(scope)]) if node.name == name), None)
        if found is None:
            return None, ""
        scope = found
    return found, hashlib.sha256(repr(_shape(found)).encode()).hexdigest()[:16]


def _definitions(scope: ast.AST) -> Iterator[Definition]:
    """What `scope` itself defines, under an `if` or a `try` too, but not what its functions and classes do."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, Definition):
            yield node
        elif not isinstance(node, ast.expr):
            yield from _definitions(node)


def _shape(node: object) -> object:
    """The code alone. Not ast.dump(): the same code is dumped differently by Python 3.11, 3.12 and 3.13."""
    if isinstance(node, list):
        return [_shape(item) for item in node]
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    if isinstance(node, Definition) and _is_text(node.body[0]):
        fields["body"] = node.body[1:]
    # Empty fields are left out: newer Pythons have fields that older ones lack.
    return type(node).__name__, [(name, _shape(value)) for name, value in fields.items() if value not in (None, [])]


def _is_text(node: ast.stmt) -> bool:
    """Whether a statement is nothing but a string: a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _head_end(node: ast.stmt, code: list[str]) -> int:
    """The last line of a statement; of one that has a body, the last line before that."""
    body: list[ast.stmt | ast.pattern] = getattr(node, "body", [])
    if isinstance(node, ast.Match):
        body = [node.cases[0].pattern]
    if not body:
        return node.end_lineno or node.lineno
    end = max(node.lineno, _first_line(body[0]) - 1)
    while end > node.lineno and not code[end - 1].strip():
        end -= 1
    return end


def _first_line(node: ast.stmt | ast.pattern) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
