"""The configuration: one frozen dataclass. Flags, their help and their checks are made from its fields.

`parse_flags` turns a command line into an `EngineConfig` or raises `ConfigError`, whose text is one line that
names the flag, the value and what is allowed; `read_flags` does so for any dataclass made of `flag` fields. Nothing
here reads the model or the machine; what is left to `None` ("auto") is settled at the start, once, and then agreed
by all ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Flags = TypeVar("_Flags", bound="DataclassInstance")


class ConfigError(ValueError):
    """A flag's value is not allowed. The text is one line for the operator."""


def flag(default: Any, group: str, text: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A field that becomes a flag: its group in `--help`, its help text and the range of allowed numbers."""
    return field(default=default, metadata={"group": group, "help": text, "low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the operator asked for. Names are those people know from SGLang; GB are decimal and per rank."""

    # ---- model ----
    model_path: str | None = flag(
        None, "model", "a Hugging Face folder, a .gguf file or a hub id; absent: SmolLM2-135M-Instruct"
    )
    served_model_name: str | None = flag(None, "model", "the name clients use; absent: the path's last part")
    load_format: Literal["auto", "dummy"] = flag(
        "auto", "model", "dummy gives seeded random weights for any config.json"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto",
        "model",
        "of weights and arithmetic; auto is bfloat16 on CUDA and on CPUs with bf16 units, else float32",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "model", "of cached keys and values; auto is --dtype"
    )
    context_length: int | None = flag(
        None, "model", "most tokens of prompt and output; absent: the model's", low=2
    )
    random_seed: int | None = flag(
        None, "model", "seed of requests that bring none; absent: drawn and printed", low=0, high=2**63 - 1
    )

    # ---- HTTP ----
    host: str = flag("127.0.0.1", "http", "address to listen on")
    port: int = flag(30000, "http", "port to listen on; 0 takes a free one and prints it", low=0, high=65535)
    api_key: str | None = flag(
        None, "http", "clients must send it as a bearer token on all but /health and /ready"
    )
    max_queued_requests: int = flag(1024, "http", "most waiting requests; beyond it the answer is 429", low=1)

    # ---- parallelism ----
    pp_size: int = flag(1, "parallelism", "pipeline stages: slices of layers", low=1, high=1024)
    tp_size: int = flag(1, "parallelism", "ranks per stage: slices of each layer", low=1, high=1024)
    pp_layer_partition: tuple[int, ...] | None = flag(
        None,
        "parallelism",
        "layers of each stage, e.g. 20,20,19,19; absent: even, the last stages take the rest",
    )
    device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", "parallelism", "auto is cuda if there is one, else cpu"
    )
    threads_per_rank: int | None = flag(
        None, "parallelism", "CPU threads of a rank; absent: cores // ranks of this machine", low=1
    )
    link_address: str | None = flag(
        None,
        "parallelism",
        "this machine's address for links to ranks on other machines (needs LOCKSTEP_SECRET); absent: unix sockets",
    )

    # ---- memory ----
    page_size: int = flag(16, "memory", "tokens of one cache page", low=1, high=4096)
    max_total_tokens: int | None = flag(
        None, "memory", "tokens of the device cache; absent: from the memory budget", low=1
    )
    mem_fraction_static: float | None = flag(
        None,
        "memory",
        "share of device memory for weights and cache; absent: 0.85 on CUDA; on CPU 4 GB or 25 % of what is available, "
        "the smaller, for all ranks of a machine",
        low=0.01,
        high=0.99,
    )
    disable_radix_cache: bool = flag(False, "memory", "compute every prompt anew")

    # ---- host tier ----
    enable_hierarchical_cache: bool = flag(
        False, "host tier", "keep prefixes that leave the device cache in host memory"
    )
    hicache_size: float = flag(
        0.0,
        "host tier",
        "GB (10^9 bytes) of host memory for each rank; the ranks then agree on the least number of tokens; 0: by "
        "--hicache-ratio",
        low=0,
        high=10**6,
    )
    hicache_ratio: float = flag(
        2.0, "host tier", "host tokens per device token, when --hicache-size is 0", low=0.001, high=10**6
    )
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"] = flag(
        "write_through",
        "host tier",
        "when pages are copied to the host: computed first, prefix seen twice, or about to be evicted",
    )
    disable_hicache_checksum: bool = flag(
        False, "host tier", "do not verify the checksum of host pages when they are loaded back"
    )
    debug_unagreed_hicache: bool = flag(
        False, "host tier", "let every stage keep its own host capacity, to see what comes of it"
    )

    # ---- scheduling ----
    max_running_requests: int | None = flag(
        None,
        "scheduling",
        "most sequences at once; absent: device tokens // 512, from 1 to 256",
        low=1,
        high=4096,
    )
    chunked_prefill_size: int | None = flag(
        None,
        "scheduling",
        "most rows of one step; -1 turns chunking off; absent: 512 on CPU, 4096 on CUDA",
        low=-1,
    )
    schedule_policy: Literal["fcfs", "lpm"] = flag(
        "fcfs",
        "scheduling",
        "order of waiting requests: first come first served, or longest cached prefix first",
    )

    # ---- operation ----
    watchdog_timeout: float = flag(
        60.0, "operation", "seconds without progress after which /health is 503", low=0.1, high=86400
    )
    drain_timeout: float = flag(
        30.0, "operation", "seconds that SIGTERM leaves to running requests", low=0, high=86400
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "operation", "how much the ranks log"
    )


