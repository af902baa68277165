"""What comes from outside is read as data: pickles do not run, links and names do not lead elsewhere."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from corpus.cleaning.people.toxicity_scorers import ClassifierScorer
from corpus.config import TokenizerConfig
from corpus.tokenizer import tokenizer
from evaluation.generation.language_model import load_model
from infra.errors import StageError
from infra.io.foreign import dangers
from infra.launch.config import LaunchConfig
from infra.lineage.registry import artifact_folder
from infra.run import Run
from tests.support.programs.command import REPOSITORY, Answer, start_new, stemma
from training.adopt import import_model
from training.chat.base import Chat
from training.config import BaseModelConfig
from training.core.hardware import Hardware
from training.generation.session import answer
from training.train_modules.scorer import load_scorer


class Exploit:
    """Makes a file when it is unpickled: the sign that foreign code ran."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.sign),)


def write_pickle(path: Path, sign: Path) -> None:
    bomb = Exploit(sign)
    match path.suffix:
        case ".joblib":
            joblib.dump(bomb, path)
        case ".npz":
            np.savez(path, weights=np.array([bomb], dtype=object))
        case ".npy":
            np.save(path, np.array([bomb], dtype=object), allow_pickle=True)
        case ".bin" | ".pt" | ".pth" | ".ckpt":
            torch.save({"weight": bomb}, path)
        case _:
            path.write_bytes(pickle.dumps(bomb))


