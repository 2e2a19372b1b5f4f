"""The standard library as a dataset."""

import re
import sysconfig
from pathlib import Path

import pytest

from sympow.data import open_dataset

ROOT = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(scope="module")
def train():
    return open_dataset("stdlib")


def texts(dataset):
    tokenizer = dataset.load_tokenizer()
    return {
        dataset.document_name(n): tokenizer.decode(dataset.read(n, 0, int(length)))
        for n, length in enumerate(dataset.lengths)
    }


def test_a_module_is_its_source(train):
    name = str(ROOT / "argparse.py")
    assert texts(train)[name] == Path(name).read_text(encoding="utf-8")


def test_a_package_is_one_document_of_all_its_files(train):
    package = texts(train)[str(ROOT / "json")]
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "json").glob("*.py"))
    assert {"json/__init__.py", "json/encoder.py"} < set(files)
    assert re.findall(r"^# (json/.*)$", package, re.MULTILINE) == files
    assert (ROOT / "json" / "encoder.py").read_text() in package


def test_the_order_is_fixed_and_documents_end_in_the_boundary(train):
    again = open_dataset("stdlib")
    names = [train.document_name(n) for n in range(len(train.lengths))]
    assert names == sorted(names) == [again.document_name(n) for n in range(len(again.lengths))]
    assert again.fingerprint == train.fingerprint
    last = int(train.lengths[0]) - 1
    assert train.read(0, last, last + 1).tolist() == [256]


def test_there_is_enough_to_train_on_and_no_tests_in_it(train):
    assert len(train.lengths) > 120
    assert train.lengths.sum() > 5_000_000
    assert (train.lengths >= 16_384).sum() > 60
    package = texts(train)[str(ROOT / "unittest")]
    assert "# unittest/case.py" in package
    assert "# unittest/test/" not in package


def test_the_splits_share_no_module(train):
    heldout = open_dataset("stdlib", "heldout")
    assert not set(texts(heldout)) & set(texts(train))
    assert 0.03 < heldout.lengths.sum() / train.lengths.sum() < 0.3
    assert heldout.lengths.max() > 65_536
    assert heldout.fingerprint != train.fingerprint


def test_unknown_sources_are_refused(tmp_path):
    with pytest.raises(ValueError, match="source must be 'stdlib', a prepared folder"):
        open_dataset(tmp_path)
    with pytest.raises(ValueError, match="split must be one of"):
        open_dataset("stdlib", "validation")