def engine_flag(name: str) -> Any:
    """A field of another command's flags that is the one of `EngineConfig`: default, help and range."""
    item = EngineConfig.__dataclass_fields__[name]
    return field(default=item.default, metadata=item.metadata)


def parse_flags(arguments: Iterable[str], *, program: str = "server.py") -> EngineConfig:
    """Read a command line. Raises ConfigError with one line; `--help` prints and exits with 0."""
    purpose = "Serve a language model over pipeline stages that stay in agreement."
    return check(read_flags(EngineConfig, arguments, program=program, purpose=purpose))


def read_flags(kind: type[_Flags], arguments: Iterable[str], *, program: str, purpose: str) -> _Flags:
    """Read a command line into a dataclass whose fields are made by `flag`. Raises ConfigError; `--help` exits with 0.

    Each value is checked by itself; what no single flag shows is the caller's to check.
    """
    parser = _Parser(prog=program, description=purpose, allow_abbrev=False)
    parser.flags = [flag_name(item.name) for item in dataclasses.fields(kind)]
    hints = typing.get_type_hints(kind)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for item in dataclasses.fields(kind):
        group_name = item.metadata["group"]
        if group_name not in groups:
            groups[group_name] = parser.add_argument_group(group_name)
        name = flag_name(item.name)
        shown = "" if item.default is None or item.default is False else f" (default {item.default})"
        help_text = (item.metadata["help"] + shown).replace("%", "%%")
        if hints[item.name] is bool:
            groups[group_name].add_argument(name, dest=item.name, action="store_true", help=help_text)
        else:
            groups[group_name].add_argument(
                name, dest=item.name, default=None, metavar=_metavar(hints[item.name]), help=help_text
            )
    given = vars(parser.parse_args([_with_hyphens(argument) for argument in arguments]))
    values: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        text = given[item.name]
        if text is True or text is None or text is False:
            values[item.name] = text if text is True else item.default
        else:
            values[item.name] = _read(item, hints[item.name], text)
    return kind(**values)


def check_values(config: DataclassInstance) -> None:
    """Check type and range of each field by itself, for values made in code. Raises ConfigError."""
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        _check_value(item, hints[item.name], getattr(config, item.name))


def check(config: EngineConfig) -> EngineConfig:
    """Check what no single flag shows, and types and ranges for configurations made in code. Raises ConfigError."""
    check_values(config)
    if config.chunked_prefill_size not in (None, -1) and config.chunked_prefill_size < config.page_size:
        raise ConfigError(
            f"--chunked-prefill-size {config.chunked_prefill_size}: allowed is -1 (off) "
            f"or at least --page-size, which is {config.page_size}"
        )
    if config.max_total_tokens is not None and config.max_total_tokens < config.page_size:
        raise ConfigError(
            f"--max-total-tokens {config.max_total_tokens}: allowed is at least --page-size, "
            f"which is {config.page_size}"
        )
    _check_host_tier(config)
    _check_capacities_can_differ(config)
    if config.tp_size != 1:
        raise ConfigError(f"--tp-size {config.tp_size}: allowed is 1; tensor parallelism is not done yet")
    if config.pp_layer_partition is not None:
        shown = ",".join(map(str, config.pp_layer_partition))
        if len(config.pp_layer_partition) != config.pp_size:
            raise ConfigError(
                f"--pp-layer-partition {shown}: has {len(config.pp_layer_partition)} counts; "
                f"allowed is one per stage, and --pp-size is {config.pp_size}"
            )
        if min(config.pp_layer_partition) < 1:
            raise ConfigError(f"--pp-layer-partition {shown}: allowed are whole numbers of at least 1")
    return config


def _check_host_tier(config: EngineConfig) -> None:
    if config.enable_hierarchical_cache and config.disable_radix_cache:
        raise ConfigError(
            "--enable-hierarchical-cache, --disable-radix-cache: allowed is one of them; the host tier holds prefixes"
        )
    if 0 < config.hicache_size < 1e-9:
        raise ConfigError(f"--hicache-size {config.hicache_size}: allowed is 0 or at least one byte, 1e-09")
    if config.enable_hierarchical_cache:
        return
    for item in dataclasses.fields(EngineConfig):
        value = getattr(config, item.name)
        if item.metadata["group"] == "host tier" and value != item.default:
            shown = "" if value is True else f" {value}"
            raise ConfigError(f"{flag_name(item.name)}{shown}: allowed with --enable-hierarchical-cache only")


