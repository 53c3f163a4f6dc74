"""Command lines and files become a config, and every fault is told at once."""

import dataclasses
import json

import pytest

from megatron_lite.config.flags import parse_config
from megatron_lite.config.notices import notices
from megatron_lite.config.rules import check_config
from megatron_lite.config.schema import Config, flag_fields
from megatron_lite.errors import UserError
from tests.config.lines import line


def refusal(words):
    with pytest.raises(UserError) as caught:
        parse_config(words, {})
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_no_flags_give_the_defaults():
    assert parse_config([], {}) == Config()


def test_values_take_their_types():
    config = parse_config(
        [
            "--num-layers",
            "3",
            "--lr=2e-4",
            "--data-path",
            "0.3",
            "a",
            "0.7",
            "b",
            "--rampup-batch-size",
            "2",
            "2",
            "8",
        ],
        {},
    )
    assert config.num_layers == 3
    assert config.lr == 2e-4
    assert config.data_path == ("0.3", "a", "0.7", "b")
    assert config.rampup_batch_size == (2, 2, 8)


def test_negative_numbers_are_values():
    assert parse_config(["--lr", "-1e-3"], {}).lr == -1e-3


def test_last_of_repeated_flags_wins():
    assert parse_config(["--seed", "1", "--seed", "2"], {}).seed == 2


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--disable-bias-linear", "add_bias_linear"),
        ("--no-position-embedding", "add_position_embedding"),
        ("--no-mmap-bin-files", "mmap_bin_files"),
        ("--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_loss_and_grad"),
    ],
)
def test_negative_flags_switch_off(flag, field):
    assert getattr(Config(), field) is True
    assert getattr(parse_config([flag], {}), field) is False


@pytest.mark.parametrize("kind", ["override", "use-checkpoint"])
def test_both_spellings_of_the_scheduler_flags(kind):
    old = parse_config([f"--{kind}-opt_param-scheduler"], {})
    assert old == parse_config([f"--{kind}-opt-param-scheduler"], {})
    assert old != Config()


def test_persistent_save_interval_is_an_alias():
    assert parse_config(["--persistent-save-interval", "7"], {}).save_interval == 7


def test_batch_schedule_may_come_as_several_words():
    config = parse_config(["--step-batch-size-schedule", "0:384", "200B:768", "--seed", "3"], {})
    assert config.step_batch_size_schedule == "0:384 200B:768"


def test_bracketed_list_is_a_list():
    sizes = parse_config(["--hierarchical-context-parallel-sizes", "[2 4]"], {})
    assert sizes.hierarchical_context_parallel_sizes == (2, 4)


def test_abbreviation_is_not_accepted():
    assert "unknown flag --num-layer: did you mean --num-layers" in refusal(["--num-layer", "2"])


def test_underscores_are_explained():
    assert "unknown flag --hidden_size: did you mean --hidden-size?" in refusal(["--hidden_size=8"])


def test_all_faults_of_a_line_are_told():
    words = "--nonsense 1 --num-layers two --lr nan --optimizer adamm stray --swiglu=maybe --seed"
    words += f" --ckpt-step {2**63}"
    message = refusal(words.split())
    for part in (
        "8 faults",
        f"'{2**63}' does not fit 64 bits",
        "unknown flag --nonsense",
        "'two' is not an integer",
        "'nan' is not a finite number",
        "'adamm' is not one of adam, sgd",
        "--swiglu maybe",
        "--seed: needs a value",
    ):
        assert part in message, message


def test_stray_words_are_told():
    assert "'64' stands alone" in refusal(["--hidden-size", "32", "64"])


def test_refused_flags_are_told_beside_other_faults():
    message = refusal(["--nonsense", "--perform-rl-step"])
    assert "reinforcement learning" in message


@pytest.mark.parametrize(
    "words",
    [
        "--pipeline-model-parallel-size 1 --context-parallel-size 1",
        "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1",
        "--cp-comm-type p2p --num-distributed-optimizer-instances 1",
        "--outer-dp-sharding-strategy no_shard --fp8-recipe tensorwise",
        "--moe-router-topk 4 --moe-token-dispatcher-type alltoall --kv-lora-rank 64",
    ],
)
def test_flags_without_effect_are_accepted(words):
    check_config(parse_config(line(words), {}), 1)


def test_harmless_flags_give_one_notice_per_reason():
    words = "--use-mcore-models --no-rope-fusion --ckpt-format torch_dist --no-bias-gelu-fusion"
    found = notices(parse_config(line(words), {}), 1)
    assert sum("--no-rope-fusion" in text for text in found) == 1
    assert any("--ckpt-format torch_dist" in text for text in found)
    assert any("--no-rope-fusion, --no-bias-gelu-fusion" in text for text in found)


def test_gated_flag_tells_what_it_needs():
    found = notices(parse_config(line("--moe-ffn-hidden-size 64"), {}), 1)
    assert any("no effect without --num-experts" in text for text in found)


