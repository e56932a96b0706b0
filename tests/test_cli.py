"""The command line: help, what is not imported, JSON, exit codes."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from marks import only

from fivefold.cli import options
from fivefold.cli.main import app, main, prepare
from fivefold.cli.options import examples, save_as
from fivefold.errors import BusyError
from fivefold.recipe import Recipe
from fivefold.recipe.messages import KEYS, allowed
from fivefold.schedules.pipeline import SCHEDULES
from fivefold_plan.commands import bench, plan

COMMANDS = (
    "train", "check", "plan", "plan search", "plan terms", "plan trace", "plan calibrate", "recipes", "tokenize",
    "eval", "generate", "chat", "report", "export", "import",
)  # fmt: skip
EXAMPLES = Path(options.__file__).with_name("examples.txt").read_text(encoding="utf-8").splitlines()


def run(*arguments: str) -> int:
    """Runs a command in this process; the exit code."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code or 0)


@pytest.fixture
def text_recipe(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("To be, or not to be: that is the question.\n" * 400, encoding="utf-8")
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'[model]\nseq_len = 16\n[data]\nsource = "{tmp_path / "text.txt"}"\ntokenizer = "bytes"\n'
        f'cache = "{tmp_path / "cache"}"\n[train]\nsteps = 5\nglobal_batch_size = 4\n',
        encoding="utf-8",
    )
    return path


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_help_of_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "hardware", "--help") == 0
    assert "fivefold bench hardware --json" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*name.split(), "--help") == 0
    out = capsys.readouterr().out
    assert f"Usage: fivefold {name}" in out
    examples = out.partition("Examples:\n")[2].split("\n")
    assert [line.strip() for line in examples if line.strip()] == [
        example
        for example in EXAMPLES
        if re.search(rf"fivefold {name}(?! (search|terms|trace|calibrate))\b", example)
    ]


def test_each_example_is_of_one_command() -> None:
    names = [command.name for command in app.registered_commands]
    names += [f"bench {command.name}" for command in bench.bench.registered_commands]
    shown = [line.strip() for name in names for line in examples(str(name)).split("\n") if "fivefold" in line]
    assert sorted(shown) == sorted(EXAMPLES)


def test_help_names_values_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", "--help") == 0
    assert "Usage: fivefold eval [OPTIONS] RUN [FILE...]\n" in capsys.readouterr().out
    for name in (*COMMANDS, "compare", "verify", "sweep"):
        assert run(*name.split(), "--help") == 0
        assert [*re.findall(r"<[a-z ]+>|[{}]", capsys.readouterr().out)] == [], name


def test_old_options_of_plan_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--search", "--exact", "--terms", "--calibrate"):
        assert run("plan", "quickstart", option) == 2
        assert "No such option" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["plan"], ["plan", "search"]])