def _check_capacities_can_differ(config: EngineConfig) -> None:
    if config.debug_unagreed_hicache and not (config.hicache_size > 0 and config.pp_size > 1):
        raise ConfigError(
            "--debug-unagreed-hicache: allowed with --hicache-size above 0 and --pp-size above 1 only, "
            "for else stages cannot differ"
        )


def check_model(config: EngineConfig, context_length: int) -> None:
    """Check the flags against the model, which allows `context_length` tokens. Raises ConfigError."""
    if config.context_length is not None and config.context_length > context_length:
        raise ConfigError(
            f"--context-length {config.context_length}: allowed is at most {context_length}, the model's own"
        )


def as_flags(config: EngineConfig) -> list[str]:
    """The command line that `parse_flags` turns into this configuration; fields at their default are left out."""
    flags: list[str] = []
    for item in dataclasses.fields(EngineConfig):
        value = getattr(config, item.name)
        if value == item.default:
            continue
        flags.append(flag_name(item.name))
        if value is not True:
            flags.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return flags


def flag_name(field_name: str) -> str:
    """The flag of a field: `pp_size` -> `--pp-size`."""
    return "--" + field_name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are one ConfigError."""

    flags: Sequence[str] = ()
    """All there are, to find the one that was meant."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0].split("=")[0]
            near = difflib.get_close_matches(word, self.flags, n=1)
            message = f"{word}: no such flag" + (
                f"; did you mean {near[0]}?" if near else "; --help lists them all"
            )
        raise ConfigError(message.removeprefix("argument "))


def _with_hyphens(argument: str) -> str:
    """Accept `--pp_size` for `--pp-size`; values keep their underscores."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _plain_type(hint: Any) -> Any:
    """The type of a field without its `| None`."""
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not types.NoneType)
    return hint


def _metavar(hint: Any) -> str:
    plain = _plain_type(hint)
    if typing.get_origin(plain) is Literal:
        return "{" + ",".join(typing.get_args(plain)) + "}"
    return {int: "N", float: "X", str: "TEXT"}.get(plain, "N,N,...")


def _read(item: dataclasses.Field[Any], hint: Any, text: str) -> Any:
    """Turn a flag's text into its field's value. Raises ConfigError."""
    plain = _plain_type(hint)
    name = flag_name(item.name)
    if plain is str or typing.get_origin(plain) is Literal:
        _check_value(item, hint, text)
        return text
    try:
        if typing.get_origin(plain) is tuple:
            return tuple(int(part) for part in text.split(","))
        value = plain(text)
    except ValueError:
        raise ConfigError(f"{name} {text}: allowed is {_allowed(item, plain)}") from None
    _check_value(item, hint, value)
    return value


def _allowed(item: dataclasses.Field[Any], plain: Any) -> str:
    if typing.get_origin(plain) is Literal:
        return f"one of {', '.join(typing.get_args(plain))}"
    if typing.get_origin(plain) is tuple:
        return "a list of whole numbers like 20,20,19,19"
    if plain is str or plain is bool:
        return "a text that is not empty" if plain is str else "True or False"
    low, high = item.metadata["low"], item.metadata["high"]
    kind = "a whole number" if plain is int else "a number"
    if low is not None and high is not None:
        return f"{kind} from {low} to {high}"
    return f"{kind} of at least {low}" if low is not None else kind


def _check_value(item: dataclasses.Field[Any], hint: Any, value: Any) -> None:
    """Raise ConfigError unless `value` is of its field's type and in its range."""
    plain = _plain_type(hint)
    if value is None and plain is not hint:
        return
    low, high = item.metadata["low"], item.metadata["high"]
    # Written so that NaN, which compares false with everything, is refused too.
    if _has_type(plain, value) and (low is None or value >= low) and (high is None or value <= high):
        return
    shown = (
        value if isinstance(value, str) and value and plain is not int and plain is not float else repr(value)
    )
    raise ConfigError(f"{flag_name(item.name)} {shown}: allowed is {_allowed(item, plain)}")


def _has_type(plain: Any, value: Any) -> bool:
    if typing.get_origin(plain) is Literal:
        return isinstance(value, str) and value in typing.get_args(plain)
    if typing.get_origin(plain) is tuple:
        return isinstance(value, tuple) and all(type(part) is int for part in value)
    if plain is str:
        return isinstance(value, str) and bool(value)
    # bool is a kind of int, but nobody means True by --pp-size 1.
    return type(value) is plain or (plain is float and type(value) is int)
