"""The command line with untrusted files and user input: terminals, templates, Ctrl-C, options."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from anybit import cli
from anybit.cli import answer, common
from anybit.cli import generate as generating
from anybit.errors import TextError
from anybit.hf import template
from anybit.hf.loading import load_model
from cases_folders import configure, retensor

RED = "\x1b]0;red\x07\x9b2J\u202e"


def steering(text: str) -> list[str]:
    return [char for char in text if unicodedata.category(char) in ("Cc", "Cf") and char not in "\n\t"]


def copied(model: Path, to: Path, **config: Any) -> Path:
    return configure(shutil.copytree(model, to), **config)


def test_names_from_files_do_not_steer_the_terminal(run: Any, model: Path, tmp_path: Path) -> None:
    norm, kept = load_file(model / "model.safetensors")["model.norm.weight"], tmp_path / "kept"
    assert run("quantize", model, "-o", kept, "-s", "w4a16g32")[0] == 0
    folders = [
        retensor(copied(model, tmp_path / "renamed"), **{"model.norm.weight": None, f"model.norm.weight{RED}": norm}),
        retensor(copied(model, tmp_path / "more"), **{RED: norm}),
        configure(kept, {"modules_to_not_convert": ["lm_head", RED], "ignore": ["lm_head", RED]}),
        copied(model, tmp_path / "type", model_type=RED),
        copied(model, tmp_path / "architecture", architectures=[RED], model_type=RED),
        copied(model, tmp_path / "method", quantization_config={"quant_method": RED}),
        copied(model, tmp_path / "scheme", quantization_config={"quant_method": "anybit", "scheme": RED}),
        copied(model, tmp_path / "activation", hidden_act=RED),
        copied(model, tmp_path / f"folder{RED}"),
    ]
    shown = 0
    for folder in folders:
        for words in (["info", folder], ["quantize", folder, "-o", tmp_path / "out", "--overwrite"],
                      ["generate", folder, "-p", "x", "-n", 1, "--raw"]):  # fmt: skip
            _, out, err = run(*words)
            assert steering(out + err) == [], f"{words[0]} {folder.name!r}"
            shown += "\\x1b" in out + err
    assert shown > len(folders)  # it was about to


def test_print_changes_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    value = {"text": "a :cat: [b]x[/b]", "lost": [float("nan")], "deep": {"us": float("inf"), "n": (1, 2)}}
    common.print_json(value)
    common.output.print("saved /tmp/:heart:/x", markup=False)
    common.errors.print("no folder /tmp/:heart:/x", markup=False)
    found = capfd.readouterr()
    printed, end, said = found.out.rpartition("}\n")
    assert json.loads(printed + end) == {"text": value["text"], "lost": [None], "deep": {"us": None, "n": [1, 2]}}
    assert "NaN" not in printed and said == "saved /tmp/:heart:/x\n"
    assert found.err == "no folder /tmp/:heart:/x\n"


def test_a_terminal_without_a_character_gets_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="latin-1"))
    monkeypatch.setattr(sys, "argv", ["anybit", "--version"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    common.stdout.write("caf\xe9 \u4f60")
    common.stdout.flush()
    assert held.getvalue().endswith(b"caf\xe9 \\u4f60")


def test_traceback_escapes_control_characters(capfd: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError(RED)
    cli._show_traceback(RuntimeError, error, None)
    shown = capfd.readouterr().err
    assert "RuntimeError: \\x1b]0;red" in shown
    assert steering(shown) == []


def test_answers_steer_no_terminal_and_reach_a_file_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (True, False):
        written = io.StringIO()
        monkeypatch.setattr(written, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, "stdout", written)
        printer = answer._Printer(SimpleNamespace(), silent=False)
        printer.on_finalized_text("a\tb\n\x1b[2J\x9b \u200d\u3000", stream_end=True)
        assert printer.text == "a\tb\n\x1b[2J\x9b \u200d\u3000"
        assert written.getvalue() == ("a\tb\n\\x1b[2J\\x9b \u200d\u3000\n" if terminal else printer.text + "\n")


def rendered(source: str) -> str:
    """Render a message through a template compiled by transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def apply(messages: Any, **_: Any) -> str:
        return render_jinja_template([messages], chat_template=source)[0][0]

    return template.render(apply, [{"role": "user", "content": "Hi"}], "it")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than 1 s"),
        ("{{ 10 ** (9 ** 9) }}", "takes more than 1 s|needs more than 1 GiB"),
        ("{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "renders more than 16 MiB|than 1 s|than 1 GiB"),
        ("{{ 'a' * 9999999999 }}", "needs more than 1 GiB of memory"),
        ("{% if %}", "cannot be used: Expected an expression"),
        ("{{ nothing.there }}", "cannot be used: 'nothing' is undefined"),
        ("{{ raise_exception('Roles must\n alternate') }}", "cannot be used: Roles must alternate$"),
        ("{{ ''.__class__.__mro__ }}", "cannot be used: access to attribute '__class__'"),
        ("{{ 1 / 0 }}", "cannot be used: ZeroDivisionError"),
        ("{{ '\\ud800' }}", "cannot be used: UnicodeEncodeError"),
        ("{%macro f(x)%}{{f(x)}}{%endmacro%}{{f(1)}}", "cannot be used: RecursionError"),
    ],
)
def test_a_bad_chat_template_is_one_sentence(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SECONDS", 1.0 if "than 1 s" in message else 60.0)
    with pytest.raises(TextError, match=message) as refused:
        rendered(source)
    assert "\n" not in str(refused.value)


def test_a_template_is_rendered_beside_more_open_files_than_select_knows() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert template.render(lambda messages, **words: "Hi", [], "m") == "Hi"
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_good_chat_template_is_rendered() -> None:
    assert rendered("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}") == "<user>Hi"
    assert rendered("") == ""


def test_a_chat_goes_by_its_template(run: Any, model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    for file in broken.glob("chat_template*"):
        file.unlink()
    own = json.loads((broken / "tokenizer_config.json").read_text())
    (broken / "tokenizer_config.json").write_text(json.dumps(own | {"chat_template": "{{ nothing.there }}"}))
    code, out, err = run("generate", broken, "-p", "x")
    assert (code, out) == (1, "")
    assert f"error: the chat template of {broken} cannot be used: 'nothing' is undefined" in err
    assert run("generate", broken, "-p", "x", "--raw", "-n", 1)[0] == 0


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_stops_an_answer_and_twice_the_program(run, model, monkeypatch, presses) -> None:
    answers: list[Any] = []
    put = answer._Printer.put

    def pressed(printer: Any, value: Any) -> None:
        if printer not in answers:
            answers.append(printer)
        if printer is answers[0] and printer.count == 2:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        put(printer, value)

    monkeypatch.setattr(answer._Printer, "put", pressed)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAgain\n/quit\n"))
    before = signal.getsignal(signal.SIGINT)
    code, _, err = run("chat", model, "-n", 6, "--system", "Be brief.")
    assert signal.getsignal(signal.SIGINT) is before
    if presses == 2:
        assert code == 130
        return
    assert code == 0
    assert "stopped: 3 tokens" in err
    assert err.count("tokens/s") == 2
    assert answers[1].count == 6 and not answers[1].stop


def test_top_p_is_passed_on(run: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    loaded = load_model(model, device="cpu")
    generate = loaded.model.generate
    monkeypatch.setattr(loaded.model, "generate", lambda *a, **k: (seen.update(k), generate(*a, **k))[1])
    monkeypatch.setattr(generating, "loader", lambda *_, **__: lambda _: loaded)
    assert run("generate", model, "-p", "x", "-n", 2, "--temperature", 0.7, "--top-p", 0.5)[0] == 0
    assert (seen["do_sample"], seen["temperature"], seen["top_p"]) == (True, 0.7, 0.5)
    seen.clear()
    assert run("generate", model, "-p", "x", "-n", 2, "--temperature", 0.7)[0] == 0
    assert "top_p" not in seen
    code, _, err = run("generate", model, "-p", "x", "--top-p", 0.5)
    assert code == 2
    assert "no effect at a temperature of 0" in err
    code, _, err = run("generate", model, "-p", "x", "-n", 2, "--temperature", 1e-40)
    assert code == 2 and "use 0" in err
    assert run("chat", model, "--top-p", 1.5)[0] == 2


def with_code(model: Path, to: Path) -> Path:
    """A model of a type unknown to transformers, with the Python files that define it; running them leaves a file."""
    names = {"AutoConfig": "own.Configuration", "AutoModelForCausalLM": "own.Model"}
    folder = copied(model, to, model_type="own", architectures=["Model"], auto_map=names)
    (folder / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n"
        f"Path({str(to.parent / 'ran')!r}).touch()\n\n"
        "class Configuration(LlamaConfig):\n    model_type = 'own'\n\n"
        "class Model(LlamaForCausalLM):\n    config_class = Configuration\n"
    )
    return folder


def test_remote_code_runs_only_where_it_is_asked_for(run, model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    own, quantized, ran = with_code(model, tmp_path / "own"), tmp_path / "quantized", tmp_path / "ran"
    text = tmp_path / "text.txt"
    text.write_text("It is so. " * 100)
    gptq = ["--method", "gptq", "--text", text, "--tokens", 512]
    for command in (
        ["info", own],
        ["explain", own, "--scheme", "w4a16g32"],
        ["quantize", own, "-o", quantized, "--scheme", "w4a16g32"],
        ["quantize", own, "-o", quantized, "--scheme", "w4a16g32", "--overwrite", *gptq],
        ["info", quantized],
        ["explain", quantized],
        ["convert", quantized, "--to", "anybit", "-o", tmp_path / "converted"],
        ["generate", tmp_path / "converted", "-p", "x", "-n", 1, "--raw"],
        ["eval", quantized, "--text", text, "--context", 8, "--windows", 1],
    ):
        code, _, err = run(*command)
        assert code == 1 and "error:" in err, (command, err)
        assert command[0] != "info" or command[1] != own or not ran.exists()
        code, _, err = run(*command, "--trust-remote-code")
        assert code == 0 and ran.exists(), (command, err)  # Python runs a module once a process
    assert (tmp_path / "converted" / "own.py").is_file()


def test_every_command_that_opens_a_model_can_trust_it() -> None:
    trusting = {
        name
        for name, command in commands().items()
        if any("--trust-remote-code" in parameter.opts for parameter in command.params)
    }
    assert set(commands()) == trusting


def test_short_options_and_completion(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("-V") == run("--version")
    assert "Examples" in run("quantize", "-h")[1]
    monkeypatch.setenv("_ANYBIT_COMPLETE", "complete_bash")
    for words, found in (
        ("anybit conv", "convert"),
        ("anybit quantize m --method gp", "gptq"),
        ("anybit convert m --to c", "compressed-tensors"),
        ("anybit generate m --backend reference-p", "reference-packed"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert run()[1].split() == [found]


def test_a_scheme_that_nothing_runs_says_so(run: Any, model: Path, tmp_path: Path) -> None:
    _, _, err = run("quantize", model, "-o", tmp_path / "out", "-s", "w4a8g32-xasym")
    assert err.count("note: no kernel runs w4a8g32-xasym on ") == 1
    code, _, err = run("quantize", model, "-o", tmp_path / "out", "-s", "w4a16g32")
    assert code == 1
    assert "choose another folder, or replace it with --overwrite" in err
    code, _, err = run("quantize", model, "-o", tmp_path / "out", "-s", "w4a16g32", "--overwrite")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("typer", signal.SIGINT),
        ("anybit.cli.tune", signal.SIGHUP),
        ("torch", signal.SIGTERM),
        ("LOST", signal.SIGINT),
        ("TURNED", signal.SIGTERM),
    ],
)
def test_a_signal_while_python_imports_leaves_no_traceback(model: Path, module: str, number: signal.Signals) -> None:
    """LOST: in a callback, which Python cannot raise from.  TURNED: in a module that makes another error of it."""
    script = (
        "import runpy, signal, sys, weakref\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "for other in (signal.SIGTERM, signal.SIGHUP): signal.signal(other, signal.SIG_DFL)\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {module!r}: signal.raise_signal({int(number)})\n"
        f"        if name == 'torch' and {module!r} == 'LOST':\n"
        f"            one = Finder(); held = weakref.ref(one, lambda _: signal.raise_signal({int(number)})); del one\n"
        f"        if name == 'torch' and {module!r} == 'TURNED':\n"
        f"            try: signal.raise_signal({int(number)})\n"
        "            except BaseException: error = ImportError('cannot load module more than once per process')\n"
        "            raise error\n"
        "sys.meta_path.insert(0, Finder()); sys.argv = ['anybit', *sys.argv[1:]]\n"
        "runpy.run_module('anybit', run_name='__main__', alter_sys=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "info", str(model)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


def test_a_closed_pipe_or_output_leaves_no_traceback() -> None:
    info = [sys.executable, "-m", "anybit", "info", "w4a16"]
    reader, writer = os.pipe()
    os.close(reader)
    for command in (info, [*info[:3], "--help"]):
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "")
    os.close(writer)
    closed = "error: standard output is closed: send it to /dev/null if nobody is to read it\n"
    for how, found in ((">&- <&-", (1, "", closed)), ("2>&-", (0, "scheme  ", ""))):
        done = subprocess.run(["sh", "-c", f'"$@" {how}', "sh", *info], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout[:8], done.stderr) == found


def test_a_scheme_is_described_without_torch() -> None:
    """Help and usage errors are instant, and main can still decide how torch's threads wait."""
    script = (
        "import sys\nfrom anybit import cli\nsys.argv = ['anybit', 'info', 'w4a8fp']\n"
        "try: cli.main()\nfinally: print(*{'torch', 'numpy', 'transformers', 'safetensors'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "8-bit activations: it has 16 bits" in done.stdout
    assert done.stdout.splitlines()[-1] == ""


def commands() -> dict[str, Any]:
    from typer.main import get_command

    return dict(get_command(cli.app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("columns", [40, 80])
def test_help_cuts_no_name_of_an_option(run: Any, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, command in commands().items():
        _, out, _ = run(name, "--help")
        names = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {option for option in names if option.startswith("-")} <= set(re.findall(r"[\w-]+", out)), name
        assert "…" not in out and "[bold]" not in out


@pytest.mark.parametrize(("before", "after"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_threads_do_not_wait_by_spinning(before: dict[str, str], after: str) -> None:
    others = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    script = "import os, sys, anybit; assert 'torch' not in sys.modules; print(os.environ['GOMP_SPINCOUNT'])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True, env=others | before) == f"{after}\n"
