"""The proxy between real engines, as clients use it."""

import json
import os
import subprocess
import sys
import threading

import httpx
import openai
import pytest

from pdlab.lab.lab import Lab
from tests.live import in_flight, until

EOS = 2


@pytest.fixture(scope="module")
def client(lab: Lab) -> openai.OpenAI:
    http = httpx.Client(trust_env=False, timeout=120)
    return openai.OpenAI(base_url=f"{lab.proxy.url}/v1", api_key="none", http_client=http, max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_openai_client_completion(client: openai.OpenAI, model: str, lab: Lab) -> None:
    answer = client.completions.create(model=model, prompt="1, 2, 3, 4, 5,", max_tokens=8, temperature=0)
    assert answer.choices[0].text == lab.decode.complete("1, 2, 3, 4, 5,", 8).text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_openai_client_completion_streamed(client: openai.OpenAI, model: str, lab: Lab) -> None:
    stream = client.completions.create(model=model, prompt="1, 2, 3, 4, 5,", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == lab.decode.complete("1, 2, 3, 4, 5,", 8).text


def test_openai_client_chat(client: openai.OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0)  # type: ignore[arg-type]
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=12, temperature=0, stream=True,  # type: ignore[arg-type]
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert "Paris" in "".join(pieces)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_first_chunk_arrives_while_the_rest_is_computed(lab: Lab) -> None:
    """When the first chunk is here, D still generates: it reports a running request."""
    body = {"prompt": "Tell me a long story.", "max_tokens": 200, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{lab.proxy.url}/v1/completions", json=body, timeout=120, trust_env=False) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        assert json.loads(next(lines)[6:])["choices"][0]["finish_reason"] is None
        assert in_flight(lab.decode) == 1
        assert len(list(lines)) > 100
    assert until(lambda: in_flight(lab.decode) == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_decode_instance(lab: Lab, stream: bool) -> None:
    body = {"prompt": "Tell me a story.", "max_tokens": 3000, "temperature": 0, "stream": stream, "ignore_eos": True}
    left = threading.Event()

    def ask() -> None:
        with httpx.Client(trust_env=False, timeout=None) as http:
            try:
                with http.stream("POST", f"{lab.proxy.url}/v1/completions", json=body) as answer:
                    for _ in answer.iter_bytes():
                        if left.is_set():
                            return
            except httpx.HTTPError:
                return

    if stream:
        asking = threading.Thread(target=ask)
        asking.start()
        assert until(lambda: in_flight(lab.decode) == 1)
        left.set()
        asking.join(30)
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{lab.proxy.url}/v1/completions", json=body, timeout=3, trust_env=False)
    assert until(lambda: in_flight(lab.decode) == 0, 30)
    assert lab.send("Still here?").token_ids


def test_an_answer_that_ends_at_once_does_not_hang(lab: Lab) -> None:
    """P's only token would be EOS, and then stock vLLM sends no KV: the proxy has P ignore it."""
    answer = lab.send("Hello", max_tokens=8, logit_bias={str(EOS): 100})
    assert answer.finish_reason == "stop"
    assert answer.token_ids in ((EOS,), ())
    stopped = lab.send("1, 2, 3,", max_tokens=8, stop=[" "])
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 5},
        {"logprobs": 3},
        {"echo": True},
        {"seed": 7, "temperature": 0.7, "top_p": 0.9},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"stream_options": None},
        {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": "of the client's own making"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_one_half_must_not_have(lab: Lab, fields: dict[str, object]) -> None:
    alone = {key: value for key, value in fields.items() if key != "kv_transfer_params"}
    answer = lab.send("1, 2, 3, 4,", max_tokens=6, **fields)
    assert answer.text == lab.decode.complete("1, 2, 3, 4,", 6, **alone).text


def test_vllms_own_serving_benchmark_runs_against_it(lab: Lab, model: str, tmp_path: object) -> None:
    host, port = lab.proxy.url.removeprefix("http://").split(":")
    words = ["--backend", "openai", "--host", host, "--port", port, "--model", model, "--dataset-name", "random"]
    words += ["--random-input-len", "64", "--random-output-len", "8", "--num-prompts", "6", "--max-concurrency", "3"]
    words += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json", "--disable-tqdm"]
    script = (
        "import argparse, asyncio\n"
        "from vllm.benchmarks.serve import add_cli_args, main_async\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser()\n"
        "add_cli_args(parser)\n"
        "asyncio.run(main_async(parser.parse_args()))\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", script, *words], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    with open(f"{tmp_path}/result.json") as file:  # noqa: PTH123
        result = json.load(file)
    assert result["completed"] == 6
    assert result["total_output_tokens"] == 48
