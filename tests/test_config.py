"""Flags: each field has one, and a wrong value is one line naming the flag, the value and what is allowed."""

import dataclasses
import subprocess
import sys

import pytest

from engine.config import ConfigError, EngineConfig, check, check_model, flag_name, parse_flags


def test_nothing_given_gives_the_documented_defaults():
    config = parse_flags([])
    assert config == EngineConfig()
    assert (config.host, config.port) == ("127.0.0.1", 30000)
    assert (config.pp_size, config.tp_size, config.page_size) == (1, 1, 16)
    assert (config.max_queued_requests, config.watchdog_timeout, config.drain_timeout) == (1024, 60.0, 30.0)
    assert (config.schedule_policy, config.disable_radix_cache) == ("fcfs", False)


def test_values_arrive_with_their_types():
    line = (
        "--model-path m --pp-size 4 --pp-layer-partition 20,20,19,19 --mem-fraction-static 0.5 "
        "--disable-radix-cache --dtype bfloat16 --chunked-prefill-size=-1 --port 0"
    )
    config = parse_flags(line.split())
    assert config == EngineConfig(
        model_path="m",
        pp_size=4,
        pp_layer_partition=(20, 20, 19, 19),
        mem_fraction_static=0.5,
        disable_radix_cache=True,
        dtype="bfloat16",
        chunked_prefill_size=-1,
        port=0,
    )


def test_underscores_in_a_flag_are_hyphens_and_in_a_value_they_stay():
    config = parse_flags(["--pp_size=2", "--served_model_name", "my_model", "--api-key=__a_b"])
    assert (config.pp_size, config.served_model_name, config.api_key) == (2, "my_model", "__a_b")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--port 65536", "--port 65536: allowed is a whole number from 0 to 65535"),
        ("--port x", "--port x: allowed is a whole number from 0 to 65535"),
        ("--pp-size 0", "--pp-size 0: allowed is a whole number from 1 to 1024"),
        ("--pp-size 1.5", "--pp-size 1.5: allowed is a whole number from 1 to 1024"),
        ("--page-size -16", "--page-size -16: allowed is a whole number from 1 to 4096"),
        ("--mem-fraction-static nan", "--mem-fraction-static nan: allowed is a number from 0.01 to 0.99"),
        ("--mem-fraction-static 1", "--mem-fraction-static 1.0: allowed is a number from 0.01 to 0.99"),
        ("--watchdog-timeout inf", "--watchdog-timeout inf: allowed is a number from 0.1 to 86400"),
        ("--max-queued-requests 0", "--max-queued-requests 0: allowed is a whole number of at least 1"),
        ("--dtype fp8", "--dtype fp8: allowed is one of auto, float32, bfloat16"),
        (
            "--pp-layer-partition a,b",
            "--pp-layer-partition a,b: allowed is a list of whole numbers like 20,20,19,19",
        ),
        (
            "--pp-layer-partition 3,2",
            "--pp-layer-partition 3,2: has 2 counts; allowed is one per stage, and --pp-size is 1",
        ),
        (
            "--pp-size 2 --pp-layer-partition 5,0",
            "--pp-layer-partition 5,0: allowed are whole numbers of at least 1",
        ),
        (
            "--chunked-prefill-size 8",
            "--chunked-prefill-size 8: allowed is -1 (off) or at least --page-size, which is 16",
        ),
        (
            "--chunked-prefill-size 0",
            "--chunked-prefill-size 0: allowed is -1 (off) or at least --page-size, which is 16",
        ),
        (
            "--max-total-tokens 15",
            "--max-total-tokens 15: allowed is at least --page-size, which is 16",
        ),
        ("--pp-sise 2", "--pp-sise: no such flag; did you mean --pp-size?"),
        ("--xyzzy", "--xyzzy: no such flag; --help lists them all"),
        ("--pp-size", "--pp-size: expected one argument"),
        ("model", "model: no such flag; --help lists them all"),
    ],
)
def test_a_wrong_value_is_one_line_that_helps(line, message):
    with pytest.raises(ConfigError) as raised:
        parse_flags(line.split())
    assert str(raised.value) == message


def test_an_empty_text_is_refused():
    with pytest.raises(ConfigError, match="--host '': allowed is a text that is not empty"):
        parse_flags(["--host", ""])


def test_a_prefix_of_a_flag_is_not_the_flag():
    with pytest.raises(ConfigError, match="--pp: no such flag"):
        parse_flags(["--pp", "2"])


def test_configurations_made_in_code_are_checked_alike():
    assert check(EngineConfig(pp_size=2)).pp_size == 2
    with pytest.raises(ConfigError, match="--page-size 0: allowed is"):
        check(EngineConfig(page_size=0))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("page_size", "16", "--page-size '16': allowed is a whole number from 1 to 4096"),
        ("page_size", 16.0, "--page-size 16.0: allowed is a whole number from 1 to 4096"),
        ("page_size", None, "--page-size None: allowed is a whole number from 1 to 4096"),
        ("pp_size", True, "--pp-size True: allowed is a whole number from 1 to 1024"),
        ("disable_radix_cache", 1, "--disable-radix-cache 1: allowed is True or False"),
        ("dtype", "int8", "--dtype int8: allowed is one of auto, float32, bfloat16"),
        ("dtype", None, "--dtype None: allowed is one of auto, float32, bfloat16"),
        ("model_path", 3, "--model-path 3: allowed is a text that is not empty"),
        ("host", "", "--host '': allowed is a text that is not empty"),
        (
            "pp_layer_partition",
            [1],
            "--pp-layer-partition [1]: allowed is a list of whole numbers like 20,20,19,19",
        ),
        (
            "pp_layer_partition",
            (1.0,),
            "--pp-layer-partition (1.0,): allowed is a list of whole numbers like 20,20,19,19",
        ),
        ("watchdog_timeout", "x", "--watchdog-timeout 'x': allowed is a number from 0.1 to 86400"),
    ],
)
def test_a_value_of_another_type_made_in_code_is_one_line(field, value, message):
    with pytest.raises(ConfigError) as raised:
        check(EngineConfig(**{field: value}))
    assert str(raised.value) == message


def test_whole_numbers_pass_for_numbers():
    assert check(EngineConfig(watchdog_timeout=5, mem_fraction_static=None)).watchdog_timeout == 5


def test_a_context_length_beyond_the_models_is_refused():
    check_model(EngineConfig(), 2048)
    check_model(EngineConfig(context_length=2048), 2048)
    with pytest.raises(ConfigError, match="--context-length 2049: allowed is at most 2048, the model's own"):
        check_model(EngineConfig(context_length=2049), 2048)


def test_every_field_has_a_flag_with_help_in_a_group():
    result = subprocess.run(
        [sys.executable, "-c", "from engine.config import parse_flags; parse_flags(['--help'])"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0
    for item in dataclasses.fields(EngineConfig):
        assert flag_name(item.name) in result.stdout.split(), item.name
        assert item.metadata["group"] + ":" in result.stdout
        assert item.metadata["help"]


def test_a_configuration_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().pp_size = 2
