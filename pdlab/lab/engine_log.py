"""Reading an engine's log: how far its start has come, and why it failed."""

import re

# In the order in which an engine passes them; the last one found in the log is the stage it is in.
STAGES = (
    ("importing vLLM", r""),
    ("checking arguments", r"non-default args"),
    ("starting EngineCore", r"Using max model len"),
    ("setting up the worker", r"Initializing a V1 LLM engine"),
    ("loading weights", r"Starting to load model"),
    ("starting the Transfer Engine", r"Initializing Mooncake Transfer Engine worker"),
    ("registering KV memory", r"Registering KV_Caches"),
    ("starting the API server", r"init engine \(profile"),
)
SERVING = "serving"  # seen from its /health, not from the log


def stage(log: str) -> str:
    """The stage that the engine is in, by its log."""
    return [name for name, pattern in STAGES if re.search(pattern, log)][-1]


_EXCEPTION = re.compile(
    r"^(?:\(\S+ pid=\d+\) )?(?:ERROR [^\]]*\] )?"
    r"(?P<error>(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|NotFound)(?:: .*)?|"
    r"(?:\d+ validation errors? for .*)|"
    r"(?:api_server\.py|\S+): error: .*|"
    r"\S*python\S*: No module named .*|.*error while loading shared libraries: .*)$"
)
# Raised because of another error, which stands earlier in the log or in another process's lines.
_CONSEQUENCES = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineDeadError",
    "See root cause",
)

LONGEST = 240  # characters of an error that are shown

HINTS = (
    (r"libibverbs", "install it: apt-get install libibverbs1 (conda: rdma-core)"),
    (r"max seq len|KV cache (is )?needed", "give the lab more KV space (kv_cache_bytes) or a smaller max_model_len"),
    (r"out of memory|Cannot allocate|less than desired|OutOfMemory", "close what uses memory, or use less KV space"),
    (r"killed by signal 9", "was it for want of memory? close what uses memory, or use less KV space"),
    (r"[Aa]ddress already in use", "another program took a port meanwhile: try again"),
    (r"[Rr]epo(sitory)? (id|ID)|does not exist|not a local folder|is not a valid model|LocalEntryNotFound|Can't load",
     "give --model a checkpoint folder, or the name of a model that is in your hub cache"),
    (r"max_model_len", "give a max_model_len that the model supports"),
    (r"dtype", "give a dtype that vLLM knows: float32, bfloat16, float16 or auto"),
    (r": error: ", "arguments are vLLM's own: python -m vllm.entrypoints.openai.api_server --help"),
    (r"Transfer Engine initialization failed", "Mooncake found no usable device: try protocol='tcp'"),
)  # fmt: skip


def first_error(log: str) -> str | None:
    """The first error line that is a cause, not a consequence ("Engine core initialization failed"); None if none."""
    lines = log.splitlines()
    for number, line in enumerate(lines):
        match = _EXCEPTION.match(line)
        if match and not any(words in line for words in _CONSEQUENCES):
            error = match["error"]
            if "validation error" in error:  # pydantic says what is wrong beneath, after the field's name if it has one
                beneath = [_plain(follower) for follower in lines[number + 1 : number + 4]]
                error = next((line for line in beneath if " " in line), error)
            return shorten(error.strip())
    killed = re.search(r"Failed core proc\(s\): \{'([^']+)': -(\d+)", log)
    return f"{killed[1]} was killed by signal {killed[2]}" if killed else None


def shorten(error: str) -> str:
    """Whole sentences of `error`, up to LONGEST characters."""
    if len(error) <= LONGEST:
        return error
    return error[:LONGEST].rpartition(". ")[0] or error[:LONGEST] + " …"


def _plain(line: str) -> str:
    return re.sub(r"^(\(\S+ pid=\d+\) )?(ERROR [^\]]*\] )?", "", line).strip()


def hint(error: str) -> str | None:
    """What to try about an error, if we know."""
    return next((advice for pattern, advice in HINTS if re.search(pattern, error)), None)
