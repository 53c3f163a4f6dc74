"""The rules: each fault is told with flags, values and the nearest legal values."""

import json
import subprocess
import sys

import pytest

from megatron_lite.config.flags import parse_config
from megatron_lite.config.legal import nearest_divisors, nearest_group_counts, nearest_multiples
from megatron_lite.config.rules import RULES, check_config, violations
from megatron_lite.config.schema import Config
from megatron_lite.errors import UserError
from tests.config.lines import line

PIPELINE2 = "--pipeline-model-parallel-size 2"
PER_STAGE2 = "--num-layers-per-virtual-pipeline-stage 2"

# world, flags, parts of the message: the ten bad commands and C032.
BAD_LAYOUTS = {
    "world": (
        4,
        "--tensor-model-parallel-size 3",
        ["--tensor-model-parallel-size 3", "world size 4", "2 or 4"],
    ),
    "heads": (
        4,
        "--num-attention-heads 6 --hidden-size 48 --tensor-model-parallel-size 4",
        ["--num-attention-heads 6", "--tensor-model-parallel-size 4", "3 or 6", "4 or 8"],
    ),
    "layers": (
        2,
        f"--num-layers 5 {PIPELINE2}",
        ["--num-layers 5", PIPELINE2, "4 or 6", "1 or 5"],
    ),
    "sequence": (
        2,
        "--seq-length 33 --tensor-model-parallel-size 2 --sequence-parallel",
        ["--seq-length 33", "--tensor-model-parallel-size 2", "32 or 34"],
    ),
    "precision": (1, "--fp16 --bf16", ["--fp16 and --bf16", "exclude"]),
    "experts": (
        3,
        "--num-experts 4 --expert-model-parallel-size 3",
        ["--num-experts 4", "--expert-model-parallel-size 3", "2 or 4", "3 or 6"],
    ),
    "no-experts": (
        2,
        "--expert-model-parallel-size 2",
        ["--expert-model-parallel-size 2", "--num-experts is not given"],
    ),
    "virtual": (1, PER_STAGE2, [PER_STAGE2, "--pipeline-model-parallel-size is 1", "2"]),
    "batch": (
        1,
        "--global-batch-size 10 --micro-batch-size 4",
        ["--global-batch-size 10", "--micro-batch-size 4", "8 or 12", "2 or 5"],
    ),
    "dropped-layers": (
        2,
        f"--num-layers 10 {PIPELINE2} {PER_STAGE2}",
        ["--num-layers 10", PIPELINE2, "5 % 2 = 1", "2 of 10 layers", "1 or 5", "8 or 12"],
    ),
}


def broken(text="", world=1, drop=""):
    return [rule for rule, _ in violations(parse_config(line(text, drop=drop), {}), world)]


def test_base_line_is_legal():
    check_config(parse_config(line(), {}), 1)


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_bad_layout_names_flags_values_and_legal_values(name):
    world, flags, parts = BAD_LAYOUTS[name]
    with pytest.raises(UserError) as caught:
        check_config(parse_config(line(flags), {}), world)
    assert caught.value.exit_code == 2
    for part in parts:
        assert part in str(caught.value)


def test_all_bad_layouts_of_one_command_are_told():
    flags = (
        "--tensor-model-parallel-size 3 --num-attention-heads 8 --seq-length 32 --fp16 --bf16 "
        "--sequence-parallel --num-layers 5 --pipeline-model-parallel-size 2 --num-experts 4 "
        "--expert-model-parallel-size 3"
    )
    found = broken(flags, world=4)
    for rule in (
        "world-divides",
        "heads-divide-tp",
        "sequence-divides-tp",
        "one-precision",
        "layers-divide-pp",
        "experts-divide-ep",
        "refused-flags",
    ):
        assert rule in found


def test_layers_that_divide_lose_nothing():
    found = violations(parse_config(line(f"--num-layers 8 {PIPELINE2} {PER_STAGE2}"), {}), 2)
    assert found == []


@pytest.mark.parametrize("name", ["world", "precision", "dropped-layers"])
def test_bad_command_ends_with_one_message_and_code_2_without_torch(name):
    world, flags, parts = BAD_LAYOUTS[name]
    program = (
        "import json, sys\n"
        "from megatron_lite.config.flags import parse_config\n"
        "from megatron_lite.config.rules import check_config\n"
        "from megatron_lite.errors import UserError\n"
        "code = 0\n"
        "try:\n"
        "    check_config(parse_config(json.loads(sys.argv[1]), {}), int(sys.argv[2]))\n"
        "except UserError as error:\n"
        "    print(error, file=sys.stderr)\n"
        "    code = error.exit_code\n"
        "assert not {'torch', 'numpy', 'yaml'} & set(sys.modules), 'slow import'\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(line(flags)), str(world)],
        capture_output=True,
        text=True,
        timeout=5,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("configuration refused") == 1
    assert "Traceback" not in done.stderr
    assert all(part in done.stderr for part in parts)


def test_empty_config_is_told_all_required_flags():
    with pytest.raises(UserError) as caught:
        check_config(Config(), 1)
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "lr"):
        assert f"--{name} is required" in str(caught.value)