def test_sequence_parallel_without_tensor_parallel_gives_one_notice():
    found = notices(parse_config(line("--sequence-parallel"), {}), 1)
    assert sum("--sequence-parallel" in text for text in found) == 1


def test_ungated_query_groups_give_a_notice():
    found = notices(parse_config(line("--num-query-groups 2"), {}), 1)
    assert any("--group-query-attention" in text for text in found)


def test_dropout_default_gives_a_notice():
    assert any("0.1" in text and "dropout" in text for text in notices(Config(), 1))
    off = parse_config(line("--hidden-dropout 0.0 --attention-dropout 0.0"), {})
    assert not any("dropout" in text for text in notices(off, 1))


def test_help_shows_every_field(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_config(["--help"], {})
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for field in flag_fields():
        names = field.metadata["names"] or ("--" + field.name.replace("_", "-"),)
        assert f"  {names[0]}" in text
        assert field.metadata["doc"].split()[0] in text
    assert "[unit: layers]" in text


def test_help_comes_from_one_rank(capsys):
    with pytest.raises(SystemExit):
        parse_config(["--help"], {"RANK": "1"})
    assert capsys.readouterr().out == ""


def test_command_line_wins_over_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_layers: 2\nlr: 1e-4\nswiglu: true\ndata_path: [a, b, c]\n")
    config = parse_config(["--num-layers", "8", "--config-file", str(path), "--swiglu=false"], {})
    assert config.num_layers == 8
    assert config.lr == 1e-4
    assert config.swiglu is False
    assert config.data_path == ("a", "b", "c")


def test_json_file_equals_yaml_file(tmp_path):
    values = {"hidden-size": 64, "add_bias_linear": False, "rampup_batch_size": [2, 2, 8]}
    (tmp_path / "run.json").write_text(json.dumps(values))
    (tmp_path / "run.yaml").write_text(
        "\n".join(f"{k}: {json.dumps(v)}" for k, v in values.items())
    )
    configs = [
        parse_config(["--config-file", str(tmp_path / name)], {})
        for name in ("run.json", "run.yaml")
    ]
    same = [dataclasses.replace(config, config_file=None) for config in configs]
    assert same[0] == same[1]
    assert same[0].hidden_size == 64 and same[0].add_bias_linear is False


def test_all_faults_of_a_file_are_told(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_layer: 2\nhidden_size: big\nswiglu: 1\nseed: [1]\nlr: null\neval_iters:\n")
    message = refusal(["--config-file", str(path)])
    for part in ("did you mean num_layers", "'big'", "1 is not true or false", "[1]", "eval_iters"):
        assert part in message, message
    assert "lr:" not in message


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [1\n", None])
def test_unusable_file_is_one_message(tmp_path, content):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content)
    assert str(path) in refusal(["--config-file", str(path)])


def test_refused_key_of_a_file_is_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("perform_rl_step: true\nuse_mcore_models: true\n")
    path.write_text("perform_rl_step: true\n")
    config = parse_config([*line(), "--config-file", str(path)], {})
    with pytest.raises(UserError, match="reinforcement"):
        check_config(config, 1)


@pytest.mark.parametrize("words", [["--save", ""], ["--load="], ["--data-path", " "]])
def test_empty_text_is_not_taken_for_a_flag_left_out(words):
    # `--save "$SAVE"` with the variable unset would train for days and keep nothing.
    with pytest.raises(UserError, match=f"{words[0].rstrip('=')} ' *': needs a value"):
        parse_config([*line(), *words], {})


def test_nul_characters_are_told():
    with pytest.raises(UserError, match="NUL"):
        parse_config([*line(), "--save", "a\0b"], {})


def test_an_abbreviation_is_answered_with_the_whole_flag():
    with pytest.raises(UserError, match="unknown flag --seq: did you mean --seq-length"):
        parse_config([*line(), "--seq", "4"], {})


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.yaml", "lr: 1\nlr: 2\n", "lr: given more than once"),
        ("x.json", '{"lr": 1, "lr": 2}', "lr: given more than once"),
        ("x.yaml", "seq-length: 1\nseq_length: 2\n", "seq_length is given twice"),
        ("x.yaml", "config_file: y.yaml\n", "cannot name another"),
        ("x.yaml", "lr: " + "[" * 5000 + "]" * 5000, "recursion"),
        ("x.json", '{"lr": ' + "[" * 100_000 + "]" * 100_000 + "}", "recursion"),
        ("x.json", '{"seed": ' + "1" * 5000 + "}", "digits"),
        ("x.yaml", BOMB + "hidden_size: *i\n", "is a list; expected an integer"),
        ("x.yaml", BOMB + "data_path: *i\n", "expected a list of plain values"),
    ],
)
def test_hostile_file_is_told_at_once(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=said) as caught:
        parse_config([*line(), "--config-file", str(path)], {})
    assert len(str(caught.value)) < 2000
