"""What of the reference is written by the code: `<!-- generate: NAME ARGUMENTS -->` in a page becomes its text."""

from __future__ import annotations

import functools
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click
from stage import ROOT

MARK: Final = re.compile(r"^<!-- generate: ([a-z-]+)(?: ([^>]+?))? -->$", re.MULTILINE)
WRITTEN: Final = "<!-- signatures: written by `nox -s table` -->"
END: Final = "<!-- end of signatures -->"


class UndocumentedError(Exception):
    """Something public that nobody has described."""


def fill(text: str) -> str:
    """Return a page with its marks replaced by what the code says.

    Raises:
        UndocumentedError: there is no such mark, or something public has no description.
    """

    def made(match: re.Match[str]) -> str:
        if match[1] not in GENERATORS:
            raise UndocumentedError(f"{match[0]}: there is {', '.join(GENERATORS)}.")
        return GENERATORS[match[1]](*(match[2] or "").split())

    return MARK.sub(made, without_signatures(text))


def without_signatures(text: str) -> str:
    """Return a page without what `signatures.py` wrote for readers of the repository."""
    return re.sub(rf"\n+{WRITTEN}\n.*?{END}", "", text, flags=re.DOTALL)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# --- command line


def commands() -> str:
    """Describe every command, as click knows it."""
    from lightning_trainer.cli import COMMANDS, cli

    context = click.Context(cli, info_name="lightning-rl")
    listed = _table(
        ("command", "does"), [(f"[`{name}`](#{name})", _cell(each.help)) for name, each in COMMANDS.items()]
    )
    parts = [listed]
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        parts += _command(command, f"lightning-rl {name}", 2)
    return "\n".join(parts)


def _command(command: click.Command, name: str, level: int) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    told = inspect.cleandoc(command.help or "").replace("\b\n", "")
    if not told:
        raise UndocumentedError(f"{name} has no help.")
    yield f"{'#' * level} `{name.removeprefix('lightning-rl ')}` {{ #{name.split(' ', 1)[1].replace(' ', '-')} }}\n"
    yield f"```console\n$ {usage}\n```\n\n{told}\n"
    if command.epilog:
        yield f"{inspect.cleandoc(command.epilog)}\n"
    if isinstance(command, click.Group):
        for part in command.list_commands(context):
            found = command.get_command(context, part)
            assert found is not None
            yield from _command(found, f"{name} {part}", level + 1)
        return
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    rows = [_option(option, name, context) for option in options if "--help" not in option.opts]
    if rows:
        yield _table(("option", "default", "does"), rows)


def _option(option: click.Option, name: str, context: click.Context) -> tuple[str, str, str]:
    if not option.help:
        raise UndocumentedError(f"{name} {option.opts[0]} has no help.")
    value = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
    flags = ", ".join([*option.opts, *option.secondary_opts]) + value
    told, _, default = option.help.partition(" [default: ")
    default = default.rstrip("]")
    if not default and option.show_default and option.default not in (None, (), False):
        default = str(option.default)
    if option.required:
        default = "*required*"
    return (f"`{flags}`".replace("|", "\\|"), f"`{default}`" if default and default[0] != "*" else default, _cell(told))


# --- configuration


def configuration() -> str:
    """Describe every option of a run, in the order and under the headings of the help."""
    from pydantic_core import PydanticUndefined

    from lightning_trainer import TrainConfig
    from lightning_trainer.flags.common import headings

    sections: dict[str, list[tuple[str, ...]]] = {}
    for name, title in headings(TrainConfig.model_fields).items():
        field = TrainConfig.model_fields[name]
        if not field.description:
            raise UndocumentedError(f"TrainConfig.{name} has no description.")
        default = "*required*" if field.is_required() else f"`{_default(field, PydanticUndefined)}`"
        kind = f"`{_type(field.annotation)}`".replace("|", "\\|")
        sections.setdefault(title, []).append((f"`{name}`", kind, default, _cell(field.description)))
    head = ("key", "type", "default", "does")
    return "\n".join(f"## {title}\n\n{_table(head, rows)}" for title, rows in sections.items())


