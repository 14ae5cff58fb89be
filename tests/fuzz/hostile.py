"""Files made by hand to hang, exhaust, crash or deceive a reader. Each case writes into a copy of what the real tools wrote, and
says which reader is to read it and what must come of it."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fuzz.mutate import sealed
from nanproof.files._blocks import HEADER, packed, packed_columns
from nanproof.files._blocks import STEP as A_STEP

LONG = 3_000_000
ESCAPE = "\x1b[2J\u202egnp\x07"


@dataclass(frozen=True)
class Case:
    reader: str
    name: str
    make: Callable[[Path], Path]
    """Gets a folder of its own with a copy of all seeds, returns what to read."""
    expect: Callable[[Any], bool]


CASES: list[Case] = []


def case(reader: str, *expected: str, exit: int | None = None, step: int | None = None, absent: str = ""):
    """Register a case: texts that the answer must hold, its exit status, the step that was resumed from."""

    def fits(value: Any) -> bool:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        right = all(part in text for part in expected) and not (absent and absent in text)
        return right and (exit is None or value["exit"] == exit) and (step is None or value.get("step") == step)

    def add(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
        CASES.append(Case(reader, make.__name__.replace("_", " ").strip(), make, fits))
        return make

    return add


# -- guard.resume() ------------------------------------------------------------------------------------------------------------


def newest(root: Path) -> Path:
    return max(path for path in (root / "run" / "checkpoints").glob("step-*") if (path / "good.json").is_file())


def manifest(root: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change the newest good checkpoint's manifest, and let good.json name the new one."""
    path = newest(root) / "manifest.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))
    good = json.loads((newest(root) / "good.json").read_text())
    good["manifest"] = f"{zlib.crc32(path.read_bytes()):08x}"
    (newest(root) / "good.json").write_text(json.dumps(good))
    return root / "run"


def host(root: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    path = newest(root) / "host-0.pt"
    data = torch.load(path, weights_only=True)
    data = change(data) or data
    torch.save(data, path)
    sealed(newest(root) / "manifest.json")
    return root / "run"


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@case("resume", "passed over step-00000006", step=4)
def good_json_is_nested(root):
    (newest(root) / "good.json").write_text("[" * 200_000)
    return root / "run"


@case("resume", "passed over step-00000006", step=4)
def manifest_json_is_nested(root):
    (newest(root) / "manifest.json").write_text('{"a":' * 200_000)
    return root / "run"


@case("resume", "passed over step-00000006", step=4)
def nul_in_a_name_of_the_manifest(root):
    return manifest(root, lambda m: m["files"].update({"a\0b": {"bytes": 1, "crc32": "0"}}))


@case("resume", "passed over step-00000006", step=4)
def half_a_surrogate_in_a_name_of_the_manifest(root):
    return manifest(root, lambda m: m["files"].update({"\ud800": {"bytes": 1, "crc32": "0"}}))


@case("resume", "passed over step-00000006", step=4)
def escapes_in_a_name_of_the_manifest(root):
    return manifest(root, lambda m: m["files"].update({ESCAPE: {"bytes": 1, "crc32": "0"}}))


@case("resume", "passed over step-00000006", step=4)
def escapes_in_the_format_of_the_manifest(root):
    return manifest(root, lambda m: m.update(format=ESCAPE))


@case("resume", "passed over step-00000006", step=4)
def a_name_of_the_manifest_that_is_too_long(root):
    return manifest(root, lambda m: m["files"].update({"x" * 100_000: {"bytes": 1, "crc32": "0"}}))


@case("resume", "passed over step-00000006", step=4)
def manifest_without_the_tensors(root):
    return manifest(root, lambda m: m["files"].pop("__0_0.distcp"))


@case("resume", "passed over step-00000006", step=4)
def manifest_without_the_metadata(root):
    return manifest(root, lambda m: m["files"].pop(".metadata"))


@case("resume", "passed over step-00000006", step=4)
def manifest_without_the_host_part(root):
    return manifest(root, lambda m: m["files"].pop("host-0.pt"))


@case("resume", "passed over step-00000006", step=4)
def manifest_of_lists(root):
    return manifest(root, lambda m: m.update(files=[["host-0.pt"]]))


@case("resume", "passed over step-00000006", step=4)
def manifest_that_is_huge(root):
    (newest(root) / "manifest.json").write_text('{"files": [' + "[]," * 20_000_000 + "0]}")
    return root / "run"


@case("resume", "passed over step-00000006", step=4)
def host_part_without_numbers(root):
    return host(root, lambda h: h.pop("numbers") and None)


@case("resume", "passed over step-00000006", step=4)
def host_part_whose_numbers_are_none(root):
    return host(root, lambda h: h.update(numbers=None))


@case("resume", "passed over step-00000006", step=4)
def host_part_whose_own_tensors_are_a_list(root):
    return host(root, lambda h: h.update(own=[1]))


for _key in ("step", "kinds", "parts", "schedule", "optimizer", "data", "random"):

    def _without(root, key=_key):
        return host(root, lambda h: h.pop(key, None) and None)

    _without.__name__ = f"host_part_without_{_key}"
    case("resume", "passed over step-00000006", step=4)(_without)

    def _odd(root, key=_key):
        return host(root, lambda h: h.update({key: "odd"}))

    _odd.__name__ = f"host_part_with_a_text_as_{_key}"
    case("resume", "passed over step-00000006", step=4)(_odd)


@case("resume", "passed over step-00000006", step=4)
def host_part_that_is_a_list(root):
    return host(root, lambda h: [1])


@case("resume", "passed over step-00000006", step=4)
def host_part_is_a_bomb(root):
    path = newest(root) / "host-0.pt"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("archive/data.pkl", "w") as file,
    ):
        for _ in range(1024):
            file.write(bytes(1 << 20))
    sealed(newest(root) / "manifest.json")
    return root / "run"


@case("resume", "passed over step-00000006", step=4)
def host_part_that_asks_for_memory(root):
    return pickled_host(root, b"c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R.")


@case("resume", "passed over step-00000006", step=4)
def host_part_that_executes(root):
    return pickled_host(root, b"cposix\nmkdir\n(V/nonexistent/x\ntR.")


@case("resume", "passed over step-00000006", step=4)
def host_part_of_deep_tuples_as_a_key(root):
    return pickled_host(root, b"}" + b"N" + b"\x85" * 1_000_000 + b"Ns.")


def pickled_host(root: Path, opcodes: bytes) -> Path:
    (newest(root) / "host-0.pt").write_bytes(archive(b"\x80\x02" + opcodes))
    sealed(newest(root) / "manifest.json")
    return root / "run"


for _file in ("good.json", "manifest.json", "host-0.pt", ".metadata", "__0_0.distcp"):

    def _fifo(root, file=_file):
        pipe(newest(root) / file)
        return root / "run"

    _fifo.__name__ = f"{_file}_is_a_pipe"
    case("resume", "passed over step-00000006", step=4)(_fifo)

    def _zero(root, file=_file):
        endless(newest(root) / file)
        return root / "run"

    _zero.__name__ = f"{_file}_never_ends"
    case("resume", "passed over step-00000006", step=4)(_zero)


