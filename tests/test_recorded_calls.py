"""What makes two calls the same call, and how one is shown."""

import pytest

from pdlab.recorded.calls import canonical, named, said
from tests.recording import sample


def arguments(*args: object, **kwargs: object) -> dict[str, object]:
    def send(prompt: object, max_tokens: int = 16, fresh: bool = False, **body: object) -> None: ...

    return named(send, args, kwargs)


def test_by_position_or_by_name_defaults_given_or_not() -> None:
    same = [
        arguments([1, 2], 6), arguments((1, 2), max_tokens=6), arguments(range(1, 3), 6, False),
        arguments(fresh=False, max_tokens=6, prompt=[1, 2]),
    ]  # fmt: skip
    assert {canonical(each) for each in same} == {'{"max_tokens": 6, "prompt": [1, 2]}'}


def test_what_is_another_call() -> None:
    calls = [
        arguments("a"), arguments("b"), arguments([1]), arguments("a", 6), arguments("a", fresh=True),
        arguments("a", n=2), arguments("a", kv_transfer_params={"do_remote_decode": True}),
    ]  # fmt: skip
    assert len({canonical(call) for call in calls}) == len(calls)


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": "pdlab-1"}, {"cache_salt": "0af3"}, {"kv_transfer_params": {"transfer_id": "xfer-1", "a": 1}},
        {"kv_transfer_params": {"transfer_id": "xfer-2", "a": 1}},
    ],
)  # fmt: skip
def test_ids_and_salts_make_it_no_other_call(fields: dict[str, object]) -> None:
    expected = {"prompt": "a", **({"kv_transfer_params": {"a": 1}} if "kv_transfer_params" in fields else {})}
    assert arguments("a", **fields) == expected


def test_an_id_within_a_string_is_any_id() -> None:
    assert arguments("xfer-98da71f8-3466-424f-a606-4f7047663885") == arguments(
        "xfer-00000000-3466-424f-a606-4f7047663885"
    )
    assert arguments("0123456789abcdef0123456789abcdef") == {"prompt": "UUID"}
    assert arguments("98da71f8-3466") == {"prompt": "98da71f8-3466"}


def test_a_journey_and_its_answer_are_the_same_request_and_another_journey_is_not() -> None:
    plain, other = sample("plain"), sample("partial_hit")
    assert arguments(plain) == arguments(plain.answer) == {"prompt": {"request": plain.request_id}}
    assert arguments(plain) != arguments(other)


def test_said_as_one_would_type_it_and_short() -> None:
    assert said("send", arguments("Hello", 6, fresh=True)) == "lab.send('Hello', max_tokens=6, fresh=True)"
    assert said("send", arguments(list(range(143)))) == "lab.send([0, 1, 2, … 143 values])"
    assert said("prefill.metric", {"name": "vllm:x", "source": "y"}) == "lab.prefill.metric('vllm:x', source='y')"
    assert said("up", {"name": "small"}) == "pdlab.up('small')"
    assert len(said("send", arguments("word " * 100))) < 60