CASES = [
    ("hidden-divides", "--hidden-size 65", "heads-divide-hidden"),
    ("positions", "--seq-length 128", "positions-cover-sequence"),
    ("kv-heads", "--group-query-attention --num-query-groups 3", "kv-heads-divide-heads"),
    ("rotary", "--position-embedding-type rope --rotary-percent 0.4375", "rotary-even"),
    ("rotary-percent", "--rotary-percent 50", "rotary-percent"),
    ("dropout", "--hidden-dropout 1.0", "fraction-hidden-dropout"),
    ("min-lr", "--min-lr 1.0", "min-lr"),
    ("negative-lr", "--lr -1", "at-least-lr"),
    ("warmup", "--lr-warmup-iters 11", "warmup-in-decay"),
    ("warmup-twice", "--lr-warmup-iters 1 --lr-warmup-fraction 0.1", "warmup-once"),
    ("two-lengths", "--train-samples 100", "one-length"),
    ("samples-unit", "--lr-decay-samples 100", "schedule-unit-steps"),
    ("wsd", "--lr-decay-style WSD", "wsd"),
    ("weight-decay", "--weight-decay-incr-style linear", "weight-decay-increase"),
    ("schedulers", "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
     "one-scheduler-source"),
    ("two-sources", "--data-path a", "one-data-source"),
    ("split-text", "--split half", "split"),
    ("split-zero", "--split 0,0,0", "split"),
    ("split-four", "--split 1,1,1,1", "split"),
    ("save", "--save out", "save-needs-interval"),
    ("retain", "--save out --save-interval 10 --save-retain-interval 15", "retain-multiple"),
    ("keep", "--keep-last 2", "keep-needs-save"),
    ("url-key", "--load s3://KEY:SECRET@bucket/run", "url-credentials"),
    ("url-slash", "--load file:/runs/a", "url-spelling"),
    ("url-bucket", "--save s3:// --save-interval 5", "url-spelling"),
    ("url-token", "--save gs://b/run?token=SECRET --save-interval 5", "url-credentials"),
    ("memory-save", "--save memory://run --save-interval 5", "save-outlives-run"),
    ("ckpt-step", "--ckpt-step 5", "step-needs-load"),
    ("missing", "--load x --exit-on-missing-checkpoint --allow-missing-checkpoint",
     "missing-checkpoint"),
    ("seed", "--seed 0", "at-least-seed"),
    ("mbs", "--micro-batch-size 0", "at-least-micro-batch-size"),
    ("tp", "--tensor-model-parallel-size 0", "at-least-tensor-model-parallel-size"),
    ("full", "--recompute-granularity full", "recompute-full-method"),
    ("method", "--recompute-method uniform", "recompute-method-needs-full"),
    ("modules", "--recompute-granularity selective --recompute-modules mlp",
     "recompute-modules-built"),
    ("losses", "--calculate-per-token-loss --legacy-loss-normalization", "one-loss-normalization"),
    ("precisions", "--fp64 --bf16", "one-precision"),
    ("activations", "--swiglu --squared-relu", "one-activation"),
    ("positions-twice", "--position-embedding-type rope --no-position-embedding",
     "position-spellings"),
    ("optimizer", "--optimizer soap", "built-optimizer"),
    ("mrope", "--position-embedding-type mrope", "built-position-embedding-type"),
    ("fp16", "--fp16", "refused-flags"),
    ("fp8", "--fp8-format hybrid", "refused-flags"),
    ("sharding-twice", "--data-parallel-sharding-strategy no_shard --use-distributed-optimizer",
     "sharding-agrees"),
    ("fsdp-twice", "--use-torch-fsdp2 --use-distributed-optimizer", "sharding-agrees"),
    ("fsdp-less", "--use-torch-fsdp2 --data-parallel-sharding-strategy optim", "sharding-agrees"),
    ("gather", "--overlap-param-gather", "gather-needs-shards"),
    ("whole-gradients", "--gradient-accumulation unsharded --use-distributed-optimizer",
     "gradient-accumulation-needs-shards"),
    ("kept-parameters", "--reshard-after step --data-parallel-sharding-strategy optim_grads",
     "reshard-after-needs-shards"),
    ("no-copies", "--num-distributed-optimizer-instances 0",
     "at-least-num-distributed-optimizer-instances"),
    ("copies", "--num-distributed-optimizer-instances 3 --use-distributed-optimizer",
     "instances-divide"),
    ("bpe", "--vocab-file v.json --merge-file m.txt", "refused-flags"),
    ("hybrid", "--hybrid-layer-pattern M-M", "refused-flags"),
    ("schedule", "--pipeline-schedule 2f2b", "schedule-name"),
    ("ramp", "--rampup-batch-size 2 3 8 --global-batch-size 8", "rampup"),
    ("ramp-end", "--rampup-batch-size 2 2 8", "rampup"),
    ("ramp-unit", "--rampup-batch-size 1 1 8 --global-batch-size 8", "rampup"),
    ("steps", "--step-batch-size-schedule 5:4", "batch-schedule"),
    ("steps-text", "--step-batch-size-schedule 0:4,x:8", "batch-schedule"),
    ("steps-unit", "--step-batch-size-schedule 0:4,1K:9", "batch-schedule"),
    ("dump", "--debug-dump-weights", "weights-need-dump"),
    ("resume", "--allow-resume-change seedling", "resume-fields"),
    ("muon-steps", "--optimizer muon --muon-num-ns-steps 6", "muon-steps"),
    ("muon-blocks", "--optimizer muon --muon-tp-mode blockwise", "muon-whole-matrices"),
    ("muon-momentum", "--optimizer muon --muon-momentum 1", "fraction-muon-momentum"),
    ("muon-unused", "--muon-nesterov", "optimizer-flags"),
    ("muon-lion", "--optimizer muon --muon-scalar-optimizer lion", "built-muon-scalar-optimizer"),
    ("adafactor-unused", "--optimizer sgd --adafactor-beta1 0.5", "optimizer-flags"),
    ("group-words", "--param-group *.mlp.*", "param-groups"),
    ("group-key", "--param-group *:lr=2", "param-groups"),
    ("group-number", "--param-group *:lr_mult=-1", "param-groups"),
    ("group-twice", "--param-group *:lr_mult=1,lr_mult=2", "param-groups"),
    ("decoupled-min", "--decoupled-lr 1e-4 --decoupled-min-lr 1e-3", "decoupled-min-lr"),
    ("decoupled-min-lr", "--min-lr 1e-3 --decoupled-lr 1e-4", "decoupled-min-lr"),
    ("decoupled-alone", "--decoupled-min-lr 1e-3", "decoupled-needs-lr"),
    ("decoupled-init", "--lr-warmup-init 5e-4 --decoupled-lr 1e-4", "decoupled-warmup-init"),
    ("offload-twice", "--optimizer-cpu-offload --optimizer-offload disk --offload-dir d",
     "offload-once"),
    ("offload-where", "--optimizer-offload disk", "offload-directory"),
    ("offload-dir", "--offload-dir d", "offload-directory"),
    ("offload-share", "--optimizer-cpu-offload --optimizer-offload-fraction 1.5",
     "offload-fraction"),
    ("offload-share-of-nothing", "--optimizer-offload-fraction 0.5", "offload-fraction-idle"),
    ("offload-muon", "--optimizer muon --optimizer-offload cpu", "offload-optimizer"),
    ("offload-average", "--optimizer-offload cpu --weight-ema-decay 0.9", "offload-average"),
    ("narrow", "--exp-avg-dtype bf16", "state-dtypes-gate"),
    ("narrow-sgd", "--optimizer sgd --use-precision-aware-optimizer", "state-dtypes-optimizer"),
    ("narrow-fp64", "--fp64 --use-precision-aware-optimizer --exp-avg-dtype bf16",
     "state-dtypes-fp64"),
    ("narrow-fp8", "--use-precision-aware-optimizer --exp-avg-sq-dtype fp8",
     "built-exp-avg-sq-dtype"),
    ("narrow-masters", "--use-precision-aware-optimizer --main-params-dtype fp16",
     "built-main-params-dtype"),
    ("gradients", "--grad-reduce-in-bf16", "gradients-in-bf16"),
    ("gradients-twice", "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 "
     "--accumulate-allreduce-grads-in-fp32", "one-gradient-dtype"),
    ("gradients-muon", "--bf16 --grad-reduce-in-bf16 --optimizer muon", "bf16-gradients-optimizer"),
    ("average", "--eval-with-ema", "average-to-evaluate"),
    ("average-one", "--weight-ema-decay 1", "fraction-weight-ema-decay"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "rule"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_rule_is_told(flags, rule):
    assert rule in broken(flags)


@pytest.mark.parametrize(
    ("drop", "rule"),
    [
        ("--mock-data", "one-data-source"),
        ("--train-iters", "one-length"),
        ("--tokenizer-type", "tokenizer-required"),
        ("--vocab-size", "tokenizer-vocabulary"),
        ("--lr", "lr-required"),
    ],
)
def test_missing_flag_is_told(drop, rule):
    assert rule in broken(drop=drop)


@pytest.mark.parametrize(
    ("words", "legal"),
    [
        ("a", True),
        ("a b", True),
        ("0.3 a 0.7 b", True),
        ("a b c", True),
        ("0.3 a b c", False),
        ("0.3 a 0.7", False),
        ("0 a 1 b", False),
    ],
)
def test_blend_words(words, legal):
    assert ("blend" not in broken(f"--data-path {words}", drop="--mock-data")) == legal


@pytest.mark.parametrize(
    "text",
    [
        "--eval-iters 0",
        "--split 100,0,0",
        "--train-iters 0",
        "--lr-warmup-iters 10",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
        "--recompute-activations",
        "--fp64 --optimizer sgd",
        "--position-embedding-type rope --rotary-percent 0.5",
        "--rampup-batch-size 2 2 8 --global-batch-size 8",
        "--step-batch-size-schedule 0:4,1K:8",
    ],
)
def test_legal_variants_pass(text):
    assert broken(text) == []


@pytest.mark.parametrize(
    ("groups", "tp", "legal"),
    [(1, 8, True), (2, 8, True), (8, 8, True), (8, 2, True), (4, 8, True), (24, 8, True),
     (3, 8, False), (6, 4, False), (12, 8, False)],
)  # fmt: skip
def test_kv_heads_and_tensor_parallel(groups, tp, legal):
    text = (
        f"--num-attention-heads 24 --hidden-size 192 --group-query-attention --num-query-groups "
        f"{groups} --tensor-model-parallel-size {tp}"
    )
    assert ("kv-heads-fit-tp" not in broken(text, world=tp)) == legal


def test_nearest_legal_values():
    assert nearest_divisors(4, 3) == "2 or 4"
    assert nearest_divisors(7, 9) == "7"
    assert nearest_multiples(4, 10) == "8 or 12"
    assert nearest_multiples(4, 2) == "4"
    assert nearest_group_counts(24, 8, 3) == "2 or 4"


def test_rule_ids_are_unique():
    ids = [rule.id for rule in RULES]
    assert len(ids) == len(set(ids))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("--hidden-size 1000000000001", "at-most-hidden-size"),
        ("--seq-length 9000000000000000000", "at-most-seq-length"),
        ("--vocab-size 100000000000000", "at-most-vocab-size"),
        ("--num-layers 100000000000", "at-most-num-layers"),
        ("--seed 4294967296", "at-most-seed"),
        ("--distributed-timeout-minutes 99999999999999", "at-most-distributed-timeout-minutes"),
        ("--global-batch-size 1000000000 --rampup-batch-size 2 2 1000", "rampup"),
    ],
)
def test_huge_numbers_are_refused_without_trying_them(flags, rule):
    assert rule in broken(flags)


