"""Packs Python packages for a host that reaches no package index.

    python tools/pack_site.py --out parts                          # what this project needs with GPUs
    python tools/pack_site.py --out parts --there there.txt        # less what the host has: its `pip freeze`
    python tools/pack_site.py --out parts ray==2.60.0 vllm==0.26.0

On the host, once all parts lie in one folder:

    mkdir site; cat parts/site.tgz.* | tar xz -C site
    export PYTHONPATH=$PWD/site:CHECKOUT PATH=$PWD/site/bin:$PATH

In: requirements, a Python version. Out: an archive in parts that small uploads carry. Wheels for Linux on x86-64 are downloaded with all
that they ask for, and laid out over one another in one folder, which is what an installer does; scripts go to bin/. What has no wheel
cannot be packed: Transformer Engine's torch extension is built on the host (docs/cluster.md). Run it with the host's version of Python:
that is the one whose wheels are packed.
"""

from __future__ import annotations

import argparse
import configparser
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
NO_WHEEL = ("transformer-engine",)
GLIBC = (39, 38, 36, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC), "manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64", "any")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = f"#!/usr/bin/env python{VERSION}"
SCRIPT = """{python}
import sys
from {module} import {first}
sys.exit({call}())
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if old := sorted(options.out.glob("site.tgz.*")):
        print(f"{options.out} holds {old[0].name} already; give another --out", file=sys.stderr)
        return 2
    there = names_in(options.there.read_text().splitlines()) if options.there else set()
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site, archive = Path(scratch, "wheels"), Path(scratch, "site"), Path(scratch, "site.tgz")
        download(options.requirements or this_project(), wheels)
        packed = [wheel for wheel in sorted(wheels.glob("*.whl")) if canonicalize_name(wheel.name.split("-")[0]) not in there]
        for other in twice(packed):
            print(other, file=sys.stderr)
        for wheel in packed:
            lay_out(wheel, site)
        with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
            tar.add(site, arcname=".")
        count = cut(archive, options.out, options.part_mb << 20)
        print(f"{len(packed)} packages, {archive.stat().st_size / 2**20:.0f} MiB in {count} parts in {options.out}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Packages for a host without an index.")
    parser.add_argument("requirements", nargs="*", metavar="REQUIREMENT", help="default: this project's, with its extra gpu")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parts")
    parser.add_argument("--there", type=Path, help="the host's `pip freeze`: these packages are left out, whatever their version")
    parser.add_argument("--part-mb", type=int, default=48, help="largest part, in MiB")
    return parser.parse_args(arguments)


def this_project() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    return [text for text in wanted if Requirement(text).name not in NO_WHEEL]


def names_in(lines: Iterable[str]) -> set[str]:
    """Normalized names of a `pip freeze`."""
    found = (line.split("#")[0].split("==")[0].split(" @ ")[0].strip() for line in lines)
    return {canonicalize_name(name) for name in found if name and not name.startswith("-")}


def download(requirements: Sequence[str], into: Path) -> None:
    """Wheels for this version of CPython, and for those of all that they ask for."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "-d", str(into), "--implementation", "cp"]
    command += ["--python-version", VERSION, "--abi", f"cp{VERSION.replace('.', '')}", "--abi", "abi3", "--abi", "none"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *requirements], check=True)


def twice(wheels: Sequence[Path]) -> list[str]:
    """Files that two wheels bring with different content: one of them would be lost."""
    owner: dict[str, tuple[str, int]] = {}
    found = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                name = placed(entry.filename)
                if name is None:
                    continue
                before, crc = owner.setdefault(name, (wheel.name, entry.CRC))
                if crc != entry.CRC:
                    found.append(f"{name} is in {before} and in {wheel.name}, and not the same; the latter's is kept")
    return found


def placed(name: str) -> str | None:
    """Where an entry of a wheel goes in the folder; None for what no import needs (headers, data of other schemes)."""
    path = PurePosixPath(name)
    if name.endswith("/"):
        return None
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"a wheel with the entry {name!r} is none that an installer would touch")
    if not path.parts[0].endswith(".data"):
        return name
    scheme, rest = path.parts[1], "/".join(path.parts[2:])
    return {"purelib": rest, "platlib": rest, "scripts": f"bin/{rest}"}.get(scheme)


def lay_out(wheel: Path, site: Path) -> None:
    """Its files, and bin/NAME for each console script that its entry points name."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = placed(entry.filename)
            if name is None:
                continue
            target = site / name
            target.parent.mkdir(parents=True, exist_ok=True)
            data = archive.read(entry)
            if name.startswith("bin/") and data.startswith(b"#!python"):
                data = PYTHON.encode() + data[data.index(b"\n") :]
            target.write_bytes(data)
            target.chmod(0o755 if name.startswith("bin/") or (entry.external_attr >> 16) & 0o100 else 0o644)
            if name.endswith(".dist-info/entry_points.txt"):
                write_scripts(data.decode(), site / "bin")


def write_scripts(text: str, folder: Path) -> None:
    entries = configparser.ConfigParser(delimiters=("=",))
    entries.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    entries.read_string(text)
    for name, target in entries["console_scripts"].items() if entries.has_section("console_scripts") else ():
        module, _, call = target.split("[")[0].strip().partition(":")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(SCRIPT.format(python=PYTHON, module=module, first=call.split(".")[0], call=call))
        (folder / name).chmod(0o755)


def cut(archive: Path, out: Path, size: int) -> int:
    """The archive in parts of at most `size` bytes, whose names sort in their order; their number."""
    count = 0
    with archive.open("rb") as stream:
        while part := stream.read(size):
            (out / f"site.tgz.{count:03d}").write_bytes(part)
            count += 1
    return count


if __name__ == "__main__":
    sys.exit(main())