def _default(field: Any, undefined: object) -> str:
    value = field.default_factory() if field.default is undefined else field.default
    if value is None or value == ():
        return "none"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def _type(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) and "[" not in str(annotation) else str(annotation)
    for word in ("typing.", "pathlib.", " | None"):
        text = text.replace(word, "")
    text = re.sub(r"Literal\[(.*?)\]", lambda match: match[1].replace("'", '"').replace(", ", " | "), text)
    text = re.sub(r"tuple\[str, \.\.\.\]", "list of text", text)
    text = re.sub(r"dict\[str, \w+\]", "table", text)
    return text.replace("Path", "path").replace("str", "text")


def attributes(path: str) -> str:
    """Describe the fields of a class by the Attributes of its docstring, or by the record that declares them."""
    module, _, name = path.rpartition(".")
    cls = getattr(import_module(module), name)
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    items = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    told = {name: field.description for name, field in getattr(cls, "model_fields", {}).items() if field.description}
    told |= {each.strip(): text for names, text in items for each in names.split(",")}
    defaults = {each.name: each for each in inspect.signature(cls).parameters.values()}
    missing = [name for name in defaults if name not in told]
    if missing:
        raise UndocumentedError(f"{path} does not describe {', '.join(missing)}.")
    rows = []
    for name, each in defaults.items():
        default = "*required*" if each.default is inspect.Parameter.empty else f"`{each.default}`".lower()
        rows.append((f"`{name}`", default, _cell(told[name])))
    return _table(("option", "default", "does"), rows)


# --- Python


PACKAGES: Final = {path.parent.name: path.parent.parent for path in sorted(ROOT.glob("*/**/src/*/py.typed"))
                   if not {".nox", "templates"} & set(path.relative_to(ROOT).parts)}  # fmt: skip


def api(*modules: str) -> str:
    """List what a module makes public, for mkdocstrings to describe; an undocumented name is an error."""
    import griffe

    parts = []
    for path in modules:
        module = _loaded(path)
        if not module.docstring:
            raise UndocumentedError(f"{path} has no docstring.")
        first = griffe.Docstring(module.docstring.value).parse()[0].value
        parts.append(f"## `{path}` {{ #module-{path.replace('.', '-')} }}\n\n{first}\n")
        for name, thing in public(path).items():
            _must_be_documented(thing)
            if thing.path.partition(".")[0] != path.partition(".")[0]:  # mkdocstrings loads one package at a time
                there = f"lightning_spans.{name}"
                same = f"The same as [`{there}`](spans.md#{there})."
                parts.append(f"### `{name}` {{ #{path}.{name} }}\n\n{same}\n")
                continue
            parts.append(f"::: {path}.{name}\n    options:\n      heading_level: 3\n      show_root_full_path: false\n")
    return "\n".join(parts)


def describe(path: str) -> str:
    """Return the signature and the docstring of a public name as Markdown, for readers of text: ``llms.txt``."""
    package, *names = path.split(".")
    thing = functools.reduce(lambda at, name: _final(at.members[name]), names, _loaded(package))
    parts = [signature(thing)]
    if thing.is_class:
        parts += [signature(member) for member in thing.members.values() if is_method(member)]
    docstring = thing.docstring.value if thing.docstring else ""
    code = "\n\n".join(parts)
    return f"### `{path}`\n\n```python\n{code}\n```\n\n{docstring}\n"


def is_method(member: Any) -> bool:
    """Return whether a member of a class is a public method or its ``__init__``."""
    return not member.is_alias and member.is_function and (member.name == "__init__" or member.name[0] != "_")


def signature(thing: Any) -> str:
    """Return a name as its source defines it, without its body."""
    if thing.is_function:
        start = "async def " if "async" in thing.labels else "def "
        return f"{start}{thing.signature(return_type=True)}"
    if thing.is_class:
        return f"class {thing.name}" + (f"({', '.join(map(str, thing.bases))})" if thing.bases else "")
    return f"{thing.name} = {thing.value}"


def public(path: str) -> dict[str, Any]:
    """Return what a module makes public, by name."""
    module = _loaded(path)
    return {name: _final(module.members[name]) for name in _public(module)}


