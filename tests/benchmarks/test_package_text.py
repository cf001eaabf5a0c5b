"""benchmarks/package_text.py on archives made here: what is left out, how it is split, what unpacking refuses."""

import gzip
import io
import json
import tarfile
import zipfile

import numpy as np
import package_text
import pytest
from package_text import Document, Duplicates, Package, without_shared

LICENCE = (
    "# Licensed under the Example License; you may not use this file except in its terms.\n" * 2
)
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa mu nu xi rho".split()  # noqa: SIM905


def paragraph(seed, length=60):
    """Return prose that no other seed has."""
    return " ".join(WORDS[i] for i in np.random.default_rng(seed).integers(len(WORDS), size=length))


def text_of(*seeds):
    return "\n\n".join(map(paragraph, seeds)) + "\n"


@pytest.fixture
def wheels(tmp_path):
    """Write a wheel, a source archive and a wheel of descriptions."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "first-1.0-py3-none-any.whl", "w") as file:
        for i in range(80):
            file.writestr(f"first/m{i}.py", LICENCE + "\n" + text_of(2 * i, 2 * i + 1))
        file.writestr("first/copy.py", LICENCE + "\n" + text_of(0, 1))
        file.writestr("first/longer_copy.py", text_of(4, 5, 6, 7, 900))
        file.writestr("first/table.txt", "1.25 3.75 8.125\n" * 100)
        file.writestr("first/minified.py", "x" * 5000)
        file.writestr("first/header.h", text_of(901))
        file.writestr("first/binary.py", b"\xff\xfe" * 500)
        file.writestr("first-1.0.dist-info/METADATA.txt", text_of(902))
    with tarfile.open(folder / "sec_ond-2.0.tar.gz", "w:gz") as file:
        for name, text in (
            ("docs/a.rst", text_of(909, 910, 911)),
            ("docs/b.rst", text_of(911, 912, 913)),
        ):
            entry = tarfile.TarInfo(f"sec_ond-2.0/{name}")
            entry.size = len(text)
            file.addfile(entry, io.BytesIO(text.encode()))
    with zipfile.ZipFile(folder / "botocore-3.0-py3-none-any.whl", "w") as file:
        told = {"documentation": f"<p>{paragraph(920)}</p>", "x": {"documentation": "too short"}}
        file.writestr(
            "botocore/data/s/1/service-2.json.gz", gzip.compress(json.dumps(told).encode())
        )
    return folder


PACKAGES = [
    Package("first", "1.0", "MIT"),
    Package("sec-ond", "2.0", "MIT", "sdist"),
    Package("botocore", "3.0", "Apache-2.0"),
]


def read_all(wheels, most=10**9):
    seen = Duplicates()
    archives = [package_text.find_archive(wheels, p) for p in PACKAGES]
    return [
        d
        for p, a in zip(PACKAGES, archives, strict=True)
        for d in package_text.read_package(a, p, seen, most)
    ]


def long_paragraphs(documents):
    found = [p for d in documents for p in d.text.split("\n\n")]
    return [" ".join(p.split()) for p in found if len(" ".join(p.split())) >= package_text.SHORT]


def test_each_paragraph_is_there_once_and_what_is_no_text_is_not(wheels):
    documents = read_all(wheels)
    found = long_paragraphs(documents)
    assert len(found) == len(set(found))
    assert sum("Licensed" in p for p in found) == 1
    names = {d.name for d in documents}
    assert "docs/b.rst" in names  # two of its three paragraphs are new
    assert not names & {"first/table.txt", "first/minified.py", "first/header.h", "first/binary.py"}
    assert not any("dist-info" in name for name in names)
    first_or_copy = names & {"first/m0.py", "first/copy.py"}
    assert len(first_or_copy) == 1
    whole = " ".join(found)
    for seed in (*range(160), 909, 910, 911, 912, 913, 920):
        assert paragraph(seed) in whole, seed
    assert "<p>" not in whole
    assert "too short" not in whole


def test_a_paragraph_of_a_text_that_was_left_out_may_come_again():
    seen = Duplicates()
    assert seen.remove(text_of(1, 2, 3)) == text_of(1, 2, 3)
    assert seen.remove(text_of(1, 2, 3, 4)) == ""  # most of it is known
    assert paragraph(4) in seen.remove(text_of(4, 5))


def test_no_long_paragraph_of_validation_is_in_training(wheels):
    documents = read_all(wheels)
    sides = [[d for d in documents if d.held_out is held] for held in (False, True)]
    assert all(sides)
    train, held_out = (set(long_paragraphs(side)) for side in sides)
    assert not train & held_out


def test_a_package_gives_no_more_than_it_may(wheels):
    assert sum(len(d.text) for d in read_all(wheels, 5000) if d.package == "first") < 5000 + 1500


def test_documents_are_taken_by_their_hash_until_there_are_enough():
    documents = [Document("p", str(i), "") for i in range(50)]
    taken = package_text.choose(documents, [10] * 50, 95)
    assert sum(taken) == 10
    first = sorted(documents, key=lambda d: d.order)[:10]
    assert {d.name for d, t in zip(documents, taken, strict=True) if t} == {d.name for d in first}


def test_what_stands_in_both_texts_is_cut_from_validation():
    generator = np.random.default_rng(0)
    train = generator.integers(50_000, size=5000).astype(np.uint16)
    held_out = generator.integers(50_000, size=640).astype(np.uint16)
    assert without_shared(train, held_out)[1] == 0
    train[1003 : 1003 + 70] = held_out[130:200]  # anywhere
    left, share = without_shared(train, held_out)
    assert left.tolist() == [*held_out[:130].tolist(), *held_out[200:].tolist()]
    assert share == pytest.approx(70 / 640)
    train[1003 + 35] ^= 1  # no 64 in a row are the same
    assert len(without_shared(train, held_out)[0]) == 640
    both = np.concatenate([held_out[:32], held_out[200:232]])  # which the first cut would join
    train[0:64], train[1003 : 1003 + 168] = both, held_out[32:200]
    assert without_shared(train, held_out)[0].tolist() == held_out[232:].tolist()
    assert len(without_shared(train, held_out[:10])[0]) == 10


def test_what_is_packed_comes_back_and_damage_is_refused(wheels, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(package_text, "PACKAGES", PACKAGES)
    shards, packed = tmp_path / "shards", tmp_path / "packed"
    assert package_text.main(["write", "--wheels", str(wheels), "--shards", str(shards)]) == 0
    facts = json.loads((shards / "source.json").read_text())
    assert facts["cut_from_validation"] == 0
    assert facts["train"]["tokens"] * 2 == (shards / "train_000000.bin").stat().st_size
    assert {p["licence"] for p in facts["packages"].values()} == {"MIT", "Apache-2.0"}
    assert sum(p["train"] for p in facts["packages"].values()) == facts["train"]["tokens"]
    pack = ["pack", "--shards", str(shards), "--packed", str(packed), "--part-bytes", "3000"]
    assert package_text.main(pack) == 0
    parts = sorted(packed.glob("text.tar.xz.*"))
    assert len(parts) > 2
    assert {p.stat().st_size for p in parts[:-1]} == {3000}
    with pytest.raises(SystemExit, match="is not empty"):
        package_text.main(pack)

    def unpack():
        package_text.main(["unpack", "--packed", str(packed), "--shards", str(tmp_path / "again")])

    unpack()
    for path in shards.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    for path in (tmp_path / "again").iterdir():
        path.unlink()
    whole = parts[1].read_bytes()
    for damaged, told in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), "has another SHA-256"),
        (whole[:-1], "has 2999 bytes, of 3000"),
        (None, "is missing"),
    ):
        parts[1].unlink()
        if damaged:
            parts[1].write_bytes(damaged)
        with pytest.raises(SystemExit, match=f"{parts[1].name}: {told}"):
            unpack()
        assert list((tmp_path / "again").iterdir()) == []
        parts[1].write_bytes(whole)
    manifest = packed / "packed.json"
    told = json.loads(manifest.read_text())
    told["files"]["val_000000.bin"]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(told))
    with pytest.raises(SystemExit, match=r"val_000000\.bin: has another SHA-256"):
        unpack()
    assert list((tmp_path / "again").iterdir()) == []


def test_a_package_that_was_not_downloaded_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"holds no wheel of first==1\.0"):
        package_text.find_archive(tmp_path, PACKAGES[0])


def test_packages_are_pinned_once_and_have_a_licence():
    names = [p.name for p in package_text.PACKAGES]
    assert len(names) == len(set(names))
    assert {p.kind for p in package_text.PACKAGES} == {"wheel", "sdist", "c"}
    allowed = {"MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "PSF-2.0"}
    assert {p.licence for p in package_text.PACKAGES} <= allowed
