"""The command line: exit codes and messages for what people get wrong."""

import json
import re
import shutil
from pathlib import Path

import pytest

from shardloop.cli.main import main
from shardloop.tiny import build_tiny

Result = tuple[int, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    def call(*arguments: str) -> Result:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:  # the option parser's way out
            code = int(exit_.code or 0)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=0)


def copy(tiny: Path, folder: Path, **changes: object) -> Path:
    """The tiny model with other settings in its config.json."""
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--preset", "huge"], 2, "no preset 'huge'; choose from calculator, smollm2, tiny"),
        (["--model", "/no/such/model", "--task", "sort"], 2, "no such folder"),
        (["--model", "/no/such/model"], 2, "add --task"),
        (["--task", "sorting"], 2, "task='sorting' is unknown"),
        (["--reward", "exakt"], 2, "reward='exakt' is unknown"),
        (["--reward", "no.module:f"], 2, "importing no.module failed"),
        (["--grpo.samples-per-prompt", "1"], 2, "samples-per-prompt=1"),
        (["--engine.layout", "engine:tp=3"], 2, "tp=3 does not divide"),
        (["--engine.layout", "engine:tp=0"], 2, "tp=0"),
        (["--trainer.layout", "tp=2,fsdp=2"], 2, "trainer.layout='tp=2,fsdp=2'"),
        (["--trainer.sequence-parallel"], 2, "add tp=2 or more to the layout"),
        (["--engine.layout", "engine:tp=2,replicas=2"], 2, "cannot be run; choose engine:tp=N"),
        (["--zero-gap"], 2, "zero-gap needs trainer and engine to compute alike"),
        (
            ["--grpo.overlong", "penalty", "--grpo.overlong-buffer", "8"],
            *(2, "overlong-buffer=8 with sampling.max-tokens=7; choose a buffer from 1 to 7"),
        ),
        (["--engine.layout", "fsdp=2"], 2, "engine.layout='fsdp=2' cannot be run"),
        (["--trainer.layout", "mesh=2"], 2, "axis"),
        (["--sampling.temperature", "0"], 2, "temperature"),
        (["--sampling.max-tokens", "9999"], 2, "context of 128"),
        (["--steps", "0"], 2, "steps=0"),
        (["--resume", "/no/such/run"], 2, "no manifest.json"),
        (["--seeds", "0"], 2, "seeds=0"),
        (["--seed", "2147483647", "--seeds", "2"], 2, "seed=2147483648"),
        (["--out", "/proc/nosuch", "--name", "a", "--workers.device", "cuda"], 2, "4 ranks"),
        (["--no-such-flag"], 2, "no-such-flag"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(run, arguments, code, message) -> None:
    got, text = run("train", *arguments, "--check")
    assert (got, message in text) == (code, True), text
    assert "Traceback" not in text


def test_check_prints_the_run_in_a_line_a_group_and_runs_nothing(run, tmp_path: Path) -> None:
    code, text = run("train", "--preset", "tiny", "--check", "--out", tmp_path / "runs")
    assert code == 0
    rows = dict(re.findall(r"^(\S.*?)  +(.*)$", text, flags=re.MULTILINE))
    for name, told in {
        "model": "tiny (built in, qwen3, 0.10 M parameters)",
        "task": "sort, judged by exact; e.g. ",
        "sampling": "at most 7 tokens, temperature 1",
        "SFT": "100 steps of 64 examples; learning rate 0.002, constant",
        "GRPO": "150 steps of 16 prompts x 16 samples = 256 completions",
        "algorithm": "grpo advantages (std: sample)",
        "optimizer": "learning rate 0.0003, cosine after 5 warm-up steps",
        "held out": "256 prompts, greedy and sampled, before, every 25 steps and after",
        "trainer": "fsdp=2 on ranks [0, 1]",
        "engine": "engine:tp=2 on ranks [2, 3]",
        "each sync": "p2p: 410 kB on the wire, least possible 410 kB",
        "folder": str(tmp_path / "runs" / "tiny-seed0"),
    }.items():
        assert rows[name].startswith(told), text
    assert re.fullmatch(r"\w{12}, proved: it writes every element .* once", rows["plan"])
    assert "ppo loss, clipped at 1-0.2 and 1+0.2, token-mean; KL 0.001 (k3, in the loss)" in text
    assert "correction by token, truncated at 2" in " ".join(text.split())
    assert len(text.splitlines()) <= 18
    assert max(map(len, text.splitlines())) <= max(100, len(rows["folder"]) + 12)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("train", ["--trainer.layout", "fsdp=1", "--workers.colocate"]),
        ("sft", ["--trainer.layout", "fsdp=2"]),
        ("eval", ["--model", "tiny", "--task", "sort", "--engine.layout", "engine:replicas=2"]),
        ("generate", ["--model", "tiny", "--prompt", "12", "--engine.layout", "engine:tp=2"]),
    ],
)
def test_gpus_that_are_not_there_are_refused_by_every_command(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    out = ["--out", tmp_path / "out"] if command in ("train", "sft") else []
    code, text = run(command, *arguments, *out, "--workers.device", "cuda")
    assert code == 2 and "with 2 ranks, but torch sees 1 GPUs" in text, text
    assert not (tmp_path / "out" / "tiny-seed0").exists()


def test_a_model_folder_must_be_whole_and_fit_its_tokenizer(run, tiny, tmp_path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    small = copy(tiny, tmp_path / "small", vocab_size=20)
    gpt2 = copy(tiny, tmp_path / "gpt2", model_type="gpt2")
    windows = copy(tiny, tmp_path / "windows", use_sliding_window=True)
    for folder, message in (
        (empty, "no config.json"),
        (small, "shape of model.embed_tokens.weight is (52, 64), it must be (20, 64)"),
        (gpt2, "gpt2"),
        (windows, f"{windows}: config.json: use_sliding_window=True"),
    ):
        code, text = run("train", "--model", folder, "--task", "sort", "--check")
        assert (code, message in text) == (2, True), text


@pytest.mark.parametrize("arguments", [["generate", "--prompt", "1"], ["eval", "--task", "sort"]])
def test_a_folder_that_is_no_model_says_what_it_is(
    run, tmp_path: Path, arguments: list[str]
) -> None:
    code, text = run(*arguments, "--model", tmp_path / "none")
    assert code == 2 and f"model='{tmp_path / 'none'}': no such folder" in text, text
    (tmp_path / "manifest.json").write_text("{}")
    code, text = run(*arguments, "--model", tmp_path)
    assert code == 2 and f"the model that it trained is in {tmp_path / 'export'}" in text, text


def test_prompts_that_cannot_be_used_name_themselves(run, tiny, tmp_path) -> None:
    good = [{"prompt": f"{i}>", "answer": str(i)} for i in range(40)]
    for records, message in (
        ([], "no prompts in it"),
        ([*good, {"prompt": "", "answer": "1", "split": "train"}], "task.jsonl:41"),
        ([{"prompt": "1" * 500, "answer": "1"}, *good], "context"),
        ([{"answer": "1"}], "prompt"),
    ):
        path = jsonl(tmp_path / "task.jsonl", *records)
        code, text = run("train", "--model", tiny, "--task", path, "--check")
        assert (code, message in text) == (3, True), text


def test_sft_writes_a_folder_on_which_eval_and_generate_agree(run, tmp_path) -> None:
    out = tmp_path / "tuned"
    quick = ("--sft.steps", 2, "--sft.batch-size", 8, "--trainer.layout", "fsdp=1")
    code, text = run("sft", "--out", out, *quick)
    assert code == 0 and f"warm start: {out}" in text
    assert run("sft", "--out", out, *quick)[0] == 2
    code, text = run("eval", "--model", out, "--task", "sort", "--prompts", 4, "--show", 1)
    assert code == 0 and " on 4 held-out prompts" in text
    found = re.search(r"'(.*)' -> '(.*)'  reward", text)
    assert found is not None
    code, text = run("generate", "--model", out, "--prompt", found[1], "--max-tokens", 16)
    assert code == 0 and text.startswith(f"prompt {found[1]!r}\n")
    assert text.split("] ", 1)[1] == found[2] + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("eval --model tiny --task sort --temperature nan", "temperature=nan"),
        ("eval --model tiny --task sort --temperature -1", "temperature=-1"),
        ("eval --model tiny --task sort --prompts 0", "prompts=0; choose 1 or more"),
        ("eval --model tiny --task sort --show -1", "show=-1"),
        ("generate --model tiny --prompt 12 --top-p 2", "top_p=2"),
        ("generate --model tiny --prompt 12 --max-tokens 0", "max_tokens=0"),
        ("report nosuch", "nosuch: no manifest.json"),
    ],
)
def test_a_wrong_option_of_the_other_commands_is_one_clear_error(run, arguments, message) -> None:
    code, text = run(*arguments.split())
    assert (code, message in text) == (2, True), text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("eval", ["--engine.sleep", "--workers.colocate"]),
        ("generate", ["--engine.sleep", "--workers.colocate"]),
        ("sft", ["--workers.colocate"]),
    ],
)
def test_a_command_has_no_option_that_it_would_not_heed(run, command, flags) -> None:
    code, text = run(command, "--help")
    assert code == 0 and "--workers.timeout-s" in text
    assert not [flag for flag in flags if flag in text]
    for flag in flags:
        assert run(command, flag, "cache")[0] == 2


@pytest.mark.parametrize("command", ["train", "eval", "sft"])
def test_help_tells_every_kind_of_task(run, command) -> None:
    _, text = run(command, "--help")
    assert "package.module:function" in " ".join(text.replace("\u2502", " ").split())
