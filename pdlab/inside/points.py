"""The points at which a request can be held, and where they are. Apart, for systems that have no file locks."""

POINTS = {
    "before_prefill_send": "in the proxy, before P's half leaves",
    "before_decode_send": "in the proxy, before D's half leaves",
    "before_pull": "in D's worker, before the pull message leaves",
    "before_ready": "in P's worker, before the entry in reqs_need_send becomes ready",
    "before_write": "in P's worker, with the transfer planned and nothing written",
    "before_answer": "in P's worker, with all written and D not told",
}
