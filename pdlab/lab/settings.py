"""What a reader chooses about a lab. Two labs with equal settings are the same lab."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pdlab.checks import whole
from pdlab.errors import PdlabError

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")  # of vLLM's --dtype
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True)
class Settings:
    """Attributes:
    model: path of a checkpoint, or the name of one on a hub.
    profile: "cpu" or "cuda".
    dtype: weights and KV cache. float32 on a CPU, so that answers of one engine and of two can be equal token for
        token: the last prompt token is computed in another batch shape on the decode instance, and in bfloat16
        that can flip a tie.
    max_model_len: tokens.
    kv_cache_bytes: KV space of an instance, in bytes (cpu profile).
    block_size: tokens a block; CPU attention wants a multiple of 32. None: vLLM's default.
    abort_timeout: seconds, VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT: how long P keeps the blocks of a request whose
        decode side never comes (upstream's default is 480), and D, plus 60, waits for P.
    protocol: of the Transfer Engine: "tcp" or "rdma".
    gpus: of prefill and of decode, as CUDA_VISIBLE_DEVICES names them; equal: they share one.
    trace: whether engines and proxy note what happens to each request, so that it can be seen as a journey.
    prefill_args, decode_args: arguments of vLLM's own, appended to that instance's command.
    """

    model: str
    profile: Literal["cpu", "cuda"]
    dtype: str
    max_model_len: int
    block_size: int | None
    kv_cache_bytes: int | None
    abort_timeout: int
    protocol: Literal["tcp", "rdma"]
    gpus: tuple[str, str] | None = None
    trace: bool = True
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Settings":
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists})

    def differences(self, other: "Settings") -> str:
        """In words, for an error: what `other` has that this has not."""
        mine, theirs = self.as_dict(), other.as_dict()
        return ", ".join(f"{key} {mine[key]} (asked for: {theirs[key]})" for key in mine if mine[key] != theirs[key])


def checked(settings: Settings) -> Settings:
    """The settings, if an engine can be started with them; whole numbers are Python's own, for JSON.

    Raises:
        PdlabError: a value that the engine would refuse minutes later, or misunderstand.
    """
    numbers: dict[str, Any] = {}
    for name, least in (("max_model_len", 1), ("abort_timeout", 1), ("block_size", 1), ("kv_cache_bytes", 0)):
        if (given := getattr(settings, name)) is not None:
            numbers[name] = whole(name, given, least)
    settings = replace(settings, **numbers)
    if settings.dtype not in DTYPES:
        raise PdlabError(f"there is no dtype {settings.dtype!r}", f"choose one of {', '.join(DTYPES)}")
    if settings.profile == "cpu" and (settings.block_size or 0) % 32:
        raise PdlabError(f"block_size is {settings.block_size}", "CPU attention wants a multiple of 32")
    if settings.kv_cache_bytes is not None and settings.kv_cache_bytes < 1 << 20:
        raise PdlabError(f"kv_cache_bytes is {settings.kv_cache_bytes}", "give bytes, at least one MiB (1048576)")
    for name in ("prefill_args", "decode_args"):
        if not all(isinstance(word, str) for word in getattr(settings, name)):
            raise PdlabError(f"{name} is {getattr(settings, name)!r}", "give a list of words, as on a command line")
    return settings
