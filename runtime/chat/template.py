# SPDX-License-Identifier: Apache-2.0
"""Conversations to prompt text, with the checkpoint's own template.

Templates are programs that come with a checkpoint, so they run in Jinja's immutable sandbox and see only
plain copies of the data. The environment is that of Hugging Face's ``apply_chat_template``, so a template
gives the same text here as there.

Rendering gives *text*. It is then encoded by :meth:`~nemo_build.runtime.tokenizer.Tokenizer.encode`, in which
the text of a control token becomes that token wherever it stands: in the template's own text, where this is
meant, and also in the content of a message, as in Hugging Face's default. Who passes on the text of untrusted
users should know that it can hold ``<|im_end|>``.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nemo_build.errors import BundleError, RequestError

__all__ = ["ROLES", "ChatTemplate"]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Accepted roles. ``developer``, OpenAI's newer word for ``system``, is shown to the template as that."""

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send an earlier turn's reasoning; templates read the first, a few the second."""

_MOST_PROBLEMS = 64
"""After so many, further messages are not looked at."""

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


# --- the template's world ----------------------------------------------------------------------------------


class _Refusal(jinja2.TemplateError):
    """The template called ``raise_exception``."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; Jinja's own filter would write ``<`` as ``\\u003c``."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    # The class itself would let a template change mappings by unbound methods: `dict.update(m, ...)`.
    return dict(*args, **kwargs)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks what a model is trained on; for inference its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own, as in Hugging Face's environment: assignments inside do not leak out.
        return [jinja2.nodes.Scope(body)]


def _environment(clock: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda pattern: clock().strftime(pattern),
        dict=_dict,
    )
    return environment


# --- checks ------------------------------------------------------------------------------------------------

_shown = reprlib.repr
"""Values in error messages, cut short: they come from clients."""


def _plain(value: object, where: Callable[[], str], problems: list[str]) -> Any:
    """A copy made of JSON's own types, so that no method of a richer object is within a template's reach.

    `where` gives the value's place. It is not made before it is needed: nested objects with long names have places that
    fill the memory.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {
            str(key): _plain(item, partial(_below, where, f".{key}"), problems) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, partial(_below, where, f"[{i}]"), problems) for i, item in enumerate(value)]
    problems.append(f"{where()} is no JSON value but a {type(value).__name__}")
    return None


def _below(where: Callable[[], str], step: str) -> str:
    return where() + step


def _join_parts(content: Sequence[object], where: str, problems: list[str]) -> str:
    """Content in parts to one text: these models read text only, and their templates expect a string."""
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            problems.append(f"{where}[{i}]: only parts of type 'text' are supported, got {_shown(kind)}")
        elif not isinstance(part.get("text"), str):
            problems.append(f"{where}[{i}].text must be a string, got {_shown(part.get('text'))}")
        else:
            texts.append(part["text"])
    return "\n".join(texts)


