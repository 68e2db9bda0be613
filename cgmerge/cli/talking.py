"""`cgmerge chat` and `cgmerge generate`: let a base, an expert or a composition write."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cgmerge.cli import options
from cgmerge.cli.output import Output
from cgmerge.errors import LimitExceeded, UsageError

if TYPE_CHECKING:
    from cgmerge.evals.talk import Style
    from cgmerge.evals.targets import Ready
    from cgmerge.modules.formats import Message

_Target = Annotated[
    str | None,
    typer.Argument(metavar="[TARGET]", help="Adapter, composition, .cge or model; else the base"),
]
_Task = Annotated[
    str | None, typer.Option("--task", help="For compositions that route by task: which one")
]
_Tokens = Annotated[int, typer.Option("--max-new-tokens", help="Most tokens of an answer", min=1)]
_Temperature = Annotated[
    float, typer.Option("--temperature", help="0 always takes the likeliest token", min=0.0)
]
_TopP = Annotated[
    float, typer.Option("--top-p", help="Sample from this share of the probability", max=1.0)
]
_Force = Annotated[
    bool, typer.Option("--force-base", help="Accept experts of another base fingerprint")
]


def generate(
    target: _Target = None,
    base: options.BaseRef = "",
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text to continue; again for several"),
    ] = None,
    task: _Task = None,
    max_new_tokens: _Tokens = 128,
    temperature: _Temperature = 0.0,
    top_p: _TopP = 1.0,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    force_base: _Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Continue prompts, each on its own; from --prompt, or one per line of standard input.

    Examples:

      cgmerge generate --base tiny -p "caesar : b a d ="

      cgmerge generate composed --base tiny -p "caesar : b a d =" --json

      head prompts.txt | cgmerge generate composed --base BASE
    """
    output = Output(as_json=as_json, quiet=quiet)
    style = _style(max_new_tokens, temperature, top_p, seed)
    texts = prompts or [line.rstrip("\n") for line in _piped(output)]
    if not any(text.strip() for text in texts):
        raise UsageError("no prompt", code="prompt", hint='add --prompt "TEXT", or pipe lines in')
    found = []
    with _target(target, base, device, dtype, force_base, task, output) as there:
        from cgmerge.evals.talk import prompt_ids, write

        for text in texts:
            prompt_ids(text, there.loaded)  # all are looked at before any is answered
        for text in texts:
            show = None if as_json else _show
            reply = write(there, text, style, task=task, on_text=show)
            if not as_json:
                _show("\n")
            found.append({"prompt": text, "text": reply.text, "tokens": reply.tokens,
                          "finish": reply.finish})  # fmt: skip
    output.result("cgmerge.generate/1", {"target": target, "completions": found})


