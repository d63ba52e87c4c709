"""Reading an engine's log: recorded ones of real starts, as they came from vLLM 0.32.0 (long lines are cut)."""

import pytest

from pdlab.lab import engine_log
from pdlab.lab.engine_log import LONGEST, STAGES, first_error, hint, stage
from tests.helpers import RECORDED, recorded

STARTS = ("prefill", "decode", "stock")
FAILURES = {
    "badhub": (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot",
        "hub cache",
    ),
    "dtype": ("api_server.py: error: argument --dtype: invalid choice: 'float7' (choose from 'auto', ", "float32"),
    "empty": ("Value error, Invalid repository ID or local directory specified: '/path/to/emptymodel'.", "--model"),
    "noweights": ("Value error, User-specified max_model_len (4096) is greater than the derived", "max_model_len"),
    "smallkv": ("ValueError: To serve at least one request with the model's max seq len (4096), (0.18", "KV space"),
    "toolong": ("Value error, User-specified max_model_len (100000) is greater than the derived", "that the model"),
}


class TestStages:
    @pytest.mark.parametrize("name", STARTS)
    def test_a_start_passes_them_all_in_order(self, name: str) -> None:
        lines = recorded(name).splitlines(keepends=True)
        seen = [stage("".join(lines[:end])) for end in range(len(lines) + 1)]
        assert list(dict.fromkeys(seen)) == [name for name, _ in STAGES]

    @pytest.mark.parametrize(("name", "expected"), [("dtype", 0), ("toolong", 1), ("smallkv", 4)])
    def test_a_failed_one_stays_where_it_failed(self, name: str, expected: int) -> None:
        assert stage(recorded(f"fails_{name}")) == STAGES[expected][0]

    def test_nothing_printed_yet(self) -> None:
        assert stage("") == STAGES[0][0]


class TestFirstError:
    @pytest.mark.parametrize("name", FAILURES)
    def test_of_a_real_failure(self, name: str) -> None:
        beginning, advice = FAILURES[name]
        error = first_error(recorded(f"fails_{name}"))
        assert error is not None
        assert error.startswith(beginning)
        assert "Engine core initialization failed" not in error
        assert "\n" not in error
        assert len(error) <= LONGEST
        assert advice in str(hint(error))

    def test_every_recorded_failure_has_a_case_above(self) -> None:
        assert {path.stem for path in RECORDED.glob("fails_*.log")} == {f"fails_{name}" for name in FAILURES}

    def test_the_consequence_is_in_that_log_too(self) -> None:
        assert "RuntimeError: Engine core initialization failed" in recorded("fails_smallkv")

    @pytest.mark.parametrize("name", STARTS)
    def test_a_start_that_went_well_has_none(self, name: str) -> None:
        # Though it warns of an OSError, and Mooncake's C++ logs a line of severity E.
        assert "Local segment descriptor not found" in recorded(name)
        assert first_error(recorded(name)) is None

    @pytest.mark.parametrize(
        ("line", "error"),
        [
            ("torch.OutOfMemoryError: CUDA out of memory. Tried", "torch.OutOfMemoryError: CUDA out of memory. Tried"),
            ("(EngineCore pid=7) ERROR 11-29 22:47:18 [core.py:15] KeyError: 'x'", "KeyError: 'x'"),
            ("(Worker_TP0 pid=7) ERROR 11-29 22:47:18.123 [core.py:15] AssertionError", "AssertionError"),
            ("/path/to/python: No module named vllm", "/path/to/python: No module named vllm"),
            (
                "ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory",
                "ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory",
            ),
            ("WARNING 11-29 [x.py:1] This can cause errors like `OSError: [Errno 24] Too many open files`.", None),
            ("INFO 11-29 [x.py:1] ValueError: is not what this says", None),
            ("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}", None),
            ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace", None),
        ],
    )
    def test_of_a_line(self, line: str, error: str | None) -> None:
        assert first_error(f"INFO 11-29 23:00:00 [a.py:1] before\n{line}\n") == error

    def test_the_first_cause_wins(self) -> None:
        log = "RuntimeError: Engine core initialization failed.\nValueError: one\nKeyError: two\n"
        assert first_error(log) == "ValueError: one"

    def test_a_killed_core_leaves_no_error_but_its_signal(self) -> None:
        log = (
            "Traceback (most recent call last):\nRuntimeError: Engine core initialization failed. See root cause above."
            " Failed core proc(s): {'EngineCore': -9}\n"
        )
        assert first_error(log) == "EngineCore was killed by signal 9"
        assert "memory" in str(hint("EngineCore was killed by signal 9"))
        assert first_error(log.replace("-9", "1")) is None


class TestShorten:
    def test_keeps_what_is_short(self) -> None:
        assert engine_log.shorten("Short. Still. short") == "Short. Still. short"

    def test_cuts_at_a_sentence(self) -> None:
        assert engine_log.shorten(f"One. Two {'x' * LONGEST}. Three") == "One"

    def test_cuts_one_long_sentence_too(self) -> None:
        assert engine_log.shorten("x" * 1000) == "x" * LONGEST + " …"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("ImportError: libibverbs.so.1: cannot open shared object file", "libibverbs1"),
        ("torch.OutOfMemoryError: CUDA out of memory", "memory"),
        ("OSError: [Errno 98] Address already in use", "try again"),
        ("RuntimeError: Mooncake Transfer Engine initialization failed.", "tcp"),
        ("api_server.py: error: unrecognized arguments: --nonsense", "arguments are vLLM's own"),
        ("KeyError: 'x'", None),
    ],
)
def test_hint(error: str, advice: str | None) -> None:
    found = hint(error)
    assert found is None if advice is None else advice in str(found)
