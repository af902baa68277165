"""What comes from outside is read as data: pickles do not run, links and names do not lead elsewhere."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from infra.errors import StageError, StemmaError
from infra.foreign import dangers
from infra.lineage.artifact_files import artifact_folder
from infra.run import Run
from tests.command import Answer, stemma
from training.adopt import import_model
from training.config import BaseModelConfig


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
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
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
    [(path, told)] = dangers(model)
    assert path.name == name
    assert "can run code" in told
    if name in ("x.bin", "x.npz"):
        answer = adopt(model, tmp_path / "store")
        assert (answer.code, [error["code"] for error in answer.document["errors"]]) == (2, ["unsafe_file"])
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


@pytest.mark.parametrize("model_type", ["gpt2", "stranger"])
def test_code_that_a_model_brings_along_is_not_run(model: Path, sign: Path, tmp_path: Path, model_type: str) -> None:
    code = f"import os\nos.mkdir({str(sign)!r})\nclass C: pass\nclass M: pass\nclass T: pass\n"
    (model / "evil.py").write_text(code)
    for name, classes in (
        ("config.json", {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}),
        ("tokenizer_config.json", {"AutoTokenizer": [None, "evil.T"]}),
    ):
        data = json.loads((model / name).read_text()) | {"auto_map": classes}
        if name == "config.json":
            data["model_type"] = model_type
        (model / name).write_text(json.dumps(data))
    try:
        import_model(BaseModelConfig(path=str(model)), {}, tmp_path / "out", Run(tmp_path / "work"))
    except StemmaError as error:
        assert error.problems[0].code == "bad_model"
    assert not sign.exists()


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
    answer = adopt(model, tmp_path / "store")
    assert answer.code == 2
    assert answer.document["errors"][0]["code"] == "unsafe_file"
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
    answer = adopt(snapshot, tmp_path / "store", "base_model")
    assert answer.code == 0, answer.document["errors"]


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
    answer = adopt(folder, tmp_path / "store", "shard")
    assert {error["code"] for error in answer.document["errors"]} == {"unsafe_file"}


def test_a_pipe_is_refused_instead_of_waited_for(model: Path) -> None:
    os.mkfifo(model / "more.safetensors")
    assert [told for _, told in dangers(model)] == ["neither a file nor a folder"]


def test_an_archive_is_not_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "model.tar"
    with tarfile.open(archive, "w") as tar:
        member = tarfile.TarInfo("../escaped")
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))
    answer = adopt(archive, tmp_path / "folder" / "store")
    assert (answer.code, answer.document["errors"][0]["code"]) == (2, "not_a_folder")
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize(
    "uri", ["mlflow-artifacts:/../../etc", "mlflow-artifacts:/", "file:///etc", "mlflow-artifacts:/a/../../b"]
)
def test_mlflow_addresses_stay_in_their_folder(tmp_path: Path, uri: str) -> None:
    with pytest.raises(ValueError, match="does not lie among"):
        artifact_folder(tmp_path, uri)