def chat(
    target: _Target = None,
    base: options.BaseRef = "",
    system: Annotated[
        str | None, typer.Option("--system", help="First message of every conversation")
    ] = None,
    task: _Task = None,
    max_new_tokens: _Tokens = 256,
    temperature: _Temperature = 0.0,
    top_p: _TopP = 1.0,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    force_base: _Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Talk to a base, an expert or a composition; one line is one turn, also from a pipe.

    Bases with a chat template remember the conversation; others treat every line as a prompt of
    its own. `/new` begins a new conversation, `/task NAME` changes the task, `/quit` ends.

    Examples:

      cgmerge chat composed --base smollm2-135m

      printf 'caesar : b a d\\n' | cgmerge chat composed --base tiny
    """
    output = Output(as_json=as_json, quiet=quiet)
    style = _style(max_new_tokens, temperature, top_p, seed)
    with _target(target, base, device, dtype, force_base, task, output) as there:
        talk = _Conversation(there, style, system, task, None if as_json else _show)
        for line in _lines(output):
            word, _, rest = line.strip().partition(" ")
            if word == "/quit":
                break
            if word == "/new":
                talk.begin()
            else:
                with _forgiving(output):
                    talk.take(word, rest, line)
    output.result("cgmerge.chat/1", {"target": target, "turns": talk.turns})


class _Conversation:
    """What was said, where the base has a template for it."""

    def __init__(
        self, there: "Ready", style: "Style", system: str | None, task: str | None, show: Any
    ) -> None:
        self.there, self.style, self.system, self.task, self.show = there, style, system, task, show
        self.remembers = bool(there.loaded.tokenizer.chat_template)
        self.turns: list[dict[str, Any]] = []
        self.history: list[Message] = []
        self.begin()

    def begin(self) -> None:
        """Forget the conversation."""
        from cgmerge.modules.formats import Message

        self.history = [Message("system", self.system)] if self.system else []

    def take(self, word: str, rest: str, line: str) -> None:
        """Take a line that is no `/new` and no `/quit`.

        Raises:
            UsageError: A task that there is not.
        """
        if word == "/task":
            task = rest.strip() or None
            check_task(self.there, task)
            self.task = task
        elif line.strip():
            self.say(line.rstrip("\n"))

    def say(self, text: str) -> None:
        """Take the user's turn and answer it."""
        from cgmerge.evals.talk import write
        from cgmerge.modules.formats import Message

        history = [*self.history, Message("user", text)]
        prompt = history if self.remembers or self.system else text
        reply = write(self.there, prompt, self.style, task=self.task, on_text=self.show)
        if self.show is not None:
            self.show("\n")
        if self.remembers:
            self.history = [*history, Message("assistant", reply.text)]
        self.turns.append({"prompt": text, "text": reply.text, "tokens": reply.tokens,
                           "finish": reply.finish})  # fmt: skip


@contextmanager
def _forgiving(output: Output) -> Iterator[None]:
    """Let a person at a terminal correct a mistake; a script is told by the exit code."""
    try:
        yield
    except (UsageError, LimitExceeded) as error:
        if not sys.stdin.isatty():
            raise
        output.warn(f"{error}; {error.hint}" if error.hint else str(error))


def check_task(there: "Ready", task: str | None) -> None:
    """Refuse the name of a task that a target does not know.

    Raises:
        UsageError: Not in its table, or there is no table.
    """
    from cgmerge.modules.routing.router import TaskRouter

    if task is None:
        return
    router = None if there.routing is None else there.routing.router
    if not isinstance(router, TaskRouter):
        raise UsageError(
            f"the task {task!r} means nothing here: only compositions by task know tasks",
            code="task",
            hint="leave it out",
            found=task,
        )
    router.weights([task])


@contextmanager
def _target(
    target: str | None,
    base: str,
    device: str,
    dtype: str,
    force_base: bool,
    task: str | None,
    output: Output,
) -> "Iterator[Ready]":
    """Check everything, load the base, and attach the target."""
    from cgmerge.evals.targets import LoadOptions, Target, open_targets, ready
    from cgmerge.modules.base import open_base
    from cgmerge.modules.loading import load_base

    if not base:
        raise UsageError("no base", code="base", hint="add --base BASE, e.g. --base tiny")
    opened = open_base(base)
    if target is None:
        found = Target.of_base(opened)
    else:
        found = open_targets([f"target={target}"], opened, force_base=force_base)[0]
    for warning in found.warnings:
        output.warn(warning)
    loaded = load_base(opened, device=device, dtype=dtype)
    with ready(found, loaded, LoadOptions(device, dtype)) as there:
        check_task(there, task)
        yield there


def _style(max_new_tokens: int, temperature: float, top_p: float, seed: int) -> "Style":
    from cgmerge.evals.talk import Style

    if not top_p > 0:
        raise UsageError(f"--top-p must be above 0, found {top_p}", code="parameter")
    return Style(max_new_tokens, temperature, top_p, seed)


def _piped(output: Output) -> Iterator[str]:
    if sys.stdin.isatty():
        output.line("prompt", "one per line; end with Ctrl-D")
    yield from sys.stdin


def _lines(output: Output) -> Iterator[str]:
    """Read turns; a terminal is asked for each."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    output.line("chat", "one line is one turn; /new, /task NAME, /quit")
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
