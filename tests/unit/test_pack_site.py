"""Laws of tools/pack_site.py: what is unpacked imports and its commands run; nothing is lost without a word; parts make the whole."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.pack_site import cut, lay_out, names_in, placed, this_project, twice


def wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for entry, text in files.items():
            archive.writestr(entry, text)
    return path


ONE = {
    "shared/one.py": "def main():\n    print('one')\n",
    "one-1.0.dist-info/entry_points.txt": "[console_scripts]\nSay-One = shared.one:main\n[other]\nx = y\n",
    "one-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: one\nVersion: 1.0\n",
    "one-1.0.data/purelib/extra.py": "value = 7\n",
    "one-1.0.data/scripts/old": "#!python\nimport extra; print(extra.value)\n",
    "one-1.0.data/headers/one.h": "",
}


def test_two_wheels_in_one_folder_import_run_and_say_their_version(tmp_path):
    site = tmp_path / "site"
    for path in (wheel(tmp_path, "one", ONE), wheel(tmp_path, "two", {"shared/two.py": "x = 2\n"})):
        lay_out(path, site)
    environment = {"PYTHONPATH": str(site), "PATH": f"{site}/bin:{Path(sys.executable).parent}:/usr/bin:/bin"}
    code = "import shared.one, shared.two, extra, importlib.metadata as m; print(shared.two.x, extra.value, m.version('one'))"
    lines = [[sys.executable, "-c", code], ["Say-One"], ["old"]]
    said = [subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout.strip() for line in lines]
    assert said == ["2 7 1.0", "one", "7"]
    assert not list(site.rglob("one.h"))


def test_a_file_that_two_wheels_bring_is_told_unless_it_is_the_same(tmp_path):
    wheels = [
        wheel(tmp_path, "a", {"tests/__init__.py": "", "x.py": "1"}),
        wheel(tmp_path, "b", {"tests/__init__.py": "", "b.data/purelib/x.py": "2"}),
    ]
    (only,) = twice(wheels)
    assert only.startswith("x.py is in a-1.0") and "b-1.0" in only


@pytest.mark.parametrize("name", ["../x.py", "/etc/x", "a/../../x"])
def test_an_entry_that_leads_out_of_the_folder_is_refused(name):
    with pytest.raises(ValueError, match="installer"):
        placed(name)


def test_parts_in_the_order_of_their_names_are_the_archive(tmp_path):
    whole = bytes(range(256)) * 41
    (tmp_path / "whole").write_bytes(whole)
    assert cut(tmp_path / "whole", tmp_path, 1000) == 11
    parts = sorted(tmp_path.glob("site.tgz.*"))
    assert b"".join(p.read_bytes() for p in parts) == whole and max(p.stat().st_size for p in parts) == 1000


def test_what_the_host_has_is_read_from_pip_freeze_and_what_has_no_wheel_is_left_out():
    lines = ["Torch_Geometric==2.8", "numpy==2.5.2 # x", "-e git+x", "wheel @ file:///w.whl", "", "# words"]
    assert names_in(lines) == {"torch-geometric", "numpy", "wheel"}
    assert any(r.startswith("vllm==") for r in this_project()) and not any("transformer-engine" in r for r in this_project())
