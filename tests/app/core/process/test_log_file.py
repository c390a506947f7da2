"""The window's log where there is no room for it."""

import logging
import sys
from pathlib import Path

import pytest

from app.core.process.crash import LogFile


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a device that is always full")
def test_a_full_disk_is_not_told_for_each_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    log = LogFile(tmp_path / "log.txt")
    log.start()
    try:
        for n in range(3):
            logging.getLogger("app.test").info("record %d", n)
    finally:
        log.stop()
    assert "Traceback" not in capsys.readouterr().err
