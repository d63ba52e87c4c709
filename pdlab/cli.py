"""The commands of `python3 -m pdlab`."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

import pdlab
from pdlab.errors import PdlabError

app = typer.Typer(
    name="python3 -m pdlab",
    help="A lab bench for vLLM's prefill/decode disaggregation: real engines, real KV bytes, step by step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench = typer.Typer(help="Ratios measured on this machine, in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Json = Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")]
Name = Annotated[str, typer.Option(help="Which lab: labs of other names run beside each other.")]
Model = Annotated[str | None, typer.Option(help="A checkpoint folder or a hub name. [default: SmolLM2-135M-Instruct]")]
Profile = Annotated[str | None, typer.Option(help="cpu or cuda. [default: what this machine has]")]
Dtype = Annotated[str | None, typer.Option(help="[default: float32 on a CPU, auto on a GPU]")]
MaxTokens = Annotated[int, typer.Option(min=1, help="How many tokens to generate.")]
Protocol = Annotated[str | None, typer.Option(help="tcp or rdma. [default: rdma where a device is, else tcp]")]


@app.command()
def lab(
    model: Model = None,
    profile: Profile = None,
    dtype: Dtype = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="JupyterLab's port. [default: 8888, or a free one]")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser, where there is one.")] = True,
) -> None:
    """Bring the engines up, and JupyterLab at the first notebook. Ctrl-C ends both."""
    from pdlab.lab.jupyter import open_browser, run_jupyter, start_jupyter

    with running_lab(model=model, profile=profile, dtype=dtype) as (running, ours):
        if not sys.platform.startswith("linux"):  # so it is a recorded one
            print(f"\n{running}\n")
            run_jupyter(port, browser)
        jupyter = start_jupyter(port)
        ends = "JupyterLab and the lab" if ours else "JupyterLab; the lab was up before and stays"
        print(f"\n{running}\n\nJupyterLab: {jupyter.url}\n\nCtrl-C here ends {ends}.", flush=True)
        if browser:
            open_browser(jupyter.url)
        try:
            jupyter.process.wait()
        finally:
            jupyter.process.stop()
        if jupyter.process.exit_code != 0:  # 0: File → Shut Down
            raise PdlabError(f"JupyterLab ended: {jupyter.process.why_ended()}", f"see {jupyter.process.log}")


@app.command()
def tour(
    prompt: Annotated[str | None, typer.Argument(help="What to send. [default: a prompt of our own]")] = None,
    model: Model = None,
    profile: Profile = None,
    max_tokens: MaxTokens = 24,
    as_json: Json = False,
) -> None:
    """Bring the lab up, send one prompt, tell what happened stage by stage, and end it."""
    from pdlab import tour as tours
    from pdlab.lab.answer import check

    check(tours.PROMPT if prompt is None else prompt, max_tokens, {})
    with running_lab(model=model, profile=profile) as (running, _):
        journey, facts = tours.tour(running, tours.PROMPT if prompt is None else prompt, max_tokens)
        print(json.dumps(facts, indent=1) if as_json else tours.render(journey, facts, running))
    if not facts["equal"] and running.settings and running.settings.dtype == "float32":
        raise PdlabError("the two answers differ", "in float32 they should be equal: please report this")


@app.command()
def up(
    model: Model = None,
    profile: Profile = None,
    dtype: Dtype = None,
    max_model_len: Annotated[int | None, typer.Option(help="Tokens. [default: 4096]")] = None,
    protocol: Protocol = None,
    abort_timeout: Annotated[int | None, typer.Option(help="Seconds P keeps unsent blocks. [default: 15]")] = None,
    name: Name = "default",
    as_json: Json = False,
) -> None:
    """Bring a lab up and leave it running; one that runs already is kept."""
    choices: dict[str, Any] = {"dtype": dtype, "max_model_len": max_model_len, "protocol": protocol}
    choices |= {"abort_timeout": abort_timeout}
    running = pdlab.up(model, profile, name=name, **choices)
    show_status(running.status(), as_json)


@app.command()
def status(name: Name = "default", as_json: Json = False) -> None:
    """Say what runs. Exit code 1 if the lab is not up, or a server of it died."""
    from pdlab.lab.lab import status_of

    facts = status_of(name)
    show_status(facts, as_json)
    if not facts["up"]:
        raise typer.Exit(1)


@app.command()
def down(name: Name = "default") -> None:
    """End the lab: every process, port and shared-memory segment of it."""
    from pdlab.lab.lab import down as end

    print(f"lab {name!r} is down" if end(name) else f"lab {name!r} was not running")


@app.command()
def send(
    prompt: Annotated[str, typer.Argument(help="What to complete.")],
    max_tokens: MaxTokens = 16,
    name: Name = "default",
    as_json: Json = False,
) -> None:
    """Send one prompt through the running lab's proxy and print the answer."""
    journey = pdlab.attach(name).send(prompt, max_tokens)
    print(json.dumps(vars(journey.answer), indent=1) if as_json else journey.text)