def test_options_of_plan_stand_in_groups(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--help") == 0
    out = capsys.readouterr().out
    for title, names in plan.GROUPS.items():
        section = out.split(f"\n{title}:\n")[1].split("\n\n")[0]
        found = re.findall(r"^  --([a-z-]+)", section, re.MULTILINE)
        alone = {"software"} if command[1:] else set()  # layouts are searched for this program only
        assert {*found} == {name.replace("_", "-") for name in {*names} - alone}


def test_help_is_in_groups_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert run(*name.split(), "--help") == 0
        shown = capsys.readouterr().out
        assert len(shown.splitlines()) <= 56, name
        assert name not in ("train", "eval") or "\n\nOutput:\n  --" in shown


def test_check_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom fivefold.cli.main import main, prepare\ntry: main(['check', 'quickstart', '--explain'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("fivefold 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "quikstart"], "error: recipe 'quikstart': no such file"),
        (["check", "quickstart", "--set", "optim.lrr=3"], "did you mean 'lr'?"),
        (["check", "quickstart", "--layout", "dp=17"], "ranks need at least one sequence each"),
        (["check", "quickstart", "--set", "data.source=nowhere.txt"], "nowhere.txt"),
        (
            ["check", "quickstart", "--set", "data.cache=~nobody-here/x"],
            "data.cache = ~nobody-here/x: no home folder",
        ),
        (["check", "quickstart", "--set", "data.tokenizer=~nobody-here/x"], "no home folder ~nobody-here"),
        (
            ["check", "quickstart", "--no-data", "--set", "train.init_from=~nobody-here/x"],
            "no home folder ~nobody-here",
        ),
        (["trin", "quickstart"], "Did you mean 'train'?"),
        (["check", "quickstart", "--explian"], "--explain"),
        (["train", "quickstart", "--steps", "5"], "Use --set train.steps=5"),
        (["plan", "quickstart", "--learning-rate=1e-3"], "Use --set optim.lr=1e-3"),
        (["check", "quickstart", "--set", "batch_size=4"], "did you mean train.global_batch_size=4?"),
        (["check", "quickstart", "--set", "train.batch_size=4"], "did you mean 'train.global_batch_size'?"),
        (["check", "quickstart", "--set", "data.source="], "data.source is empty"),
        (["check", "quickstart", "--set", "data.tokenizer="], "data.tokenizer = ''"),
        (["check", "quickstart", "--set", "data.tokenizer=gpt2"], "no such file; must be bpe:N"),
        (["check", "quickstart", "--set", "data.tokenizer=gpt2"], "`hf download gpt2 tokenizer.json"),
        (["check", "llama2-7b"], "`hf download OWNER/NAME tokenizer.json"),
        (["check", "quickstart", "--set", "data.tokenizer=bpe:²"], "N must be a whole number"),
        (["check", "quickstart", "--set", "data.source=tokens:"], "the path is missing"),
        (["check", "quickstart", "--set", "data.source=tokens:a**b"], "no token file"),
        (["check", "quickstart", "--set", "train.seed=" + "9" * 5000], "train.seed = "),
        (["check", "n" * 5000], "File name too long"),
        (["recipes", "./no-text"], "not UTF-8 text"),
        (["recipes", "gpt2-124"], "did you mean 'gpt2-124m'?"),
        (["train", "quickstart", "--nproc", "0"], "--nproc"),
        (["train", "quickstart", "--set", "train.steps=0"], "train.steps = 0: must be a whole number >= 1"),
        (["generate", "nowhere"], "'nowhere' is not a run: there is no such folder"),
        (["report", "nowhere"], "is not a run"),
        (["export", "nowhere", "there"], "is not a run"),
        (["import", "nowhere", "--out", "there"], "it has no config.json"),
    ],
)
def test_bad_input_exits_with_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("no-text").write_bytes(b"\xff")
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["check", "quickstart", "--set", "optim.lrr=3"],
            {"key": "optim.lrr", "value": 3, "nearest": "lr"},
        ),
        (
            ["plan", "quickstart", "--set", "model.arch=lama"],
            {
                "key": "model.arch",
                "value": "lama",
                "nearest": "llama",
                "allowed": allowed(KEYS["model.arch"]),
            },
        ),
        (["check", "quikstart"], {"key": "recipe", "value": "quikstart", "nearest": "quickstart"}),
        (["train", "quickstart", "--layout", "dp=17"], {"key": "train.global_batch_size", "value": 16}),
        (["check", "quickstart", "--explian"], {"key": "--explian", "nearest": "--explain"}),
        (
            ["plan", "search", "quickstart", "--top", "0"],
            {"key": "--top", "value": "0", "allowed": "greater than or equal to 1"},
        ),
        (["collectives", "--ranks=0"], {"key": "--ranks", "value": "0"}),
        (["export"], {"key": "RUN"}),
        (["generate", "nowhere"], {"key": "RUN", "value": "nowhere"}),
        (
            ["check", "quickstart", "--set", "layout.schedule=foo"],
            {"key": "layout.schedule", "value": "foo", "allowed": ", ".join(SCHEDULES)},
        ),
        (
            ["check", "quickstart", "--set", "data.source=ftp://x/"],
            {"key": "data.source", "allowed": "https:// http:// s3:// memory://"},
        ),
    ],
)
def test_errors_in_json(
    arguments: list[str], parts: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, "--json") == 2
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert captured.err == ""
    assert set(error) == {"key", "value", "message", "allowed", "nearest"}
    assert {name: error[name] for name in parts} == parts
    assert error["message"]