@pytest.fixture
def sign(tmp_path: Path) -> Path:
    return tmp_path / "foreign-code-ran"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small healthy model folder with a tokenizer."""
    folder = tmp_path / "model"
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b").save_pretrained(folder)
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, n_positions=8, vocab_size=4)).save_pretrained(folder)
    return folder


def adopt(folder: Path, root: Path, stage: str = "sft") -> Answer:
    return stemma("adopt", stage, folder, "--root", root)


def test_the_exploits_of_these_tests_are_real(tmp_path: Path, sign: Path) -> None:
    write_pickle(tmp_path / "x.pt", sign)
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert sign.exists()


@pytest.mark.parametrize("name", ["x.bin", "x.pt", "x.pth", "x.ckpt", "x.pkl", "x.joblib", "x.npz", "x.npy", "X.PT"])
def test_a_pickle_is_refused_and_not_read(model: Path, sign: Path, tmp_path: Path, name: str) -> None:
    (model / "deep").mkdir()
    write_pickle(model / "deep" / name, sign)
    [danger] = dangers(model)
    assert danger.path.name == name
    assert "can run code" in danger.message
    if name in ("x.bin", "x.npz"):
        answered = adopt(model, tmp_path / "store")
        assert (answered.code, [error["code"] for error in answered.document["errors"]]) == (2, ["unsafe_file"])
    assert not sign.exists()


def test_pickled_weights_beside_good_ones_are_not_opened(model: Path, sign: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "training_args.bin", "model.pt"):
        write_pickle(model / name, sign)
    result = import_model(BaseModelConfig(path=str(model)), {}, tmp_path / "out", Run(tmp_path / "work"))
    assert result.figures["parameters"] > 0
    assert not sign.exists()
    assert not list((tmp_path / "out").glob("*.bin"))


def test_a_pickle_that_calls_itself_safetensors_is_refused(model: Path, sign: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(pickle.dumps(Exploit(sign)))
    assert adopt(model, tmp_path / "store").code == 2
    with pytest.raises(StageError):
        import_model(BaseModelConfig(path=str(model)), {}, tmp_path / "out", Run(tmp_path / "work"))
    assert not sign.exists()


def give_code(model: Path, sign: Path, *names: str, model_type: str = "gpt2") -> None:
    """Has the settings of these names point to code that leaves the sign when it runs."""
    code = f"import os\nos.makedirs({str(sign)!r}, exist_ok=True)\nclass C: pass\nclass M: pass\nclass T: pass\n"
    (model / "evil.py").write_text(code)
    changes: dict[str, dict[str, object]] = {
        "config.json": {
            "model_type": model_type,
            "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        },
        "tokenizer_config.json": {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": [None, "evil.T"]}},
    }
    for name in names:
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | changes[name]))


def run_of(tmp_path: Path) -> Run:
    return Run(tmp_path / "work", LaunchConfig(device="cpu"))


READERS: dict[str, Callable[[Path, Path], object]] = {
    "chat": lambda model, _: list(answer(model, [{"role": "user", "content": "a"}])),
    "base_model": lambda model, tmp: import_model(BaseModelConfig(path=str(model)), {}, tmp / "out", run_of(tmp)),
    "eval": lambda model, tmp: load_model(model, run_of(tmp)),
    "tokenizer": lambda model, tmp: tokenizer(
        TokenizerConfig(pretrained=str(model)), {"documents": tmp}, tmp / "out", run_of(tmp)
    ),
    "baseline": lambda model, tmp: tokenizer(
        TokenizerConfig(baselines=(str(model),)), {"documents": tmp}, tmp / "out", run_of(tmp)
    ),
    "reward model": lambda model, _: load_scorer(model, Hardware(torch.device("cpu"), bf16=False)),
    "toxicity": lambda model, _: ClassifierScorer(str(model), "toxic"),
    "prompts": lambda model, _: Chat.load(model),
}
"""Whoever reads a model or a tokenizer from a folder that a user names."""


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("model_type", ["gpt2", "stranger"])
def test_code_that_a_model_brings_along_is_refused_and_not_run(
    model: Path, sign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, model_type: str
) -> None:
    # transformers asks on the terminal whether it may run the code, and takes a y.
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    give_code(model, sign, "config.json", "tokenizer_config.json", model_type=model_type)
    with pytest.raises(StageError) as caught:
        READERS[reader](model, tmp_path)
    [problem] = caught.value.problems
    assert problem.code == "foreign_code"
    assert "auto_map" in problem.message
    assert "transformers ships" in problem.fix
    assert not sign.exists()


def test_chat_asks_nobody_whether_to_run_a_tokenizers_code(model: Path, sign: Path) -> None:
    give_code(model, sign, "tokenizer_config.json")
    chat = start_new("chat", model, "--prompt", "a", stdin=subprocess.PIPE)
    stdout, stderr = chat.communicate("y\n" * 9, timeout=300)
    assert not sign.exists()
    [error] = json.loads(stdout)["errors"]
    assert (chat.returncode, error["code"]) == (1, "foreign_code")
    assert error["path"] == str(model / "tokenizer_config.json")
    assert "[y/N]" not in stdout + stderr


def test_adopting_refuses_it_too(model: Path, sign: Path, tmp_path: Path) -> None:
    give_code(model, sign, "config.json")
    answered = adopt(model, tmp_path / "store")
    assert (answered.code, [error["code"] for error in answered.document["errors"]]) == (2, ["foreign_code"])


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("tokenizer_config.json", {"tokenizer_file": "ELSEWHERE/tokenizer.json"}, "unsafe_file"),
        ("tokenizer_config.json", {"vocab_file": "../elsewhere/vocab.json"}, "unsafe_file"),
        (
            "tokenizer_config.json",
            {"fast_tokenizer_files": ["tokenizer.json", "../elsewhere/tokenizer.4.0.0.json"]},
            "unsafe_file",
        ),
        ("tokenizer_config.json", {"merges_file": "https://elsewhere.example/merges.txt"}, "unsafe_file"),
        ("config.json", {"text_config": {"vocab_file": "~/vocab.json"}}, "unsafe_file"),
        ("adapter_config.json", {"base_model_name_or_path": "ELSEWHERE"}, "adapter"),
    ],
)
def test_settings_that_name_files_elsewhere_are_refused(
    model: Path, tmp_path: Path, name: str, change: dict[str, object], code: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(model, elsewhere)
    before = json.loads((model / name).read_text()) if (model / name).exists() else {}
    (model / name).write_text(json.dumps(before | change).replace("ELSEWHERE", str(elsewhere)))
    for reader in ("chat", "tokenizer", "eval"):
        with pytest.raises(StageError) as caught:
            READERS[reader](model, tmp_path)
        assert caught.value.problems[0].code == code, reader


def test_where_a_model_once_was_is_no_path_that_is_opened(model: Path, tmp_path: Path) -> None:
    noted = {"name_or_path": "/home/ada/model", "special_tokens_map_file": "/home/ada/model/special_tokens_map.json"}
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | noted))
    assert list(dangers(model)) == []
    assert load_model(model, run_of(tmp_path)).tokenizer.get_vocab() == {"a": 0, "b": 1}


def test_settings_nested_too_deep_are_refused(model: Path) -> None:
    (model / "config.json").write_text("[" * 100_000)
    (model / "model.safetensors.index.json").write_text("[" * 100_000)
    assert {danger.message for danger in dangers(model)} == {"cannot be read: expected JSON: nested too deep"}


def test_a_folder_is_handed_to_transformers_in_one_place_alone() -> None:
    """What reads models or unpickles elsewhere would go past the look that is taken there."""
    calls = re.compile(r"\.from_pretrained\(|\btorch\.load\(|\bpickle\.load\(|allow_pickle=True|joblib\.load\(")
    folders = ("cli", "flows", "tasks", "training", "evaluation", "corpus", "infra")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    assert len(files) > 200
    # As code: the model card shows such a call to others.
    reading = {
        str(path.relative_to(REPOSITORY))
        for path in files
        if calls.search(text := path.read_text(encoding="utf8")) and any(map(calls.search, _calls(text)))
    }
    # Two are processes of strangers' snippets, which start once `check_model` has looked at the folder; the third reads
    # in 8 bits what the export itself has written.
    others = {f"evaluation/release/{name}.py" for name in ("elsewhere", "elsewhere_adapters", "quantized")}
    assert reading == {"corpus/model_folders/pretrained.py", *others}


def _calls(source: str) -> list[str]:
    return [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def outside(tmp_path: Path) -> Path:
    secret = tmp_path / "outside.safetensors"
    secret.write_bytes(b"what nobody is to copy")
    return secret


@pytest.mark.parametrize("how", ["absolute", "relative", "folder", "loop"])
def test_a_link_that_leads_out_is_refused(model: Path, tmp_path: Path, how: str) -> None:
    secret = outside(tmp_path)
    link = model / "more.safetensors"
    target = {"absolute": secret, "relative": Path("../outside.safetensors"), "folder": tmp_path, "loop": link}[how]
    link.symlink_to(target)
    answered = adopt(model, tmp_path / "store")
    assert answered.code == 2
    assert answered.document["errors"][0]["code"] == "unsafe_file"
    assert not list((tmp_path / "store").rglob("*.safetensors"))
    with pytest.raises(StageError, match="a link"):
        import_model(BaseModelConfig(path=str(model)), {}, tmp_path / "out", Run(tmp_path / "work"))


def test_a_snapshot_of_the_hugging_face_cache_is_as_good_as_files(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--ada--tiny"
    snapshot = cache / "snapshots" / "1a2b"
    snapshot.mkdir(parents=True)
    shutil.move(model, cache / "blobs")
    for blob in (cache / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    answered = adopt(snapshot, tmp_path / "store", "base_model")
    assert answered.code == 0, answered.document["errors"]


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..\\outside.safetensors"])
def test_an_index_that_names_files_elsewhere_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    outside(tmp_path)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(StageError, match="outside of the folder"):
        import_model(BaseModelConfig(path=str(model)), {}, tmp_path / "out", Run(tmp_path / "work"))


def test_shards_that_lie_elsewhere_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    shard = {"format": "mds", "raw_data": {"basename": "../../outside.safetensors"}}
    for side in ("train", "validation"):
        (folder / side).mkdir(parents=True)
        (folder / side / "index.json").write_text(json.dumps({"shards": [shard]}))
    outside(tmp_path)
    answered = adopt(folder, tmp_path / "store", "shard")
    assert {error["code"] for error in answered.document["errors"]} == {"unsafe_file"}


def test_a_pipe_is_refused_instead_of_waited_for(model: Path) -> None:
    os.mkfifo(model / "more.safetensors")
    assert [danger.message for danger in dangers(model)] == ["neither a file nor a folder"]


def test_an_archive_is_not_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "model.tar"
    with tarfile.open(archive, "w") as tar:
        member = tarfile.TarInfo("../escaped")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    answered = adopt(archive, tmp_path / "folder" / "store")
    assert (answered.code, answered.document["errors"][0]["code"]) == (2, "not_a_folder")
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize(
    "uri", ["mlflow-artifacts:/../../etc", "mlflow-artifacts:/", "file:///etc", "mlflow-artifacts:/a/../../b"]
)
def test_mlflow_addresses_stay_in_their_folder(tmp_path: Path, uri: str) -> None:
    with pytest.raises(ValueError, match="does not lie among"):
        artifact_folder(tmp_path, uri)