@app.command()
def serve(
    role: Annotated[str, typer.Argument(help="prefill or decode")],
    model: Model = None,
    profile: Profile = None,
    dtype: Dtype = None,
    protocol: Protocol = None,
    host: Annotated[str, typer.Option(help="The address by which the other instance reaches this one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the API server. [default: a free one]")] = 0,
    bootstrap_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of a prefill instance's bootstrap server.")
    ] = 0,
    extra: Annotated[list[str] | None, typer.Argument(help="After --: arguments of vLLM's own.")] = None,
) -> None:
    """Run one instance in the foreground, for a second GPU or another host; join two with pdlab.join()."""
    from pdlab.lab.profile import settings
    from pdlab.lab.serve import serve as run

    if role not in ("prefill", "decode"):
        raise PdlabError(f"there is no role {role!r}", "choose prefill or decode")
    chosen = settings(model, profile, dtype=dtype, protocol=protocol)
    run(role, chosen, host=host, port=port, bootstrap_port=bootstrap_port, extra=extra or ())  # type: ignore[arg-type]


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check this machine, and say what each line means."""
    from pdlab import doctor as doctors

    checks = doctors.examine()
    if as_json:
        print(json.dumps(doctors.as_json(checks), indent=1))
    else:
        Console().print(doctors.render(checks))
    raise typer.Exit(doctors.verdict(checks))


@app.command()
def claims(model: Model = None, profile: Profile = None, as_json: Json = False) -> None:
    """Decide every claim on the mechanism, on live engines. Exit code 1 if one is not confirmed."""
    from pdlab.claims.bench import Bench
    from pdlab.claims.run import decide_all, render

    decided = []
    with running_lab(model=model, profile=profile) as (running, _):
        for each in decide_all(Bench(running)):
            decided.append(each)
            if not as_json:
                print("\n".join(render([each])), flush=True)
    if as_json:
        print(json.dumps([each.as_dict() for each in decided], indent=1))
    confirmed = sum(each.confirmed for each in decided)
    print(f"{confirmed} of {len(decided)} verdicts confirmed on vLLM {vllm_version()}", file=sys.stderr)
    raise typer.Exit(confirmed < len(decided))


@app.command("faults")
def produce_faults(
    names: Annotated[list[str] | None, typer.Argument(help="As pdlab.faults.FAULTS names them. [default: all]")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Write what came of them to data/faults.json.")] = False,
    model: Model = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """Produce faults on live engines, one after the other. Exit code 1 if one goes otherwise than described."""
    from pdlab.faults.run import run

    raise typer.Exit(run(names or (), keep, model, profile, as_json))


@app.command()
def soak(
    requests: Annotated[int, typer.Option(min=10, help="How many to send through the proxy.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random: prompts, and which clients leave.")] = 0,
    as_json: Json = False,
) -> None:
    """Send many requests of all kinds while clients leave and P is killed. Exit code 1 if anything is lost by it."""
    from pdlab.bench import soak as soaks

    with running_lab() as (running, _):
        facts = soaks.soak(running, requests, seed)
    print(json.dumps(facts, indent=1) if as_json else soaks.render(facts))
    raise typer.Exit(not facts["clean"])


@app.command()
def drift(
    against: Annotated[str | None, typer.Option(help="A version of vLLM, fetched. [default: the installed]")] = None,
    as_json: Json = False,
) -> None:
    """Say which places in vLLM's source, named by pdlab, are the same, moved, changed or gone. Exit code 1 on gone."""
    from pdlab.source.drift import main as compare

    raise typer.Exit(compare(against, as_json))


