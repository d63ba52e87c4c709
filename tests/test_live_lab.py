"""A running lab: what is up, where it listens, what its engines report, and what it refuses."""

import dataclasses
import os

import httpx
import pytest

import pdlab
from pdlab.errors import MismatchError, PdlabError, RequestError, StartError
from pdlab.lab.compare import check_pair
from pdlab.lab.lab import Lab
from tests.live import new_since, traces, until

PROMPT = "In a disaggregated deployment the keys and values of the prompt travel from one engine to the other. " * 8


def test_bootstrap_names_our_prefill_instance(lab: Lab) -> None:
    entry = lab.prefill.bootstrap_query()["0"]
    assert entry["engine_id"] == lab.prefill.engine_id != lab.decode.engine_id


def test_roles_and_connector_are_stock(lab: Lab) -> None:
    assert lab.prefill.facts["kv_role"] == "kv_producer"
    assert lab.decode.facts["kv_role"] == "kv_consumer"
    assert {lab.prefill.facts["kv_connector"], lab.decode.facts["kv_connector"]} == {"MooncakeConnector"}


def test_listens_on_loopback_but_for_the_transfer_engine(lab: Lab) -> None:
    """Mooncake's Transfer Engine binds two sockets of each engine to every interface, and has no setting for it."""
    open_to_all = {}
    for row in lab.processes():
        outside = [address for address in row.listens if not address.startswith("127.0.0.1:")]
        if outside:
            open_to_all[row.server, row.what] = len(outside)
    assert open_to_all == {("prefill", "EngineCore"): 2, ("decode", "EngineCore"): 2}


def test_each_engine_has_a_core_of_its_own(lab: Lab) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one core")
    cores = {row.server: row.cores for row in lab.processes() if row.what == "EngineCore"}
    assert len(cores["prefill"]) == len(cores["decode"]) == 1
    assert cores["prefill"] != cores["decode"]


def test_up_again_attaches(lab: Lab) -> None:
    assert pdlab.up().status() == lab.status()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"dtype": "bfloat16"}, r"dtype float32 \(asked for: bfloat16\)"),
        ({"max_model_len": 128}, r"max_model_len 4096 \(asked for: 128\)"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_up_with_other_arguments_is_refused(lab: Lab, other: dict[str, object], said: str) -> None:
    with pytest.raises(PdlabError, match=said):
        pdlab.up(**other)
    assert lab.status()["up"]


def test_roles_swapped_are_refused_in_words(lab: Lab) -> None:
    with pytest.raises(MismatchError, match=r"kv_role 'kv_consumer', not 'kv_producer'"):
        check_pair(lab.decode.facts, lab.prefill.facts)


def test_join_compares_before_the_first_request(lab: Lab) -> None:
    assert lab.prefill.bootstrap
    with pytest.raises(MismatchError, match="would kill it"):
        pdlab.join(prefill=lab.decode.url, decode=lab.prefill.url, bootstrap=lab.prefill.bootstrap)
    assert lab.status()["up"]


def test_join_of_the_same_instances_answers(lab: Lab) -> None:
    assert lab.prefill.bootstrap
    before = traces()
    joined = pdlab.join(prefill=lab.prefill.url, decode=lab.decode.url, bootstrap=lab.prefill.bootstrap)
    assert joined.send("1, 2, 3, 4,").token_ids == lab.send("1, 2, 3, 4,").token_ids
    joined.down()
    assert new_since(before) == {}
    assert lab.status()["up"]


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ({"prefill": "nonsense"}, "is not a URL"),
        ({"bootstrap": "http://127.0.0.1:9"}, "does not answer"),
        ({"decode": "http://127.0.0.1:9"}, "does not answer"),
    ],
)
def test_join_says_which_url_is_wrong(lab: Lab, urls: dict[str, str], said: str) -> None:
    right = {"prefill": lab.prefill.url, "decode": lab.decode.url, "bootstrap": str(lab.prefill.bootstrap)}
    with pytest.raises(PdlabError, match=said):
        pdlab.join(**{**right, **urls})


def test_join_wants_the_bootstrap_of_that_instance(lab: Lab) -> None:
    with pytest.raises(PdlabError, match=r"does not answer|names"):
        pdlab.join(prefill=lab.prefill.url, decode=lab.decode.url, bootstrap=lab.proxy.url)


def test_a_stock_server_cannot_be_compared(lab: Lab) -> None:
    stranger = dataclasses.replace(lab.prefill, url=lab.proxy.url, _facts=None)
    with pytest.raises(PdlabError, match="cannot be compared"):
        _ = stranger.facts


def test_refusals_reach_the_reader(lab: Lab) -> None:
    with pytest.raises(RequestError, match="more than one answer") as refused:
        lab.send("Hello", n=2)
    assert refused.value.status == 400
    with pytest.raises(RequestError) as too_long:
        lab.send([1] * 5000)
    assert too_long.value.status == 400
    assert "4096" in too_long.value.message


def test_engines_are_idle_after_a_request(lab: Lab) -> None:
    lab.send(PROMPT)
    for instance in (lab.prefill, lab.decode):
        assert until(lambda instance=instance: instance.metric("vllm:num_requests_running") == 0)  # type: ignore[misc]
    with pytest.raises(PdlabError, match="has no metric"):
        lab.decode.metric("vllm:nonsense")


def test_a_start_that_fails_says_why_and_leaves_nothing(lab: Lab) -> None:
    before = traces()
    with pytest.raises(StartError, match=r"invalid choice: 'float7'"):
        pdlab.up(decode_args=["--dtype", "float7"], name="failing")
    assert new_since(before) == {}
    with pytest.raises(PdlabError, match="no lab 'failing'"):
        pdlab.attach("failing")


def test_health_of_everything(lab: Lab) -> None:
    for url in (lab.prefill.url, lab.decode.url, lab.proxy.url):
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
