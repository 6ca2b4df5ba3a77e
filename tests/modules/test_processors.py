"""Tests the processors of vision-language models, and fine-tuning with their samples."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules import processors
from megatron.adaptive.modules.processors import load_processor
from megatron.adaptive.modules.samples import SampleFile, SampleReader

from ..multiprocess.launch import run_ranks, tail

pytest.importorskip("transformers", reason="bash prerequisite.sh --examples")
from ..support.tuned_models import loss_of_transformers
from .families import skip_older
from .image_folders import IMAGE_FOLDERS, VIDEO_FILE, write_data, write_folder

LONG = pytest.mark.long
WORKER = str(Path(__file__).with_name("image_worker.py"))


def require_packages(name: str) -> None:
    """Skips the test if the processor of the family ``name`` needs a package that is missing."""
    for package in IMAGE_FOLDERS[name].needs:
        pytest.importorskip(package, reason="bash prerequisite.sh --examples")


def read(folder: Path, data: Path) -> tuple[Any, SampleFile]:
    """Returns the processor in ``folder``, and the samples in the file ``data``."""
    processor = load_processor(folder)
    return processor, SampleReader(processor=processor, length_multiple=16).read(data)


@pytest.mark.parametrize("name", IMAGE_FOLDERS)
def test_samples_of_a_family(tmp_path: Path, name: str) -> None:
    """Checks that the model accepts the samples, and that image placeholders are not learned."""
    require_packages(name)
    skip_older(name)
    described = IMAGE_FOLDERS[name]
    folder = write_folder(name, tmp_path / "model")
    data = write_data(tmp_path / "data", name)
    processor, samples = read(folder, data)
    assert type(processor).__name__ == described.processor
    assert len(samples) == 12
    text, images = sorted(samples.kinds, key=len)
    assert "pixel_values" in images
    assert "pixel_values" not in text
    for index, answer in ((0, "a b<end>"), (1, "aa b<end>"), (2, "aaa b<end>"), (4, "a small one")):
        labels = samples[index]["labels"][0]
        learned = processor.tokenizer.convert_ids_to_tokens(labels[labels >= 0])
        # All tokens of a text are learned, except for tokens that the processor inserts for an
        # image.
        assert "".join(learned).endswith(answer)
        assert not {described.ids_token, "<image_soft_token>"} & set(learned)
    # The third sample has two images of different sizes, which have different numbers of tokens.
    ids = samples[2]["input_ids"][0].tolist()
    token = processor.tokenizer.convert_tokens_to_ids(described.ids_token)
    assert ids.count(token) > samples[1]["input_ids"][0].tolist().count(token) > 0
    assert loss_of_transformers(folder, data, range(5)) > 0


@pytest.mark.skipif(processors._has("torchvision"), reason="torchvision reads these settings")
@pytest.mark.parametrize("layout", ["own file", "with images", "one file"])
def test_settings_for_videos_are_kept(tmp_path: Path, layout: str) -> None:
    """Checks that a saved folder keeps the settings for videos even without torchvision."""
    folder = write_folder("qwen3_vl", tmp_path / "model")
    expected = dict(IMAGE_FOLDERS["qwen3_vl"].video or {})
    if layout == "with images":
        (folder / VIDEO_FILE).unlink()
        expected = json.loads((folder / "preprocessor_config.json").read_text())
    if layout == "one file":
        load_processor(folder).save_pretrained(tmp_path / "saved")
        folder = tmp_path / "saved"
        assert not (folder / VIDEO_FILE).exists()
    processor = load_processor(folder)
    assert processor.video_processor == expected
    processor.save_pretrained(tmp_path / "again")
    document = json.loads((tmp_path / "again" / "processor_config.json").read_text())
    assert document["video_processor"] == expected
    assert document["processor_class"] == "Qwen3VLProcessor"


def test_a_processor_is_found_if_only_the_models_type_tells_it(tmp_path: Path) -> None:
    """Checks that a processor is found if only the model's type identifies the processor."""
    folder = write_folder("qwen3_vl", tmp_path / "model")
    path = folder / "preprocessor_config.json"
    document = json.loads(path.read_text())
    del document["processor_class"]
    path.write_text(json.dumps(document))
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] > 1 << 64
    assert type(load_processor(folder)).__name__ == "Qwen3VLProcessor"


def test_packages_that_prevent_a_processor_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that errors name a missing package, or a torchvision that does not match torch."""
    from transformers.models.smolvlm import processing_smolvlm

    folder = write_folder("smolvlm", tmp_path / "model")
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    with pytest.raises(ConfigError, match=r"^[^\n]* \(Package `num2words` is required[^\n]*$"):
        load_processor(folder)
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('no operator nms\\nfound')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    with pytest.raises(ConfigError, match=r"torchvision cannot be imported: no operator nms; inst"):
        load_processor(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "{}"), ("tokenizer_config.json", "[]"), ("config.json", "[]")],
)
def test_a_damaged_folder_is_one_line(tmp_path: Path, name: str, text: str) -> None:
    # transformers raises KeyError or AttributeError for these files, and load_processor() must
    # convert these errors.
    folder = write_folder("qwen2_5_vl", tmp_path / "model")
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match="no tokenizer or processor that transformers can read"):
        load_processor(folder)


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # A single family is enough to test how ranks share samples with images.
    [name if name == "internvl" else pytest.param(name, marks=LONG) for name in IMAGE_FOLDERS],
)
def test_a_family_is_tuned_with_images_on_two_processes(tmp_path: Path, name: str) -> None:
    """Checks that the losses before the first step and after saving equal those of transformers."""
    require_packages(name)
    skip_older(name)
    before = write_folder(name, tmp_path / "model")
    data = write_data(tmp_path / "data", name, count=8)
    log = tmp_path / "output.txt"
    command = [WORKER, str(tmp_path), IMAGE_FOLDERS[name].slicing]
    assert run_ranks(command, world_size=2, log=log, limit_s=280.0) == 0, tail(log)
    order = list(range(8))
    random.Random(1).shuffle(order)
    trained, held_out = order[:6], order[6:]
    random.Random(2).shuffle(trained)
    printed = log.read_text()
    losses = re.findall(r"step \d of 2: loss ([\d.]+)", printed)
    evaluated = re.search(r"evaluation loss ([\d.]+)", printed)
    assert evaluated is not None
    expected = loss_of_transformers(before, data, trained[:3])
    assert float(losses[0]) == pytest.approx(expected, rel=1e-5)
    expected = loss_of_transformers(tmp_path / "tuned", data, held_out)
    assert float(evaluated[1]) == pytest.approx(expected, rel=1e-5)
    assert expected < loss_of_transformers(before, data, held_out) - 1e-3