def _loaded(path: str) -> Any:
    return _sources()[path]


@functools.cache
def _sources() -> Any:
    import griffe

    loader = griffe.GriffeLoader(search_paths=[str(source) for source in PACKAGES.values()])
    for package in PACKAGES:
        loader.load(package)
    loader.resolve_aliases(external=False)
    return loader.modules_collection


def _public(module: Any) -> list[str]:
    if module.exports:  # functions first: they are what a reader calls
        return sorted(map(str, module.exports), key=lambda name: name[0].isupper())
    return [
        name
        for name, member in module.members.items()
        if not member.is_alias and not name.startswith("_") and (member.is_class or member.is_function)
    ]


def _final(thing: Any) -> Any:
    return thing.final_target if thing.is_alias else thing


def _must_be_documented(thing: Any) -> None:
    if not thing.docstring:
        raise UndocumentedError(f"{thing.path} is public and has no docstring.")
    if not thing.is_class:
        return
    for name, member in thing.members.items():
        if name in {"model_config", "exit_status"}:  # pydantic's; an error's, which its base describes
            continue
        described = member.is_alias or bool(member.docstring) or re.search(rf"\b{name}\b", thing.docstring.value)
        if not name.startswith("_") and not described:
            raise UndocumentedError(f"{thing.path}.{name} is public and has no docstring.")


NOT_LISTED: Final = {
    "lightning_spans.store",  # what it has is public as lightning_spans.open_store and Store
    "lightning_trainer.models",  # what names of models mean is a page for users: docs/how-to/own-model.md
    "lightning_conformance.plugins.suite",  # public as lightning_conformance
    "lightning_trainer.backends.torch",  # what backends are made of; their options are in the configuration
}


def public_modules() -> set[str]:
    """Return the modules that say what of them is public, except where a folder says it again."""
    found = set()
    for package, source in PACKAGES.items():
        for file in sorted((source / package).rglob("*.py")):
            if "__all__" in file.read_text(encoding="utf-8"):
                parts = file.relative_to(source).with_suffix("").parts
                found.add(".".join(part for part in parts if part != "__init__"))
    return found


# --- HTTP


def http() -> str:
    """Describe what the server answers: the surfaces of models and traces, and ``/api`` from its OpenAPI document."""
    app = _app()
    rows = [(f"`{method} {path}`", _surface(handler)) for (method, path), handler in sorted(app.hot.items(), key=str)]
    parts = ["## Models, traces, health\n", _table(("request", "is"), rows), "## `/api`\n"]
    document = app.openapi()
    for path, verbs in sorted(document["paths"].items()):
        for verb, operation in verbs.items():
            parts += _operation(path, verb, operation, document)
    return "\n".join(parts)


def _app() -> Any:
    from lightning_spans.store import open_store
    from lightning_trainer.gateway.app import create_app
    from lightning_trainer.gateway.auth.keys import Keys

    with tempfile.TemporaryDirectory() as folder:
        store = open_store(str(Path(folder) / "docs.db"))
        try:
            return create_app(store, keys=Keys(os.urandom(32)))
        finally:
            store.close()


def _surface(handler: Any) -> str:
    function = handler if inspect.isfunction(handler) or inspect.ismethod(handler) else type(handler)
    told = inspect.getdoc(function) or inspect.getdoc(getattr(handler, "func", None)) or ""
    if not told:
        raise UndocumentedError(f"{function} answers requests and has no docstring.")
    return _cell(told.split("\n\n", maxsplit=1)[0])


