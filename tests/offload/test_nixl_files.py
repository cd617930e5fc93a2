"""Page files through NIXL: the same files, byte for byte, as plain ones; what fails there the tier bears."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from rayk.offload.disk import DiskTier
from rayk.offload.page_store import PageStore, PlainFiles, open_store
from rayk.transfer import nixl_files
from rayk.transfer.nixl_files import NixlFiles
from rayk.types.errors import DeviceError
from tests.markers import nixl
from tests.offload.disk import IDENTITY, files_of, get_all, name_of, open_tier, page_of, put_all
from tests.offload.test_disk_faults import small_disk

pytestmark = nixl


def open_files(folder: Path, num_files: int) -> list[int]:
    return [os.open(folder / str(i), os.O_RDWR | os.O_CREAT, 0o600) for i in range(num_files)]


def test_both_stores_write_and_read_the_same_files(tmp_path: Path):
    names = [name_of(i, i % 3) for i in range(300)]
    stores: list[type[PageStore]] = [NixlFiles, PlainFiles]
    content = []
    for i, writer in enumerate(stores):
        folder = tmp_path / str(i)
        folder.mkdir()
        tier = open_tier(folder, make_store=writer)
        assert all(put_all(tier, names))
        assert tier.state == "on"
        tier.close()
        content.append({file.name: file.read_bytes() for file in files_of(folder)})
        tier = open_tier(folder, make_store=stores[1 - i])
        served, bad = get_all(tier, names)
        assert not bad
        assert served == {name: page_of(name).tobytes() for name in names}
        tier.close()
    assert content[0] == content[1]
    assert len(content[0]) == 300


def test_parts_stand_one_after_the_other(tmp_path: Path):
    store = NixlFiles()
    rng = np.random.default_rng(3)
    files = open_files(tmp_path, 20)
    for scale in (1, 50):  # The second needs a larger buffer.
        parts = [[rng.integers(0, 256, n * scale, np.uint8) for n in (152, 1 + i, 4096)] for i in range(20)]
        store.write(list(zip(files, parts, strict=True)))
        for i, given in enumerate(parts):
            data = (tmp_path / str(i)).read_bytes()
            assert data[: sum(p.nbytes for p in given)] == b"".join(p.tobytes() for p in given)
        back = [[np.zeros_like(p) for p in given] for given in parts]
        store.read(list(zip(files, back, strict=True)))
        assert all(
            (a == b).all() for x, y in zip(parts, back, strict=True) for a, b in zip(x, y, strict=True)
        )
    store.close()
    for descriptor in files:
        os.close(descriptor)


def test_a_failed_store_stays_failed(tmp_path: Path):
    """A file that is too short is an error, and nothing of it is handed out."""
    store = NixlFiles()
    (descriptor,) = open_files(tmp_path, 1)
    os.pwrite(descriptor, b"short", 0)
    page = np.full(100, 7, np.uint8)
    for _ in range(2):
        with pytest.raises(OSError, match="failed") as caught:
            store.read([(descriptor, [page])])
        assert caught.value.errno == errno.EIO
    assert (page == 7).all()
    assert "failed" in store.name
    store.close()
    os.close(descriptor)


def test_a_full_disk_is_named_as_it_is(tmp_path: Path):
    """NIXL says only that something failed; plain calls then say what, and serve what is there."""
    with small_disk(tmp_path, 1 << 20):
        tier = open_tier(tmp_path, make_store=NixlFiles)
        names = [name_of(i) for i in range(300)]
        there = put_all(tier, names)
        assert 50 < sum(there) < 200
        assert tier.state == "off: No space left on device"
        served, bad = get_all(tier, names)
        assert served == {n: page_of(n).tobytes() for n, ok in zip(names, there, strict=True) if ok}
        assert len(bad) == there.count(False)
        assert not list((tmp_path / IDENTITY.folder_name).glob(".writing-*"))
        tier.close()


def test_flipped_pages_are_found(tmp_path: Path):
    tier = open_tier(tmp_path, make_store=NixlFiles)
    names = [name_of(i) for i in range(50)]
    put_all(tier, names)
    for name in names[::5]:
        file = tmp_path / IDENTITY.folder_name / name.file_name
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    served, bad = get_all(tier, names)
    assert set(bad) == set(names[::5])
    assert served == {n: page_of(n).tobytes() for n in names if n not in bad}
    assert "nixl/POSIX" in tier.store_name
    assert "failed" not in tier.store_name
    tier.close()


def test_a_tier_reads_through_nixl_where_it_can(tmp_path: Path):
    tier = DiskTier(tmp_path, IDENTITY, 1 << 30)
    assert tier.store_name.startswith("read by nixl/POSIX (")
    assert tier.store_name.endswith("), written by plain files")
    names = [name_of(i, i % 3) for i in range(100)]
    put_all(tier, names)
    assert get_all(tier, names)[0] == {name: page_of(name).tobytes() for name in names}
    assert "failed" not in tier.store_name
    tier.close()


def test_plain_files_where_the_backend_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(open_store(), NixlFiles)
    monkeypatch.setattr(nixl_files, "_QUEUES", {"no such queue": "use_aio"})

    class NoPosix:
        def __getattr__(self, name: str):
            return getattr(api, name)

        def nixl_agent(self, *args):
            agent = api.nixl_agent(*args)
            create = agent.create_backend
            agent.create_backend = lambda _, options: create("NO_SUCH_PLUGIN", options)
            return agent

    api = nixl_files.nixl_api()
    monkeypatch.setattr(nixl_files, "nixl_api", NoPosix)
    with pytest.raises(DeviceError, match="no such queue"):
        NixlFiles()
    assert isinstance(open_store(), PlainFiles)
    tier = DiskTier(tmp_path, IDENTITY, 1 << 30)
    assert tier.store_name == "read by plain files, written by plain files"
    assert put_all(tier, [name_of(0)]) == [True]
    assert get_all(tier, [name_of(0)])[1] == []
    tier.close()