@app.command()
def record(
    names: Annotated[
        list[str] | None, typer.Argument(help="Notebooks, without .ipynb; journey. [default: all]")
    ] = None,
) -> None:
    """Run the notebooks on live engines and keep what they did, so that PDLAB_RUN=recorded plays it anywhere."""
    from pdlab.recorded.record import chosen
    from pdlab.recorded.record import record as keep

    runs = chosen(names or ())
    os.environ.pop("PDLAB_RUN", None)  # whatever this shell plays
    with running_lab():
        keep(runs, tell=lambda path: print(f"{path}  {path.stat().st_size:,} bytes", flush=True))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(context: typer.Context) -> None:
    """Run the tests and, under nbval, the notebooks; further arguments go to pytest."""
    from pdlab.testing import run_tests

    run_tests(context.args)


@bench.command()
def start(
    rounds: Annotated[int, typer.Option(min=1, help="Starts of each kind, alternating.")] = 3,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Seconds until both engines are ready: pdlab's pair against a stock pair with upstream's defaults."""
    from pdlab.bench.start import measure, render

    facts = measure(rounds, model)
    print(json.dumps(facts, indent=1) if as_json else render(facts))


@bench.command()
def overhead(
    pairs: Annotated[int, typer.Option(min=1, help="Requests of each kind, in turns.")] = 40,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """What tracing costs: the same engines with their probes and without, in turns."""
    from pdlab.bench.overhead import measure, render
    from pdlab.lab.process import myself

    os.environ["PDLAB_OWNER"] = myself()
    facts = measure(pairs, model)
    print(json.dumps(facts, indent=1) if as_json else render(facts))


@bench.command("views")
def bench_views(as_json: Json = False) -> None:
    """Milliseconds until views of 10,000 and 100,000 events are shaped, drawn and drawn again."""
    from pdlab.bench.views import measure, render

    facts = measure()
    print(json.dumps(facts, indent=1) if as_json else render(facts))


@contextmanager
def running_lab(**asked: Any) -> Iterator[tuple["pdlab.Lab", bool]]:
    """The running lab, or one of our own (True) that ends with the block, and with this process however that ends."""
    from pdlab.lab.process import myself

    os.environ["PDLAB_OWNER"] = myself()  # of a lab that is started here, or from a notebook of this JupyterLab
    running = pdlab.up(**asked)
    try:
        yield running, running.started
    finally:
        if running.started:
            print("ending the lab", file=sys.stderr)
            running.down()


def vllm_version() -> str | None:
    from pdlab.source.release import installed_version

    return installed_version()


def show_status(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    for server, state in facts["servers"].items():
        words = "up" if state["up"] else f"down: {state['ended']}"
        print(f"{server:<8} {state['url']:<24} {words:<6} pids {' '.join(map(str, state['pids']))}")
        print(f"{'':<9}log {state['log']}")
        if "bootstrap" in state:
            print(f"{'':<9}bootstrap server {state['bootstrap']}")
    if not facts["servers"]:
        print(f"lab {facts['name']!r} is not running: python3 -m pdlab up")


def end_in_good_order(signum: int, _frame: FrameType | None) -> None:
    """Unwind, so that whatever was started is ended; a second signal must not interrupt that."""
    for ending in ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    if signum == signal.SIGINT:
        print("\npdlab: interrupted; ending what this command started", file=sys.stderr)
    raise SystemExit(128 + signum)


def main() -> int:
    """Run the command of sys.argv and return the exit code."""
    for ending in ENDINGS:
        if ending != signal.SIGHUP or signal.getsignal(ending) is not signal.SIG_IGN:  # nohup stays nohup
            signal.signal(ending, end_in_good_order)
    try:
        app(prog_name="python3 -m pdlab")
    except PdlabError as error:
        print(f"pdlab: {error}", file=sys.stderr)
        return 1
    return 0