def _check_tool_call(call: object, where: str, problems: list[str]) -> None:
    """Check one call of an assistant message and turn arguments given as JSON text into a mapping.

    OpenAI's clients send text; templates iterate over a mapping.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        problems.append(f"{where} has no function name")
        return
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            problems.append(f"{where}: the arguments are no valid JSON ({error})")
            return
        function["arguments"] = arguments
    if arguments is not None and not isinstance(arguments, dict):
        problems.append(f"{where}: the arguments must be an object, got {_shown(arguments)}")


def _check_message(raw: object, where: str, problems: list[str]) -> dict[str, Any]:
    """One message as the template sees it: plain, without null fields, reasoning under its common names."""
    if not isinstance(raw, Mapping):
        problems.append(f"{where} must be an object, got {_shown(raw)}")
        return {}
    # Templates test whether a field is defined and would write a null one as "None".
    message = {k: v for k, v in _plain(raw, lambda: where, problems).items() if v is not None}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        problems.append(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}")
    elif role == "developer":
        message["role"] = "system"
    if isinstance(content, list):
        message["content"] = _join_parts(content, f"{where}.content", problems)
    elif content is not None and not isinstance(content, str):
        problems.append(f"{where}.content must be a string, text parts or null, got {_shown(content)}")
    elif content is None and role != "assistant":
        problems.append(f"{where}.content is missing (only an assistant message may go without)")
    calls = message.get("tool_calls", [])
    if calls and role != "assistant":
        problems.append(f"{where}.tool_calls belong in assistant messages only")
    if not isinstance(calls, list):
        problems.append(f"{where}.tool_calls must be a list, got {_shown(calls)}")
    else:
        for i, call in enumerate(calls):
            _check_tool_call(call, f"{where}.tool_calls[{i}]", problems)
    return _alias_reasoning(message, where, problems)


def _alias_reasoning(message: dict[str, Any], where: str, problems: list[str]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING_NAMES if name in message), None)
    if reasoning is None:
        return message
    if not isinstance(reasoning, str):
        problems.append(f"{where}: the reasoning must be a string, got {_shown(reasoning)}")
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _check_tools(tools: object, problems: list[str]) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        problems.append(f"tools must be a list, got {_shown(tools)}")
        return None
    plain: list[Any] = _plain(tools, lambda: "tools", problems)
    for i, tool in enumerate(plain):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            problems.append(f"tools[{i}] has no function name")
    return plain


def _check_request(
    messages: object, tools: object, kwargs: Mapping[str, object], continue_final_message: bool
) -> dict[str, Any]:
    """The template's variables, checked and plain; problems are raised at once, all of them unless they are many."""
    problems: list[str] = []
    variables = {"documents": None} | {
        name: _plain(v, partial(str, name), problems) for name, v in kwargs.items()
    }
    variables["tools"] = _check_tools(tools, problems)
    variables["messages"] = []
    if not isinstance(messages, (list, tuple)) or not messages:
        problems.append("messages must be a list of at least one message")
    else:
        for i, message in enumerate(messages):
            variables["messages"].append(_check_message(message, f"messages[{i}]", problems))
            if len(problems) >= _MOST_PROBLEMS:
                break
    if continue_final_message and not problems:
        problems += _mark_final(variables["messages"][-1])
    if problems:
        raise RequestError("The conversation is invalid.", problems)
    return variables


# --- loading -----------------------------------------------------------------------------------------------


