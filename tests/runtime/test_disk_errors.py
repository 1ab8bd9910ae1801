"""Full disks are recognised by what each library reports; every other error keeps its type and message."""

import errno

import pytest
from safetensors import SafetensorError

from aqnpipe.errors import StorageError
from aqnpipe.runtime.jobs import disk_errors


def test_a_full_disk_is_recognised_by_what_each_library_reports():
    """torch.save raises a second error while it handles the first, and only the first one is about the disk."""

    def torch_save():
        try:
            raise RuntimeError("basic_ios::clear: iostream error")
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 172800 vs 172688")

    def polars():
        raise OSError(errno.ENOSPC, "No space left on device")

    def safetensors():
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    for writer in (torch_save, polars, safetensors):
        with (
            pytest.raises(StorageError, match=r"^no space left on device for the checkpoint$"),
            disk_errors("the checkpoint"),
        ):
            writer()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(errno.EACCES, "Permission denied")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error), match=str(error.args[-1])), disk_errors("x"):
        raise error