@case("resume", step=4)
def a_checkpoint_is_a_file(root):
    import shutil

    path = newest(root)
    shutil.rmtree(path)
    path.write_text("")
    return root / "run"


@case("resume", "passed over step-00000006", step=4)
def metadata_with_a_huge_memo(root):
    (newest(root) / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x0f.")
    sealed(newest(root) / "manifest.json")
    return root / "run"


@case("resume", "passed over step-00000006", step=4)
def metadata_that_claims_terabytes(root):
    rewrite(newest(root), lambda entry: grown(entry, 1 << 34))
    sealed(newest(root) / "manifest.json")
    return root / "run"


@case("resume", "passed over", step=0)
def every_checkpoint_is_damaged(root):
    for path in (root / "run" / "checkpoints").glob("step-*"):
        (path / "manifest.json").write_text("[" * 100_000)
    return root / "run"


@case("resume", step=6)
def an_unharmed_folder(root):
    return root / "run"


def rewrite(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change every tensor's entry in the metadata of a DCP folder."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(folder).read_metadata()
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "chunks"):
            change(entry)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def grown(entry: Any, times: int) -> None:
    entry.size = torch.Size([entry.size[0] * times, *entry.size[1:]])
    entry.chunks[0].sizes = entry.size


# -- scan: pickles -------------------------------------------------------------------------------------------------------------


def archive(data: bytes, records: dict[str, bytes] | None = None, pack: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", pack) as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", "little")
        for name, content in (records or {}).items():
            file.writestr(f"archive/{name}", content)
        file.writestr("archive/version", "3\n")
    return out.getvalue()


def beside(root: Path, content: bytes, name: str = "a.pt") -> Path:
    """A file beside one that holds a NaN, which must be found all the same."""
    folder = root / "beside"
    folder.mkdir()
    (folder / name).write_bytes(content)
    save_file({"w": torch.tensor([float("nan")])}, folder / "model.safetensors")
    return folder


def alone(root: Path, content: bytes, name: str = "a.pt") -> Path:
    (root / "alone").mkdir()
    (root / "alone" / name).write_bytes(content)
    return root / "alone"


MEMO = b"\x80\x02Nr\xff\xff\xff\x0f."
SHARED = b"\x80\x02]" + b"".join(b"q%c](h%ch%ce" % (i, i, i) for i in range(60)) + b"."
NESTED = b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."
PICKLES = {
    "a huge memo": MEMO,
    "a huge memo as text": b"\x80\x02Np268435455\n.",
    "lists nested deep": NESTED,
    "tuples nested deep": b"\x80\x02N" + b"\x85" * 1_000_000 + b".",
    "a key of tuples nested deep": b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns.",
    "a key that is a huge number": b"\x80\x02}\x8b" + struct.pack("<i", 5000) + b"\x7f" * 5000 + b"Ns.",
    "a key that is a tensor": b"",
    "a text longer than the file": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "bytes longer than the file": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "a byte array longer than the file": b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b".",
    "a frame longer than the file": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "a registered extension": b"\x80\x02\x82\x01.",
    "a persistent text": b"\x80\x02Pabc\n.",
    "memory asked for": b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R.",
    "memory asked for by a new object": b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85\x81.",
    "a tensor asked for": b"\x80\x02ctorch\nTensor\n\x8a\x05\x00\x00\x00\x00\x02\x85R.",
    "a storage asked for": b"\x80\x02ctorch\nFloatStorage\nJ\xff\xff\xff\x7f\x85R.",
    "a storage asked for again and again": b"\x80\x02](" + b"ctorch\nFloatStorage\nJ\x00\x00\x00\x04\x85R" * 200 + b"e.",
    "no end": b"\x80\x02]" + b"N" * 1000,
    "nothing but the protocol": b"\x80\x02",
    "an unknown protocol": b"\x80\xff].",
    "a stop with nothing on the stack": b"\x80\x02.",
    "marks without end": b"\x80\x02" + b"(" * 1_000_000 + b".",
    "duplicates without end": b"\x80\x02N" + b"2" * 3_000_000 + b".",
    "a class with an escape in its name": f"\x80\x02cos{ESCAPE}\nsys{ESCAPE}tem\n)R.".encode(),
    "an integer of 6000 digits": b"\x80\x02I" + b"9" * 6000 + b"\n.",
}


def storage(key: bytes, kind: bytes, count: int) -> bytes:
    return (
        b"(X\x07\x00\x00\x00storagectorch\n"
        + kind
        + b"\nX"
        + struct.pack("<I", len(key))
        + key
        + b"X\x03\x00\x00\x00cpu\x8a\x08"
        + struct.pack("<q", count)
        + b"tQ"
    )


def tensor(storage: bytes, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", x) for x in values) + b"t"

    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"\x8a\x08"
        + struct.pack("<q", offset)
        + numbers(shape)
        + numbers(stride)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def _tensor_files() -> dict[str, bytes]:
    numbers = {"data/0": bytes(64)}
    whole = storage(b"0", b"FloatStorage", 16)
    put = b"\x80\x02}X\x01\x00\x00\x00w"
    return {
        "a tensor larger than its record": archive(
            put + tensor(storage(b"0", b"FloatStorage", 1 << 34), (1 << 34,), (1,)) + b"s.", numbers
        ),
        "a storage larger than its record": archive(
            put + tensor(storage(b"0", b"DoubleStorage", 16), (16,), (1,)) + b"s.", numbers
        ),
        "a storage of negative size": archive(put + tensor(storage(b"0", b"FloatStorage", -1), (1,), (1,)) + b"s.", numbers),
        "a storage without a record": archive(
            put + tensor(storage(b"../../0", b"FloatStorage", 16), (16,), (1,)) + b"s.", numbers
        ),
        "a tensor beyond its storage": archive(put + tensor(whole, (1 << 40,), (1,)) + b"s.", numbers),
        "a tensor of negative strides": archive(put + tensor(whole, (4,), (-1,)) + b"s.", numbers),
        "a tensor before its storage": archive(put + tensor(whole, (4,), (1,), -4) + b"s.", numbers),
        "a tensor whose size overflows": archive(put + tensor(whole, (1 << 62, 1 << 62), (0, 0)) + b"s.", numbers),
    }


TENSORS = _tensor_files()

for _name, _data in PICKLES.items():
    if not _data:
        continue
    _slug = _name.replace(" ", "_")

    def _zipped(root, data=_data):
        return beside(root, archive(data))

    _zipped.__name__ = f"zip_with_{_slug}"
    case("scan", "model.safetensors: bad", "a.pt: ", exit=1)(_zipped)

    def _legacy(root, data=_data):
        head = b"".join(pickle.dumps(x, protocol=2) for x in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
        return beside(root, head + data + pickle.dumps([], protocol=2))

    _legacy.__name__ = f"legacy_file_with_{_slug}"
    case("scan", "model.safetensors: bad", "a.pt: ", exit=1)(_legacy)

    def _metadata(root, data=_data):
        (root / "dcp" / "saved" / ".metadata").write_bytes(data)
        return root / "dcp" / "saved"

    _metadata.__name__ = f"metadata_with_{_slug}"
    case("scan", exit=2)(_metadata)

for _name in ("a huge memo", "a key of tuples nested deep", "memory asked for", "no end"):

    def _loaded(root, data=PICKLES[_name]):
        (root / "dcp" / "saved" / ".metadata").write_bytes(data)
        return root / "dcp" / "saved"

    _loaded.__name__ = f"loading_metadata_with_{_name.replace(' ', '_')}"
    case("load", "refused")(_loaded)

for _name, _data in TENSORS.items():

    def _tensors(root, data=_data):
        return beside(root, data)

    _tensors.__name__ = f"zip_with_{_name.replace(' ', '_')}"
    case("scan", "model.safetensors: bad", "a.pt: ", exit=1, absent="a.pt: clean")(_tensors)


@case("scan", "clean", exit=0)
def lists_shared_sixty_deep(root):
    return alone(root, archive(SHARED))


@case("scan", "clean: 1 tensors", exit=0)
def tensors_shared_sixty_deep(root):
    value = [torch.ones(2)]
    for _ in range(60):
        value = [value, value]
    torch.save(value, root / "shared.pt")
    return root / "shared.pt"


@case("scan", "clean", exit=0)
def a_list_that_contains_itself(root):
    value: list[Any] = [torch.ones(2)]
    value.append(value)
    torch.save(value, root / "itself.pt")
    return root / "itself.pt"


@case("scan", "clean", exit=0)
def keys_that_are_tensors_and_tuples(root):
    torch.save({torch.ones(1000): torch.ones(2), (1, (2, "x")): torch.ones(3), b"b": torch.ones(1), None: 1}, root / "keys.pt")
    return root / "keys.pt"


@case("scan", "all zeros", exit=0)
def names_that_steer_the_terminal(root):
    torch.save({ESCAPE: torch.zeros(2)}, root / "names.pt")
    return root / "names.pt"


@case("scan", "all zeros", exit=0)
def a_name_of_three_million_letters(root):
    torch.save({"x" * LONG: {f"{i}": torch.zeros(2) for i in range(500)}}, root / "names.pt")
    return root / "names.pt"


@case("scan", "refused", exit=2)
def a_file_name_that_steers_the_terminal(root):
    (root / "odd").mkdir()
    (root / "odd" / f"{ESCAPE}.pt").write_bytes(archive(b"\x80\x02cposix\nsystem\n(Vid\ntR."))
    return root / "odd"


@case("scan", exit=2)
def one_storage_seen_ten_thousand_times(root):
    """100 GB to look at in a file of 10 MB."""
    whole = storage(b"0", b"FloatStorage", 10 << 18)
    views = b"".join(tensor(whole, ((10 << 18) - i,), (1,), i) for i in range(10_000))
    return alone(root, archive(b"\x80\x02](" + views + b"e.", {"data/0": bytes(10 << 20)}))


@case("scan", "clean", exit=0)
def a_number_shown_a_trillion_times(root):
    torch.save({"w": torch.ones(1).expand(1 << 40), "v": torch.ones(1000).expand(1 << 20, 1000)}, root / "wide.pt")
    return root / "wide.pt"


@case("scan", "clean", exit=0)
def a_quantized_a_sparse_and_a_meta_tensor(root):
    made = {
        "q": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "s": torch.sparse_coo_tensor([[0], [1]], [1.0], (1 << 30, 1 << 30)),
    }
    torch.save({**made, "m": torch.empty(1 << 40, device="meta"), "c": torch.eye(3).to_sparse_csr()}, root / "odd.pt")
    return root / "odd.pt"


@case("scan", "model.safetensors: bad", exit=1)
def sparse_indices_beyond_the_size(root):
    out = io.BytesIO()
    torch.save(torch.sparse_coo_tensor([[0], [1]], [1.0], (3, 3)), out)
    data = out.getvalue()
    at = data.index(struct.pack("<qq", 0, 1))
    return beside(root, rezipped(data, struct.pack("<qq", 0, 1), struct.pack("<qq", -7, 1 << 40)) if at else data)


def rezipped(data: bytes, old: bytes, new: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        for record in source.infolist():
            target.writestr(record.filename, source.read(record).replace(old, new))
    return out.getvalue()


# -- scan: archives ------------------------------------------------------------------------------------------------------------

GOOD = b"\x80\x02}X\x01\x00\x00\x00w" + tensor(storage(b"0", b"FloatStorage", 16), (16,), (1,)) + b"s."
EVIL = b"\x80\x02cposix\nmkdir\n(V/nonexistent/x\ntR."


@case("scan", "a.pt: refused", exit=1)
def an_archive_with_two_pickles_of_one_name(root):
    out = io.BytesIO(archive(GOOD, {"data/0": bytes(64)}))
    with zipfile.ZipFile(out, "a") as file:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file.writestr("archive/data.pkl", EVIL)
    return beside(root, out.getvalue())


@case("scan", "a.pt: ", exit=1, absent="a.pt: clean")
def an_archive_with_something_before_it(root):
    return beside(root, b"PK\x03\x04" + bytes(200) + archive(GOOD, {"data/0": bytes(64)}))


@case("scan", "a.pt: ", exit=1, absent="a.pt: clean")
def an_archive_inside_the_comment_of_another(root):
    inner = archive(EVIL)
    outer = bytearray(archive(GOOD, {"data/0": bytes(64)}))
    outer[-2:] = struct.pack("<H", len(inner) % 65536)
    return beside(root, bytes(outer) + inner)


@case("scan", "a.pt: ", exit=1, absent="a.pt: clean")
def an_archive_whose_list_is_a_lie(root):
    data = bytearray(archive(GOOD, {"data/0": bytes(64)}))
    data[-12:-4] = struct.pack("<II", 0xFFFFFFF0, 16)
    return beside(root, bytes(data))


@case("scan", "a.pt: ", exit=1, absent="a.pt: clean")
def an_archive_with_a_billion_records(root):
    data = bytearray(archive(GOOD, {"data/0": bytes(64)}))
    end = data.rindex(b"PK\x05\x06")
    start, offset = struct.unpack("<II", data[end + 12 : end + 20])
    large = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 1 << 40, 1 << 40, start, offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    last = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return beside(root, bytes(data[:end]) + large + locator + last)


@case("scan", "a.pt: refused", exit=1)
def an_archive_with_a_compressed_pickle(root):
    return beside(root, archive(b"\x80\x02]" + b"N" * (64 << 20) + b".", pack=zipfile.ZIP_DEFLATED))


@case("scan", "a.pt: ", exit=1, absent="a.pt: clean")
def an_archive_of_two_million_records(root):
    record = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    many = record * 2_000_000
    large = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 2_000_000, 2_000_000, len(many), 4)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, 4 + len(many), 1)
    last = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return beside(root, b"PK\x03\x04" + many + large + locator + last)


@case("scan", "a.pt: ", exit=1, absent="a.pt: clean")
def records_that_lie_upon_each_other(root):
    """Two names, one place."""
    data = bytearray(archive(GOOD, {"data/0": bytes(64), "data/1": bytes(64)}))
    first = data.index(b"PK\x01\x02")
    places = [i for i in range(first, len(data)) if data[i : i + 4] == b"PK\x01\x02"]
    zero = next(i for i in places if b"data/0" in data[i : i + 60])
    one = next(i for i in places if b"data/1" in data[i : i + 60])
    data[one + 42 : one + 46] = data[zero + 42 : zero + 46]
    return beside(root, bytes(data))


# -- scan: safetensors ---------------------------------------------------------------------------------------------------------


def safetensors(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS: dict[str, bytes | Callable[[], bytes]] = {
    "a header of 2 to the 64 bytes": safetensors({}, length=(1 << 64) - 1),
    "a header of 90 megabytes": lambda: safetensors(b'{"a":[' + b"[]," * 30_000_000 + b"0]}"),
    "a header of many names": lambda: safetensors({f"t{i}": entry(shape=(0,), offsets=(0, 0)) for i in range(100_000)}, b""),
    "a header nested deep": safetensors(b"[" * 2_000_000),
    "tensors that overlap": safetensors({"a": entry(), "b": entry()}),
    "an unknown type": safetensors({"a": entry("F99")}),
    "a type that is a list": safetensors({"a": entry(["F32"])}),
    "a shape that overflows": safetensors({"a": entry(shape=(1 << 62, 1 << 62))}),
    "a negative shape": safetensors({"a": entry(shape=(-4,))}),
    "a shape of text": safetensors({"a": entry(shape="4")}),
    "a shape of ten thousand dimensions": safetensors({"a": entry(shape=(1,) * 10_000 + (4,))}),
    "offsets beyond the file": safetensors({"a": entry(offsets=(0, 1 << 50))}),
    "negative offsets": safetensors({"a": entry(offsets=(-16, 0))}),
    "offsets turned round": safetensors({"a": entry(offsets=(16, 0))}),
    "offsets of huge numbers": safetensors(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,1' + b"0" * 400 + b"]}}"),
    "a name twice": safetensors(
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    ),
    "a gap": safetensors({"a": entry(shape=(2,), offsets=(8, 16))}),
    "nothing": b"",
    "seven bytes": b"\x01" * 7,
    "metadata that is a number": safetensors({"__metadata__": 3, "a": entry()}),
}
for _name, _data in SAFETENSORS.items():

    def _safetensors(root, data=_data):
        return beside(root, data() if callable(data) else data, "a.safetensors")

    _safetensors.__name__ = f"safetensors_with_{_name.replace(' ', '_')}"
    case("scan", "model.safetensors: bad", "a.safetensors: ", exit=1)(_safetensors)


@case("scan", "clean", exit=0)
def a_sparse_file_of_a_terabyte(root):
    path = root / "hole.safetensors"
    path.write_bytes(safetensors({"a": entry(shape=(1 << 38,), offsets=(0, 1 << 40))}, b""))
    os.truncate(path, path.stat().st_size + (1 << 40))
    return path


@case("scan", "clean", exit=0)
def a_name_that_steers_the_terminal(root):
    save_file({ESCAPE: torch.zeros(2)}, root / "a.safetensors")
    return root / "a.safetensors"


# -- scan: folders -------------------------------------------------------------------------------------------------------------


def folder_with(root: Path, name: str, put: Callable[[Path], Any]) -> Path:
    folder = root / "folder"
    folder.mkdir()
    save_file({"w": torch.ones(1)}, folder / "model.safetensors")
    put(folder / name)
    return folder


for _name in (
    "model.safetensors.index.json",
    "manifest.json",
    "a.pt",
    "a.bin",
    "a.safetensors",
    "incident.json",
    ".metadata",
    "x.distcp",
):
    for _kind, _put in {"is_a_pipe": pipe, "never_ends": endless}.items():

        def _special(root, name=_name, put=_put):
            return folder_with(root, name, put)

        _special.__name__ = f"{_name}_{_kind}"
        case("scan", "model.safetensors: clean")(_special)


@case("scan", exit=2)
def a_pipe_named_on_the_command_line(root):
    pipe(root / "a.pt")
    return root / "a.pt"


@case("scan", exit=2)
def an_endless_file_named_on_the_command_line(root):
    endless(root / "a.safetensors")
    return root / "a.safetensors"


INDICES: dict[str, str | Callable[[], str]] = {
    "nested": "[" * 300_000,
    "of 100 megabytes": lambda: '{"weight_map": [' + "[]," * 33_000_000 + "0]}",
    "that names a pipe": "",
    "with an escape": json.dumps({"weight_map": {"w": f"../{ESCAPE}"}}),
    "with a long name": json.dumps({"weight_map": {"w": "x" * 5000}}),
    "with a million missing files": json.dumps({"weight_map": {str(i): f"{ESCAPE}{i}.safetensors" for i in range(100_000)}}),
    "with a surrogate": '{"weight_map": {"w": "\\ud800"}}',
}
for _name, _text in INDICES.items():

    def _index(root, text=_text):
        folder = folder_with(root, "shard.safetensors", pipe)
        (folder / "model.safetensors.index.json").write_text(
            (text() if callable(text) else text) or '{"weight_map": {"w": "shard.safetensors"}}'
        )
        return folder

    _index.__name__ = f"index_{_name.replace(' ', '_')}"
    case("scan", "model.safetensors: clean", exit=2)(_index)


@case("scan", "clean", exit=2)
def a_folder_that_links_to_itself(root):
    folder = folder_with(root, "loop", lambda path: path.symlink_to("."))
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / "up").symlink_to("..")
    (folder / "a.pt").symlink_to("a.pt")
    (folder / "b.pt").write_bytes(b"")
    return folder


@case("scan", "clean")
def a_step_of_a_thousand_digits(root):
    folder = folder_with(root, "none", lambda path: None)
    (folder / ("checkpoint-" + "9" * 200)).mkdir()
    return folder


def dcp(root: Path, change: Callable[[Any], Any]) -> Path:
    """Change the metadata of a DCP folder as a whole."""
    from torch.distributed.checkpoint import FileSystemReader

    folder = root / "dcp" / "saved"
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def infos(metadata: Any) -> list[Any]:
    return list(metadata.storage_data.values())


DCP: dict[str, Callable[[Any], Any]] = {
    "files outside": lambda m: [setattr(i, "relative_path", "../../run/checkpoints/lock") for i in infos(m)],
    "a file with NUL": lambda m: [setattr(i, "relative_path", "a\0b") for i in infos(m)],
    "a file with an escape": lambda m: [setattr(i, "relative_path", f"{ESCAPE}") for i in infos(m)],
    "an offset beyond the file": lambda m: [setattr(i, "offset", 1 << 60) for i in infos(m)],
    "a negative length": lambda m: [setattr(i, "length", -1) for i in infos(m)],
    "a length of nothing": lambda m: [setattr(i, "length", 0) for i in infos(m)],
    "a length beyond any number": lambda m: [setattr(i, "length", 1 << 200) for i in infos(m)],
    "tensors of terabytes": lambda m: [grown(e, 1 << 38) for e in m.state_dict_metadata.values() if hasattr(e, "chunks")],
    "tensors without chunks": lambda m: [e.chunks.clear() for e in m.state_dict_metadata.values() if hasattr(e, "chunks")],
    "an entry of a thousand dimensions": lambda m: [
        setattr(e, "size", torch.Size([1] * 1000)) for e in m.state_dict_metadata.values() if hasattr(e, "chunks")
    ],
    "a way that is a huge index": lambda m: m.planner_data.update({"more.n": ("more", 10**9)}),
    "a name with an escape": lambda m: m.state_dict_metadata.update({ESCAPE: m.state_dict_metadata.pop("w")}),
    "packed entries": lambda m: [setattr(i, "transform_descriptors", [ESCAPE, "zstd"]) for i in infos(m)],
}
for _name, _change in DCP.items():
    for _reader in ("scan", "load"):

        def _changed(root, change=_change):
            return dcp(root, change)

        _changed.__name__ = f"{_reader}_dcp_with_{_name.replace(' ', '_')}"
        case(_reader)(_changed)


@case("load", "refused")
def a_tensor_that_only_half_is_there(root):
    """What is missing would be whatever was in memory."""

    def half(metadata):
        e = metadata.state_dict_metadata["w"]
        e.chunks[0].sizes = torch.Size([2, 3])

    return dcp(root, half)


@case("load", "refused")
def dcp_file_that_is_a_pipe(root):
    pipe(root / "dcp" / "saved" / "__0_0.distcp")
    return root / "dcp" / "saved"


@case("load", "refused")
def dcp_entry_that_asks_for_memory(root):
    return swapped(root, archive(b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R."))


@case("load", "refused")
def dcp_entry_that_is_a_bomb(root):
    return swapped(root, archive(b"\x80\x02]" + b"N" * (64 << 20) + b".", pack=zipfile.ZIP_DEFLATED))


@case("load", "refused")
def dcp_entry_that_executes(root):
    return swapped(root, archive(EVIL))


def swapped(root: Path, data: bytes) -> Path:
    """Every entry of a DCP folder is these bytes."""
    (root / "dcp" / "saved" / "__0_0.distcp").write_bytes(data)
    return dcp(root, lambda m: [(setattr(i, "offset", 0), setattr(i, "length", len(data))) for i in infos(m)])


# -- guards, records, reports --------------------------------------------------------------------------------------------------

STEP = '{"v":2,"kind":"step","step":0,"loss":1,"grad_norm":1,"action":"stepped","clip":1,"lr":[1],"scale":null,"norms":[]}'
LINES: dict[str, str | Callable[[], str]] = {
    "a line of 100 megabytes": lambda: "x" * (100 << 20),
    "a line of 60 megabytes of JSON": lambda: "[" + "[]," * (20 << 20) + "0]\n",
    "lines nested deep": ("[" * 100_000 + "\n") * 20,
    "numbers": "1\n2\n",
    "texts": '"kind"\n"step"\n',
    "huge numbers": STEP.replace('"step":0', '"step":1' + "0" * 400).replace('"loss":1', '"loss":1' + "0" * 400) + "\n",
    "a huge loss": STEP.replace('"loss":1', '"loss":1' + "0" * 400) + "\n",
    "a NaN step": STEP.replace('"step":0', '"step":NaN') + "\n",
    "a step of text": STEP.replace('"step":0', '"step":"0"') + "\n",
    "a name twice": STEP.replace('"step":0', '"step":0,"step":-5') + "\n",
    "an action with an escape": STEP.replace("stepped", "\\u001b[2J") + "\n",
    "names that are objects": '{"v":2,"kind":"header","names":[{},[],null,"' + "x" * 10_000 + '"]}\n' + STEP + "\n",
    "names that are a number": '{"v":2,"kind":"header","names":7}\n' + STEP + "\n",
    "bytes that are no text": "\udcff\udcfe{}\n",
    "NUL": "\0" * 100_000 + "\n",
    "half a surrogate": STEP.replace("stepped", "\\ud800") + "\n",
}
for _file in ("steps.jsonl", "incidents.jsonl", "forecasts.jsonl", "quarantine.jsonl"):
    for _kind, _put in {"is_a_pipe": pipe, "never_ends": endless}.items():
        for _reader in ("guard", "report", "watch", "records"):
            if _reader == "guard" and _file != "quarantine.jsonl":
                continue  # a guard only writes to these

            def _special(root, file=_file, put=_put, reader=_reader):
                put(root / "run" / "run" / file)
                return root / "run" if reader == "guard" else root / "run" / "run"

            _special.__name__ = f"{_reader}_{_file}_{_kind}"
            case(_reader)(_special)
for _name, _text in LINES.items():
    for _reader in ("guard", "report", "watch", "records"):

        def _written(root, text=_text, reader=_reader):
            text = text() if callable(text) else text
            for file in ("steps.jsonl", "incidents.jsonl", "forecasts.jsonl", "quarantine.jsonl"):
                path = root / "run" / "run" / file
                path.write_bytes(text.encode("utf-8", "surrogateescape") + path.read_bytes())
            return root / "run" if reader == "guard" else root / "run" / "run"

        _written.__name__ = f"{_reader}_{_name.replace(' ', '_')}"
        case(_reader)(_written)


def blocks(root: Path, *parts: bytes) -> Path:
    """A run with these blocks before its own."""
    path = root / "run" / "run" / "norms.bin"
    path.write_bytes(b"".join(parts) + path.read_bytes())
    return path.parent


def names_of(text: bytes, number: int) -> bytes:
    return packed(HEADER, zlib.compress(text, 9), header=number, number=number)


def numbers_of(header: int, *columns: tuple[str, str, bytes]) -> bytes:
    return packed(A_STEP, packed_columns(columns), header=header, number=header, step=0, time=1.0)


ODD_COLUMNS = (
    ("norms", "j", b"[1,2]"), ("absmax", "j", b"{}"), ("outputs.x", "j", b"3"), ("attention", "l", b"\0\0"),
    ("attention", "j", b"[]"),
    ("unmoved", "j", b'{"a":{}}'), ("attention", "j", b"[" * 100_000), ("norms", "f", b"\0\0\x80\x7f" * 3), ("\x1b[2J", "l", b""),
)  # fmt: skip
BLOCKS: dict[str, Callable[[], list[bytes]]] = {
    "blocks that are a bomb of names": lambda: [names_of(b'{"names":["' + b"x" * (200 << 20), 1)],
    "blocks of bombs of names": lambda: [names_of(b'{"names":["%d' % i + b"x" * (8 << 20), i) for i in range(60)],
    "blocks of names without end": lambda: [
        names_of(b'{"sites":[],"names":[' + b",".join(b'"%d.%d"' % (i, j) for j in range(300_000)) + b"]}", i) for i in range(9)
    ],
    "blocks of empty names": lambda: [names_of(b'{"sites":[],"names":[' + b"[]," * (2 << 20) + b"0]}", i) for i in range(9)],
    "blocks of odd columns": lambda: [
        names_of(b'{"sites":["s"],"names":["a","\\u001b[2J","\\ud800"]}', 1),
        *(numbers_of(1, ("norms", "l", bytes(6)), ("absmax", "f", bytes(4)), one) for one in ODD_COLUMNS),
        *(numbers_of(1, one) for one in ODD_COLUMNS),
    ],
    "blocks that claim more than there is": lambda: [
        b"NPB1\x02\0\0\0" + length.to_bytes(4, "little") + bytes(32) for length in (1 << 20, 1 << 31, (1 << 32) - 1)
    ],
    "blocks that begin everywhere": lambda: [b"NPB1" * (4 << 20)],
    "blocks of a step beyond any": lambda: [packed(A_STEP, b"", header=0, number=2**32 - 1, step=(1 << 63) - 1, time=1e308)],
}
for _name, _parts in BLOCKS.items():
    for _reader in ("guard", "report", "watch", "records"):

        def _of_blocks(root, parts=_parts, reader=_reader):
            folder = blocks(root, *parts())
            return folder.parent if reader == "guard" else folder

        _of_blocks.__name__ = f"{_reader}_{_name.replace(' ', '_')}"
        case(_reader)(_of_blocks)
for _file in ("norms.bin", "steps/000001.jsonl.gz", "steps"):
    for _kind, _put in {"is_a_pipe": pipe, "never_ends": endless}.items():
        for _reader in ("report", "watch", "records", "doctor"):

            def _not_regular(root, file=_file, put=_put):
                path = root / "run" / "run" / file
                if path.is_dir():
                    shutil.rmtree(path)
                put(path)
                return root / "run" / "run"

            _not_regular.__name__ = f"{_reader}_{_file.replace('/', '_')}_{_kind}"
            case(_reader)(_not_regular)
PARTS: dict[str, Callable[[], bytes]] = {
    "a part that is a bomb": lambda: gzip.compress(bytes(300 << 20), 9),
    "a part of empty lines": lambda: gzip.compress(b"\n" * (300 << 20), 9),
    "a part of steps without end": lambda: gzip.compress((STEP.replace('"norms":[]', '"x":0').encode() + b"\n") * 200_000),
    "a part with odd counts": lambda: gzip.compress(
        b"".join(
            b'{"v":3,"kind":"thinned","every":2,"left_out":%s,"time":1}\n' % counts
            for counts in (b"[]", b"7", b'{"a":-1}', b'{"a":1e400}', b'{"a":NaN}', b'{"\\u001b[2J":1}', b'{"a":"x"}', b"{}")
        )
    ),
}
for _name, _make in PARTS.items():
    for _reader in ("report", "watch", "records", "doctor"):

        def _with_part(root, make=_make):
            (root / "run" / "run" / "steps" / "000001.jsonl.gz").write_bytes(make())
            return root / "run" / "run"

        _with_part.__name__ = f"{_reader}_{_name.replace(' ', '_')}"
        case(_reader)(_with_part)


@case("records", "[9, 1, 1]")
def broken_lines_hide_no_record(root):
    for file in ("steps.jsonl", "incidents.jsonl", "forecasts.jsonl"):
        path = root / "run" / "run" / file
        path.write_text('{"v":2,"kind":"st\n[]\n' + path.read_text())
    return root / "run" / "run"


for _file in ("manifest.json", "batch.safetensors", "../../tokenizer.json", "../../lock"):
    for _kind, _put in {"is_a_pipe": pipe, "never_ends": endless}.items():

        def _in_bundle(root, file=_file, put=_put):
            bundle = next(path for path in (root / "run" / "run" / "incidents").iterdir() if path.is_dir())
            put(bundle / file)
            return root / "run" / "run"

        _in_bundle.__name__ = f"report_{Path(_file).name}_{_kind}"
        case("report", "nonfinite-batch")(_in_bundle)
for _file in ("manifest.json", "good.json"):
    for _kind, _put in {"is_a_pipe": pipe, "never_ends": endless}.items():

        def _checkpoint(root, file=_file, put=_put):
            put(newest(root) / file)
            return root / "run" / "run"

        _checkpoint.__name__ = f"report_checkpoint_{_file}_{_kind}"
        case("report", "nonfinite-batch")(_checkpoint)


@case("report", "nonfinite-batch")
def report_checkpoint_with_NUL_in_a_name(root):
    manifest(root, lambda m: m["files"].update({"a\0b": {"bytes": 1}, "\ud800": {"bytes": 1}}))
    return root / "run" / "run"


@case("report", "nonfinite-batch")
def report_tokenizer_nested_deep(root):
    (root / "run" / "run" / "tokenizer.json").write_text("[" * 200_000)
    return root / "run" / "run"


# -- bundles -------------------------------------------------------------------------------------------------------------------


def bundle(root: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    path = root / "run" / "bundle" / "manifest.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))
    return root / "run" / "bundle"


for _file in ("manifest.json", "incident.json", "record.json", "batch.safetensors", "weights.safetensors"):
    for _kind, _put in {"is_a_pipe": pipe, "never_ends": endless}.items():

        def _in_folder(root, file=_file, put=_put):
            put(root / "run" / "bundle" / file)
            return root / "run" / "bundle"

        _in_folder.__name__ = f"bundle_{_file}_{_kind}"
        case("replay", "error: ", exit=2)(_in_folder)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"list": [value]}
    return value


BUNDLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a file with an escape": lambda m: m["files"].update({ESCAPE: {"bytes": 1, "sha256": ""}}),
    "a file with NUL": lambda m: m["files"].update({"a\0b": {"bytes": 1, "sha256": ""}}),
    "a very long name": lambda m: m["files"].update({"x" * 5000: {"bytes": 1, "sha256": ""}}),
    "a format with an escape": lambda m: m.update(format=ESCAPE),
    "a writer with an escape": lambda m: m.update(format=99, versions={"nanproof": ESCAPE}),
    "a device with an escape": lambda m: m.update(device=ESCAPE),
    "another device": lambda m: m.update(device="cuda:7", device_name=ESCAPE, versions={"torch": ESCAPE}),
    "something left out with an escape": lambda m: m.update(left_out=[ESCAPE]),
    "a batch nested deep": lambda m: m.update(batches=[nested(400)]),
    "no batches": lambda m: m.update(batches=[]),
    "threads without end": lambda m: m["mode"]["numerics"].update(threads=1_000_000),
    "threads below zero": lambda m: m["mode"]["numerics"].update(threads=-1),
    "threads of text": lambda m: m["mode"]["numerics"].update(threads=ESCAPE),
    "a precision with an escape": lambda m: m["mode"]["numerics"].update(float32_matmul_precision=ESCAPE),
    "a default type of whole numbers": lambda m: m["mode"]["numerics"].update(default_dtype="int8"),
    "numerics that are a list": lambda m: m["mode"].update(numerics=[1]),
    "a mode of text": lambda m: m.update(mode=ESCAPE),
    "a type with an escape": lambda m: m["mode"].update(autocast_dtype=ESCAPE),
    "a created with an escape": lambda m: m.update(created=ESCAPE),
    "a node with an escape": lambda m: m.update(batches=[{ESCAPE: 1}]),
    "a tensor that is not there": lambda m: m.update(batches=[{"tensor": ESCAPE}]),
    "an optimizer nested deep": lambda m: m["optimizer"].update(inside=[m["optimizer"].copy()]),
    "strides that overflow": lambda m: m.update(batches=[{"tensor": first_tensor(m), "stride": [1 << 62, 1 << 62]}]),
}


def first_tensor(facts: dict[str, Any]) -> str:
    text = json.dumps(facts["batches"])
    return str(json.loads(text[text.index('"tensor": ') + 10 :].partition("}")[0].partition(",")[0]))


for _name, _bundle_change in BUNDLES.items():

    def _bundled(root, change=_bundle_change):
        return bundle(root, change)

    _bundled.__name__ = f"bundle_with_{_name.replace(' ', '_')}"
    case("replay")(_bundled)


@case("replay", "error: ", exit=2)
def bundle_manifest_nested_deep(root):
    (root / "run" / "bundle" / "manifest.json").write_text("[" * 200_000)
    return root / "run" / "bundle"


@case("replay", "error: ", exit=2)
def bundle_manifest_of_100_megabytes(root):
    (root / "run" / "bundle" / "manifest.json").write_text('{"format": [' + "[]," * 33_000_000 + "0]}")
    return root / "run" / "bundle"


@case("replay", "error: ", exit=2)
def bundle_file_that_is_sparse(root):
    os.truncate(root / "run" / "bundle" / "weights.safetensors", 1 << 40)
    return bundle(root, lambda m: m["files"]["weights.safetensors"].update(bytes=1 << 40))


# -- doctor --------------------------------------------------------------------------------------------------------------------


def log(root: Path, name: str, content: str | bytes) -> Path:
    path = root / name
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    return path


def cell(html: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "outputs": [{"data": {"text/html": html}}]}], "nbformat": 4})


def state(**more: str) -> str:
    inside = ", ".join(f'"{key}": {value}' for key, value in more.items())
    return '{"log_history": [{"loss": 2.0, "step": 1}, {"loss": 1.9, "step": 2}], ' + inside + "}"


def crc(data: bytes) -> bytes:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    return int(masked_crc32c(data)).to_bytes(4, "little")


def wandb(*records: tuple[int, int, bytes]) -> bytes:
    out = b":W&B\x91\xe2\x00"
    for length, kind, data in records:
        out += b"\0\0\0\0" + struct.pack("<HB", length, kind) + data
    return out


DOCTOR: dict[str, tuple[str, Callable[[], str | bytes]]] = {
    "a cell of spaces": ("a.ipynb", lambda: cell("<td>" + " " * LONG)),
    "a cell of spaces and lines": ("a.ipynb", lambda: cell("<td>" + " \n" * (LONG // 2) + "x")),
    "a cell of open tags": ("a.ipynb", lambda: cell("<td" + "<" * LONG)),
    "a cell of closed cells": ("a.ipynb", lambda: cell("<td>" + "</td>" * (LONG // 5))),
    "a cell of tabs": ("a.ipynb", lambda: cell("<td>\t" + "\t" * LONG + "loss")),
    "a notebook nested deep": ("a.ipynb", lambda: '{"cells": [{"cell_type": "code", "outputs": ' + "[" * 200_000),
    "a notebook of other things": ("a.ipynb", lambda: '{"cells": [{"cell_type": "code", "outputs": {"a": 1}}, 3, null], "x": 1}'),
    "a notebook of 60 megabytes": (
        "a.ipynb",
        lambda: '{"cells": [{"cell_type": "code", "outputs": [' + "[]," * (20 << 20) + "0]}]}",
    ),
    "400000 short columns and a long one": (
        "a.json",
        lambda: "{\n" + "".join(f'"c{i}": [1],\n' for i in range(400_000)) + '"loss": [' + "1," * 20_000 + "1]}",
    ),
    "columns of nothing": ("a.json", lambda: "{\n" + "".join(f'"{i}":[1],\n' for i in range(300_000)) + '"loss": [1]}'),
    "a document of empty lists": ("a.json", lambda: '{\n"loss": [' + "[]," * (5 << 20) + "0]}"),
    "a document of empty objects": ("a.json", lambda: '[{"loss": 1},' + "{}," * (20 << 20) + "{}]"),
    "a document that is one text": ("a.json", lambda: '[{"loss": "' + "x" * (60 << 20)),
    "a record that never ends": ("a.json", lambda: '[{"loss": 1, "x": [' + "1," * (20 << 20)),
    "records that are numbers": ("a.json", lambda: '[{"loss": 1},' + "1," * (20 << 20) + "1]"),
    "max_steps beyond any number": ("trainer_state.json", lambda: state(max_steps="1" + "0" * 400)),
    "max_steps of 5000 digits": ("trainer_state.json", lambda: state(max_steps="1" + "0" * 5000)),
    "max_steps of NaN": (
        "trainer_state.json",
        lambda: state(max_steps="NaN", logging_steps="-Infinity", num_train_epochs="true"),
    ),
    "a step beyond any number": ("trainer_state.json", lambda: state().replace('"step": 2', '"step": 1' + "0" * 400)),
    "a global step of 5000 digits": ("trainer_state.json", lambda: state(global_step="1" + "0" * 5000)),
    "a history that is a number": ("trainer_state.json", lambda: '{"log_history": 3, "max_steps": 1}'),
    "a history nested deep": ("trainer_state.json", lambda: '{"log_history": ' + "[" * 300_000),
    "a history of deep records": (
        "trainer_state.json",
        lambda: '{"log_history": [' + ('{"a":' * 5000 + "1" + "}" * 5000 + ",") * 30 + "{}]}",
    ),
    "names twice": ("trainer_state.json", lambda: state(log_history="[]")),
    "a line of 100 megabytes": ("a.log", lambda: "loss: " + "1" * (100 << 20)),
    "a line of digits": ("a.log", lambda: "step 1 loss: " + "1" * 30_000 + "\n" + "loss " * LONG),
    "a line of 100 megabytes of JSON": ("a.jsonl", lambda: '{"loss": 1}\n{"loss": ' + "[" * (100 << 20)),
    "JSON lines nested deep": ("a.jsonl", lambda: '{"loss": 1}\n' + ('{"loss": ' + "[" * 100_000 + "\n") * 30),
    "JSON lines of many names": (
        "a.jsonl",
        lambda: "".join(json.dumps({f"{i}.{j}": 1 for j in range(900)} | {"loss": 1}) + "\n" for i in range(600)),
    ),
    "JSON lines of huge numbers": (
        "a.jsonl",
        lambda: '{"loss": 1, "step": 1}\n{"loss": 1' + "0" * 400 + ', "step": 1' + "0" * 5000 + "}\n",
    ),
    "a JSON name of 50 megabytes": ("a.jsonl", lambda: '{"loss": 1}\n{"' + "x" * (50 << 20) + '": 1}\n'),
    "a table with an open quote": ("a.csv", lambda: 'step,loss\n1,2\n2,"' + "3,4\n" * 100_000),
    "a table of a million columns": ("a.csv", lambda: "step,loss" + ",x" * 1_000_000 + "\n1,2" + ",3" * 1_000_000 + "\n"),
    "a table of quotes": ("a.csv", lambda: "step,loss\n" + '"' * LONG + "\n"),
    "a table with long cells": ("a.csv", lambda: "step,loss\n1,2\n" + '"' + "9" * 200_000 + '",1\n'),
    "escapes in an error": (
        "a.log",
        lambda: f"step 1 loss 2.0\nTraceback (most recent call last):\nValueError: {ESCAPE} loss is nan\n",
    ),
    "a file with an escape in its name": (f"{ESCAPE}.log", lambda: "step 1 loss 2.0\nstep 2 loss nan\n"),
    "progress bars without end": ("a.log", lambda: "\r".join(f"{i % 100}%|#| {i}/1000 [00:01, loss={i}]" for i in range(60_000))),
    "rates of 0": (
        "a.jsonl",
        lambda: "".join(f'{{"step": {i}, "loss": 1.5, "lr": {0.001 if i < 9000 else 0.0}}}\n' for i in range(18_000)),
    ),
    "spaces after a known line": (
        "a.log",
        lambda: "".join(f"step {i} loss 1.5  \n" for i in range(5)) + "step 9 loss 1.5" + " " * LONG,
    ),
    "values that make no record": ("a.log", lambda: "grad: 1\n" * 100_000),
    "a bar that nothing follows": (
        "a.log",
        lambda: " 10%|#  | 1/10 [00:01<00:09, 1.0s/it]{'loss': 1.0, 'epoch': 0.1}\n" + "loss y\n" * 200_000,
    ),
    "a line of 4 million empty ones": ("a.jsonl", lambda: '{"loss":1,"step":1}\n' + "\n" * (4 << 20)),
    "frames without end": ("a.log", lambda: "\n" * LONG + "RuntimeError: nan loss\n" * 20_000),
    "returns without end": ("a.log", lambda: "\r" * 400_000 + "loss: 1\n"),
    "brackets without end": ("a.log", lambda: ("[" * 30_000 + " loss: 1\n") * 30),
    "prefixes without end": ("a.log", lambda: (("[x] " * 8000) + "nan loss\n") * 20),
    "words without end": ("a.log", lambda: ("a.b" * 10_000 + ": loss nan error\n") * 30),
    "dots without end": ("a.log", lambda: ("nan loss " + "a." * 15_000 + "\n") * 30),
    "numbers with commas": ("a.log", lambda: ("loss: 1" + ",111" * 8000 + "x\n") * 30),
    "spaces without end": ("a.log", lambda: ("loss" + " " * 30_000 + "1\n") * 60),
    "a heading of spaces": ("a.log", lambda: ("epoch 1" + " " * 30_000 + "x\nloss: 1\n") * 60),
    "code without end": ("a.log", lambda: ("WARNING nan loss " + "x" * 250 + "\n") * 5_000),
    "a gzip bomb": ("a.log.gz", lambda: gzip.compress(bytes(300 << 20), 9)),
    "a gzip bomb of a line": ("a.jsonl.gz", lambda: gzip.compress(b'{"loss": "' + b"x" * (300 << 20), 9)),
    "a gzip file in a gzip file": ("a.log.gz", lambda: gzip.compress(gzip.compress(bytes(1 << 20)))),
    "a gzip head": ("a.log.gz", lambda: b"\x1f\x8b"),
    "a record of TensorBoard that lies": (
        "events.out.tfevents.1",
        lambda: b"".join((n.to_bytes(8, "little") + crc(n.to_bytes(8, "little"))) for n in ((1 << 64) - 1,)) + bytes(1000),
    ),
    "a record of TensorBoard of 60 megabytes": (
        "events.out.tfevents.1",
        lambda: (
            (60 << 20).to_bytes(8, "little")
            + crc((60 << 20).to_bytes(8, "little"))
            + b"\x2a\x80\x80\x80\x1e"
            + b"\x0a\x00" * (30 << 20)
        ),
    ),
    "records of TensorBoard of nothing": ("events.out.tfevents.1", lambda: (bytes(8) + crc(bytes(8)) + bytes(4)) * 200_000),
    "a record of TensorBoard of varints": (
        "events.out.tfevents.1",
        lambda: (1 << 20).to_bytes(8, "little") + crc((1 << 20).to_bytes(8, "little")) + b"\xff" * (1 << 20) + bytes(4),
    ),
    "a record of W&B that lies": ("run-1.wandb", lambda: wandb((0xFFFF, 1, b"x"))),
    "parts of W&B without end": ("run-1.wandb", lambda: wandb((1, 2, b"x"), *[(1, 3, b"x")] * 100_000)),
    "a record of W&B of deep JSON": ("run-1.wandb", lambda: wandb(history(b"loss", b"[" * 20_000))),
    "a step of W&B beyond any number": (
        "run-1.wandb",
        lambda: wandb(history(b"_step", b"1" + b"0" * 400), history(b"loss", b"NaN")),
    ),
    "nothing": ("a.log", lambda: b""),
    "random bytes": ("a.log", lambda: random.Random(0).randbytes(2 << 20)),
    "UTF-16 without end": ("a.log", lambda: b"\xff\xfe" + "loss: 1\n".encode("utf-16-le") * 1000 + b"\x00\xd8" * 100_000),
}


def history(name: bytes, value: bytes) -> tuple[int, int, bytes]:
    def field(number: int, data: bytes) -> bytes:
        key, size = number << 3 | 2, len(data)
        out = b""
        for part in (key, size):
            while part > 0x7F:
                out += bytes([part & 0x7F | 0x80])
                part >>= 7
            out += bytes([part])
        return out + data

    record = field(2, field(1, field(1, name) + field(16, value)))
    return len(record), 1, record


for _name, (_file, _make) in DOCTOR.items():

    def _log(root, file=_file, make=_make):
        return log(root, file, make())

    _log.__name__ = f"log_with_{_name.replace(' ', '_')}"
    case("doctor")(_log)

for _name in ("a.log", "trainer_state.json", "steps.jsonl", "run-1.wandb", "events.out.tfevents.1", "a.log.gz", "a.csv"):
    for _kind, _put in {"is_a_pipe": pipe, "never_ends": endless}.items():

        def _in_logs(root, name=_name, put=_put):
            (root / "some").mkdir()
            log(root / "some", "train.log", "step 1 loss 2.0\nstep 2 loss 1.5\n")
            put(root / "some" / name)
            return root / "some"

        _in_logs.__name__ = f"doctor_{_name}_{_kind}"
        case("doctor", "2 points", exit=0)(_in_logs)


@case("doctor", exit=2)
def doctor_of_an_endless_file(root):
    endless(root / "a.log")
    return root / "a.log"


# -- what is legitimate --------------------------------------------------------------------------------------------------------


@case("scan", "clean", exit=0)
def a_state_of_many_kinds(root):
    torch.save(
        OrderedDict(
            a=torch.ones(3),
            b=[{"c": (torch.ones(1),)}, {1, 2}],
            c=torch.Size([3]),
            d=torch.float16,
            e=1 + 2j,
            f=b"x",
            g=torch.device("cpu"),
        ),
        root / "many.pt",
    )
    return root / "many.pt"