def _operation(path: str, verb: str, operation: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    told = operation.get("description") or operation.get("summary")
    if not told:
        raise UndocumentedError(f"{verb.upper()} {path} has no description.")
    yield f"### `{verb.upper()} {path}`\n\n{told}\n"
    rows = [
        (f"`{each['name']}`", each["in"], _schema(each.get("schema", {})), _cell(each.get("description", "")))
        for each in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    rows += [
        (f"`{name}`", "body", _schema(field), _cell(field.get("description", "")))
        for name, field in _resolved(body, document).get("properties", {}).items()
    ]
    if rows:
        yield _table(("name", "in", "type", "is"), rows)


def _resolved(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: Mapping[str, Any] = document["components"]["schemas"][reference.rpartition("/")[2]]
    return found


def _schema(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_schema(part) for part in schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_schema(schema.get('items', {}))}"
    return f"`{schema.get('type', 'any')}`"


# --- errors, metrics


def errors() -> str:
    """List every error that is raised on purpose, under what it is a kind of."""
    from lightning_spans import errors as module

    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    rows = [
        (f"`{kind.__name__}`", f"`{kind.__mro__[1].__name__}`", str(getattr(kind, "exit_status", "")), _told(kind))
        for kind in kinds
    ]
    return _table(("error", "is a", "exit status", "means"), rows)


def refusals() -> str:
    """List the answers with which the server refuses a request, from the functions that make them."""
    from lightning_trainer.gateway.http import errors as module

    rows = []
    for name, function in vars(module).items():
        if not inspect.isfunction(function) or name.startswith("_") or function.__module__ != module.__name__:
            continue
        told = re.match(r"Return an? (\d{3})[:,]? (.*)", _told(function))
        if told is not None:
            rows.append((told[1], _cell(told[2])))
    return _table(("status", "means"), sorted(rows))


def _told(thing: Any) -> str:
    told = inspect.getdoc(thing)
    if not told:
        raise UndocumentedError(f"{thing} has no docstring.")
    return _cell(told.split("\n\n", maxsplit=1)[0])


def server_metrics() -> str:
    """List what ``GET /metrics`` counts, from the registry itself."""
    from lightning_trainer.gateway.http.metrics import Metrics

    rows = [(f"`{each.name}`", each.type, _cell(each.documentation)) for each in Metrics().registry.collect()]
    return _table(("metric", "kind", "is"), sorted(rows))


# --- the index


def a_z() -> str:
    """List every name that has a place in the docs, by letter, with a link to it."""
    found = sorted(set(_names()), key=lambda entry: (_letter(entry[0]), entry[0].lstrip("-`").lower(), entry))
    parts: list[str] = []
    last = ""
    for name, link, what in found:
        letter = _letter(name)
        if letter != last:
            parts.append(f"\n## {letter}\n")
            last = letter
        parts.append(f"- [{name}]({link}): {what}")
    return "\n".join(parts) + "\n"


def _letter(name: str) -> str:
    first = name.lstrip("-`_ ")[:1].upper()
    return first if first.isalpha() else "#"


def _names() -> Iterator[tuple[str, str, str]]:
    from lightning_trainer import TrainConfig
    from lightning_trainer.cli import COMMANDS

    for name in COMMANDS:
        yield f"`lightning-rl {name}`", f"command-line.md#{name}", "command"
        yield f"`{name}`", f"command-line.md#{name}", "command"
    for field in TrainConfig.model_fields:
        yield f"`--{field.replace('_', '-')}`, `{field}`", "configuration.md", "option of a run"
    docs = ROOT / "docs" / "reference"
    for page in sorted((docs / "api").glob("*.md")):
        for mark in MARK.finditer(page.read_text(encoding="utf-8")):
            for module in (mark[2] or "").split():
                for name in public(module):
                    yield f"`{name}`", f"api/{page.name}#{module}.{name}", f"in `{module}`"
    for page, what in (("metrics", "metric"), ("environment", "variable"), ("glossary", "word"), ("hooks", "hook")):
        for cell in re.findall(
            r"^\| ([^|]+) \|", (docs / f"{page}.md").read_text(encoding="utf-8"), flags=re.MULTILINE
        ):
            for name in re.findall(r"`[^`]+`", cell) if page != "glossary" else cell.split(", "):
                if not set(name) <= {"-", " "}:
                    yield name, f"{page}.md", what


GENERATORS: Final[Mapping[str, Callable[..., str]]] = {
    "commands": commands,
    "configuration": configuration,
    "attributes": attributes,
    "api": api,
    "http": http,
    "errors": errors,
    "refusals": refusals,
    "server-metrics": server_metrics,
    "a-z": a_z,
}