def test_several_errors_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "quickstart", "--layout", "tp=3", "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["key"], error["value"]) == ("layout.tp", 3), "named first: tp must divide model.heads"
    assert run("check", "quickstart", "--set", "optim.lr=nan", "--set", "model.dim=big", "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "2 problems" in error["message"]
    assert [(one["key"], one["value"]) for one in error["problems"]] == [
        ("model.dim", "big"),
        ("optim.lr", "nan"),
    ]
    assert error["problems"][0]["allowed"] == "a whole number >= 1 and <= 1048576"


def test_a_pipe_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    """As `--svg /dev/stdout | cat` and `--out /dev/stdout`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    save_as("--svg", pipe, "drawn")
    assert os.read(reader, 100) == b"drawn"
    os.close(reader)
    assert pipe.is_fifo()
    with pytest.raises(BusyError, match="--svg /dev/full: cannot be written: No space left on device"):
        save_as("--svg", Path("/dev/full"), "drawn")
    assert Path("/dev/full").is_char_device()


def test_a_full_disk_in_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> Recipe:
        raise OSError(28, "No space left on device", "runs/first")

    monkeypatch.setattr("fivefold.recipe.load", fail)
    assert run("check", "quickstart", "--json") == 74
    assert json.loads(capsys.readouterr().out)["error"]["key"] == "runs/first"


def test_a_failed_check_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fivefold import recipe
    from fivefold.errors import CheckFailed

    def fail(*_: object) -> Recipe:
        raise CheckFailed("the losses differ by 3%")

    monkeypatch.setattr(recipe, "load", fail)
    assert run("check", "quickstart") == 1
    assert capsys.readouterr().err == "failed: the losses differ by 3%\n"


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipes") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("small\n  quickstart "), "what a newcomer wants"
    assert "\n  continue       folder's  Continues " in shown
    assert run("recipes", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert "llama2-7b" in found["recipes"]
    assert list(found["families"])[:3] == ["small", "bert", "gpt"]
    assert {name for names in list(found["families"].values())[1:] for name in names} == found[
        "published"
    ].keys()
    years = {
        "bert-large-mlm": 2018,
        "gpt2-1.5b": 2019,
        "t-nlg-17b": 2020,
        "llama3-405b": 2024,
        "qwen3-8b": 2025,
    }
    assert found["published"] | years == found["published"]
    assert found["families"]["small"][:4] == ["quickstart", "talk", "dial", "speedrun"]
    assert found["families"]["llama"][::5] == ["llama2-7b", "llama3-405b"], "by size"
    assert found["parameters"]["llama2-7b"] == 6_738_415_616
    assert found["parameters"]["shakespeare"] is None, "its text is not there yet"
    assert found["parameters"]["continue"] is None, "the model is the folder's"


def test_the_fields_that_matter_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipes", "--fields") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[2:5]] == ["data.source", "train.tokens", "model.layers"]
    assert len(shown) < 50, "a screen"
    assert run("recipes", "--fields", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["essential"]) == 10
    assert "schedule" in found["others"]["optim"]
    assert "lr" not in found["others"]["optim"]


def test_a_printed_recipe_is_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipes", "quickstart") == 0
    path = tmp_path / "my.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert run("check", str(path), "--no-data", "--json") == 0
    mine = json.loads(capsys.readouterr().out)
    assert run("check", "quickstart", "--no-data", "--json") == 0
    assert mine | {"recipe": "quickstart"} == json.loads(capsys.readouterr().out)


def test_check(text_recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", str(text_recipe)) == 0
    out = capsys.readouterr().out
    assert "the recipe is valid" in out
    assert "5 steps x 64 tokens = 320 tokens" in out
    assert "data     1 file," in out


@pytest.mark.parametrize(
    ("sets", "fits"), [([], True), (["model.layers=1000", "model.dim=6400", "model.heads=64"], False)]
)
def test_check_says_what_memory_is_needed_and_what_is_here(
    sets: list[str], fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["check", "quickstart", "--no-data", *(f"--set={one}" for one in sets)]
    assert run(*command) == 0
    out = capsys.readouterr().out
    assert ("valid, but needs more memory than this machine has\n" in out, ": too little\n" in out) == (
        not fits,
    ) * 2
    assert run(*command, "--json") == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["fits"] is fits
    assert memory["line"] in out


def test_check_json(text_recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", str(text_recipe), "--json", "--set", "train.steps=7", "--layout", "dp=2") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["valid"] is True
    assert (result["steps"], result["total_tokens"], result["vocab_size"]) == (7, 448, 320)
    assert (result["layout"], result["ranks"]) == ("dp=2", 2)
    assert result["tokens_per_parameter"] == pytest.approx(448 / result["parameters"])
    assert result["total_flops"] == pytest.approx(448 * result["flops_per_token"])
    assert result["notes"] == []
    assert result["data"]


def test_check_notes_what_the_layout_does_not_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "quickstart", "--no-data", "--set", "layout.schedule=zbv") == 0
    assert 'note     layout.schedule = "zbv" has no effect in this layout' in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bert-base-mlm", "gpt2-124m", "llama2-7b", "quickstart", "shakespeare"])
def test_check_shipped_without_data(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", name, "--no-data") == 0
    assert "the recipe is valid" in capsys.readouterr().out


def test_missing_data_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("check", "shakespeare") == 2
    err = capsys.readouterr().err
    assert "tinyshakespeare.txt" in err
    assert "--no-data" in err


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "quickstart", "--no-data", "--explain", "--set", "optim.eps=1e-6") == 0
    out = capsys.readouterr().out
    assert all(f"\n[{section}]\n" in out for section in Recipe.model_fields)
    assert "\n* eps = 1e-06   (a number > 0, or unset; default unset)\n" in out
    assert "\n  grad_clip = 1.0   (a number >= 0)\n      Largest norm of the whole gradient." in out
    assert run("check", "quickstart", "--no-data", "--explain", "--json") == 0
    fields = json.loads(capsys.readouterr().out)["fields"]
    assert {"key", "value", "type", "default", "doc", "is_default"} == set(fields[0])


def test_train_json(text_recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--set=model.layers=1", "--set=model.dim=16", "--set=model.heads=2"]
    assert run("train", str(text_recipe), *small, f"--out={tmp_path / 'run'}", "--json") == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert (result["run"], result["steps"]) == (str(tmp_path / "run"), 5)
    assert Path(result["report"]).is_file()
    assert "step 5/5" in captured.err


def test_train_quiet(text_recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--set=model.layers=1", "--set=model.dim=16", "--set=model.heads=2", "--layout=dp=2"]
    assert run("train", str(text_recipe), *small, f"--out={tmp_path / 'run'}", "--nproc=2", "--quiet") == 0
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == (f"{tmp_path / 'run'}\n", "")


@only("locale0*", "locale2*")
@pytest.mark.parametrize(
    ("locale", "shown"),
    [({"LC_ALL": "C"}, "-.~|"), ({"LANG": "POSIX"}, "-.~|"), ({"LC_ALL": "C.UTF-8"}, "─┄╌│")],
)
def test_pictures_are_ascii_in_c_locales(locale: dict[str, str], shown: str) -> None:
    """Also by the module's name. Text from elsewhere stays UTF-8."""
    env = {name: value for name, value in os.environ.items() if name not in ("LC_ALL", "LC_CTYPE", "LANG")}
    words = ["draw", "quickstart", "--layout", "pp=2,schedule=zb_h1,microbatches=4"]
    command = [sys.executable, "-m", "fivefold", *words]
    done = subprocess.run(command, env=env | locale, capture_output=True, check=True, timeout=60)
    assert set(shown) <= set(done.stdout.decode()), done.stdout.decode()
    assert done.stdout.isascii() == (shown[0] == "-")
    wrong = subprocess.run([*command, "--set", "é=1"], env=env | locale, capture_output=True, timeout=60)
    assert "é".encode() in wrong.stderr


@pytest.mark.parametrize(("command", "shown"), [("draw", "_-"), ("generate", "▁–"), ("chat", "▁–")])
def test_text_of_a_model_stays_as_it_is_in_c_locales(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    prepare([command])
    print("▁–", end="", flush=True)
    assert written.getvalue() == shown.encode()


def test_tokenize(text_recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tokenize", str(text_recipe), "--json") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["tokens"]["train"] > 10_000
    assert run("tokenize", str(text_recipe)) == 0
    assert "fingerprint" in capsys.readouterr().out
    assert run("check", str(text_recipe)) == 0  # now counts what is in the cache
    assert f"{first['tokens']['train']:,}" in capsys.readouterr().out
