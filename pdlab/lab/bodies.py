"""What the two halves of a request say, and which requests cannot be halved. Pure functions of the client's body."""

from typing import Any

Body = dict[str, Any]

# Not for P, which makes one token that nobody reads. Stock vLLM sends KV only if that token ended P's request by its
# length, so whatever could end it otherwise, be refused beside max_tokens 1 or cost P work has to go. All else stays,
# known or not: P and D must see the very same prompt, and fields like tools, suffix or chat_template_kwargs shape it.
# So does response_format, which some chat templates print into the prompt.
NOT_FOR_PREFILL = {
    *("stop", "stop_token_ids", "min_tokens", "repetition_detection", "thinking_token_budget"),
    *("n", "best_of", "use_beam_search", "stream_options", "echo"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids"),
    *("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words"),
}


def prefill_body(body: Body, transfer_id: str) -> Body:
    """P's half: the same prompt, one token, and 'keep the KV: somebody will pull it'."""
    p = {field: value for field, value in body.items() if field not in NOT_FOR_PREFILL}
    p |= {"max_tokens": 1, "stream": False}
    if "max_completion_tokens" in p:
        p["max_completion_tokens"] = 1
    # If P's token is an end-of-sequence token, it ends the request by a stop and not by its length: P frees its blocks
    # and sends nothing, and D waits for the whole timeout. So P is told not to look.
    p["ignore_eos"] = True
    p["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return p


def decode_body(body: Body, transfer_id: str, engine_id: str, bootstrap: str) -> Body:
    """D's half: what the client asked for, and whom to pull the prompt's KV from."""
    where = {"remote_engine_id": engine_id, "remote_bootstrap_addr": bootstrap, "transfer_id": transfer_id}
    return body | {"kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": True} | where}


def refusal(body: Body) -> str | None:
    # A transfer_id names the KV of one prompt, pulled once: a second sequence of the same request would find none.
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1) or body.get("use_beam_search"):
        return "more than one answer (n, best_of, use_beam_search)"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) != 1 and not (prompt and all(type(token) is int for token in prompt)):
        return "a list of prompts; send one request for each"
    if body.get("prompt_embeds") is not None:
        return "prompt_embeds"
    if 0 in (body.get("max_tokens"), body.get("max_completion_tokens")):
        return "max_tokens 0, which leaves nothing to decode"
    # For log-probabilities of the prompt D computes the whole prompt itself and pulls nothing: a right answer, but P
    # has worked in vain. echo asks for them too: always in a chat, together with logprobs in a completion.
    scored_echo = body.get("echo") and ("messages" in body or body.get("logprobs") is not None)
    if body.get("prompt_logprobs") is not None or scored_echo:
        return "log-probabilities of the prompt (prompt_logprobs, echo); ask an instance directly"
    return None