def _read_sources(directory: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Template sources by name, and the special tokens that templates may use by name."""
    config_path = directory / "tokenizer_config.json"
    problems = []
    config: Any = {}
    sources: dict[str, str] = {}
    try:
        if config_path.exists():
            config = json.loads(config_path.read_text(encoding="utf-8"))
        extra = sorted((directory / "additional_chat_templates").glob("*.jinja"))
        main = directory / "chat_template.jinja"
        files = {path.stem: path for path in extra} | ({"default": main} if main.exists() else {})
        sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (OSError, ValueError) as error:
        problems.append(str(error))
    if not isinstance(config, dict):
        problems.append(f"{config_path.name} holds no JSON object")
        config = {}
    if not sources:
        sources = _config_templates(config.get("chat_template"), problems)
    if not sources and not problems:
        problems.append(f"neither chat_template.jinja nor chat_template in {config_path.name}")
    if problems:
        raise BundleError(f"Cannot load the chat template of {directory}.", problems)
    return sources, _special_tokens(config)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, each given as a string or as an object with its ``content``."""
    entries = {name: entry for name, entry in config.items() if name.endswith("_token")}
    texts = {name: e.get("content") if isinstance(e, dict) else e for name, e in entries.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _config_templates(entry: object, problems: list[str]) -> dict[str, str]:
    """``chat_template`` of ``tokenizer_config.json``: a string, or a list of named templates."""
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    named = {}
    for item in entry if isinstance(entry, list) else [entry]:
        fields = item if isinstance(item, dict) else {}
        name, template = fields.get("name"), fields.get("template")
        if isinstance(name, str) and isinstance(template, str):
            named[name] = template
        else:
            problems.append(f"chat_template: {_shown(item)} is no template (need name and template, strings)")
    return named


class ChatTemplate:
    """A checkpoint's chat template.

    Args:
        sources: A Jinja template, or several by name. With tools, the one named ``tool_use`` is taken if
            there is one; otherwise ``default``, or the only one.
        special_tokens: Variables of the template such as ``bos_token``.
        clock: What the template's ``strftime_now`` reads.

    Attributes:
        variables: Names that the templates read from outside, for example ``enable_thinking``.

    Raises:
        BundleError: A template is not valid Jinja, or none can be the default.
    """

    def __init__(
        self,
        sources: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        sources = {"default": sources} if isinstance(sources, str) else sources
        environment = _environment(clock)
        self._templates: dict[str, jinja2.Template] = {}
        self._special_tokens = dict(special_tokens or {})
        names: set[str] = set()
        problems = []
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                names |= jinja2.meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateSyntaxError as error:
                problems.append(f"template {name!r}, line {error.lineno}: {error.message}")
        if not problems and len(sources) != 1 and "default" not in sources:
            problems.append(f"no template is named 'default' among {', '.join(sources) or 'none'}")
        if problems:
            raise BundleError("The chat template cannot be used.", problems)
        self.variables = frozenset(names)

    @classmethod
    def load(cls, directory: str | Path) -> ChatTemplate:
        """Load ``chat_template.jinja`` (and ``additional_chat_templates/*.jinja``), or else ``chat_template``
        of ``tokenizer_config.json``.

        Raises:
            BundleError: There is no template, or a file is damaged.
        """
        sources, special_tokens = _read_sources(Path(directory))
        try:
            return cls(sources, special_tokens=special_tokens)
        except BundleError as error:
            raise BundleError(f"Cannot use the chat template of {directory}.", error.problems) from None

    def render(
        self,
        /,  # `self` is a name that variables may have
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Prompt text of a conversation.

        Null fields of a message are left out; content in text parts is joined by line ends; tool-call
        arguments given as JSON text become objects; reasoning may be named ``reasoning_content``,
        ``reasoning`` or ``thinking``.

        Args:
            messages: The conversation, in OpenAI's form. At least one message.
            tools: Function descriptions, in OpenAI's form.
            add_generation_prompt: End with the opening of an assistant message.
            continue_final_message: End inside the last message, which must be the assistant's and have
                content; the generation prompt is then left out.
            **kwargs: Further variables for the template, e.g. ``enable_thinking=False``.

        Raises:
            RequestError: The messages, tools or variables are malformed (all problems are listed, unless they are
                many), or the template refuses them.
            BundleError: The template itself tries what the sandbox forbids.
        """
        try:
            variables = _check_request(messages, tools, kwargs, continue_final_message)
        except RecursionError:
            raise RequestError("The conversation is invalid.", ["its data is nested too deeply"]) from None
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        text = _run(self._choose(variables["tools"]), self._special_tokens | variables)
        return _cut_at_mark(text) if continue_final_message else text

    def _choose(self, tools: list[Any] | None) -> jinja2.Template:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))


_FAILURES = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
)  # fmt: skip
"""What a template can run into; it hangs on the messages it was given, for it renders others."""


def _run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    try:
        return template.render(variables)
    except _Refusal as error:
        raise RequestError("The chat template refuses this conversation.", [str(error)]) from error
    except jinja2.exceptions.SecurityError as error:
        raise BundleError("The chat template tries what templates may not do.", [str(error)]) from error
    except _FAILURES as error:
        raise RequestError("The chat template cannot render this conversation.", [str(error)]) from error


def _mark_final(message: dict[str, Any]) -> list[str]:
    """Mark the end of the last message's content, to find it again in the rendered text."""
    if message["role"] != "assistant" or "content" not in message:
        return ["continue_final_message needs an assistant message with content at the end"]
    message["content"] += _CONTINUE_MARK
    return []


def _cut_at_mark(text: str) -> str:
    mark = _CONTINUE_MARK.strip()
    place = text.rfind(mark)
    if place < 0:
        raise RequestError("The chat template leaves out the message that is to be continued.")
    # A template that strips contents strips the mark's own space too; then the spaces before the mark, which
    # it would have stripped without the mark, go as well.
    return text[:place] if text.startswith(_CONTINUE_MARK, place) else text[:place].rstrip()