def test_a_negative_rate_is_one_fault():
    assert broken("--lr -1") == ["at-least-lr"]
    assert broken("--lr 0 --min-lr 1") == ["min-lr"]
    assert broken("--train-iters -1", drop="--train-iters") == ["at-least-train-iters"]


@pytest.mark.parametrize("weight", ["nan", "inf"])
def test_a_weight_of_a_blend_is_finite(weight):
    assert "blend" in broken(f"--data-path {weight} a 1 b", drop="--mock-data")


@pytest.mark.parametrize("split", ["1e5,1", "nan,1,0", "98%,x", "9" * 400 + ",1,0"])
def test_a_split_is_made_of_plain_finite_numbers(split):
    words = [*line("--data-path a", drop="--mock-data"), "--split", split]
    assert "split" in [rule for rule, _ in violations(parse_config(words, {}), 1)]


@pytest.mark.parametrize(
    "flags",
    [
        "--train-samples 3 --global-batch-size 4",
        "--train-samples 1",
        "--train-samples 3 --global-batch-size 8 --rampup-batch-size 4 4 8",
        "--train-samples 3 --step-batch-size-schedule 0:4",
    ],
)
def test_fewer_samples_than_a_step_are_refused(flags):
    assert broken(flags, drop="--train-iters") == ["samples-of-a-step"]
    more = flags.replace("samples 3", "samples 4").replace("samples 1", "samples 2")
    assert broken(more, drop="--train-iters") == []
