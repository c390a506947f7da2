"""The list of all that a release holds, as CycloneDX 1.6 (JSON), made from the tree itself.

What is inside of compiled packages is taken from the lists that they bring; what the engine's
packs add on the first start stands there as optional.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.hash.factories import HashTypeFactory
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.tool import Tool
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from making.cpython import TABLE, read_build
from making.licences import Part
from making.project import ROOT, Project
from packageurl import PackageURL

LOCKS = ROOT / "resources" / "engine"
"""Folder of the locks of the engine's packs."""

TYPES = {
    "Python": ComponentType.PLATFORM,
    "Qt": ComponentType.FRAMEWORK,
    "Inter": ComponentType.DATA,
}


def write_sbom(
    path: Path, parts: Iterable[Part], project: Project, platform: str, locks: Path = LOCKS
) -> None:
    """Write the list of a tree's parts, checked against the schema.

    Args:
        platform: what the tree is for, such as "linux-x86_64".

    Raises:
        SystemExit: the list does not fit the schema.
    """
    own, *others = parts
    bom = Bom(
        serial_number=uuid5(NAMESPACE_URL, f"tandem/{project.version}/{project.epoch}/{platform}")
    )
    bom.metadata.timestamp = datetime.fromtimestamp(project.epoch, UTC)
    bom.metadata.tools.tools.add(Tool(name="packaging/release.sh", version=project.version))
    main = bom.metadata.component = Component(
        name="Tandem", version=own.version, type=ComponentType.APPLICATION, bom_ref="tandem",
        licenses=_licences(own.licence), description=f"Tandem for {platform}",
    )  # fmt: skip
    made = [_component(part, platform) for part in others]
    packs = list(_pack_components(locks, platform))
    for component in (*made, *packs):
        bom.components.add(component)
    bom.register_dependency(main, made)
    from cyclonedx.validation.json import JsonStrictValidator  # takes seconds

    text = JsonV1Dot6(bom).output_as_string(indent=1)
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        raise SystemExit(f"The list of components does not fit CycloneDX 1.6: {problem}")
    path.write_text(text + "\n", encoding="utf-8")


def _component(part: Part, platform: str) -> Component:
    """Return a part of the tree with all that is inside of it."""
    kind = "pypi" if part.package is not None else "generic"
    name = part.name.lower().replace("_", "-") if kind == "pypi" else part.name.lower()
    component = Component(
        name=part.name, version=part.version, licenses=_licences(part.licence),
        type=TYPES.get(part.name, ComponentType.LIBRARY),
        purl=PackageURL(kind, None, name, part.version or None),
        bom_ref=f"{kind}/{name}", scope=ComponentScope.REQUIRED,
    )  # fmt: skip
    if part.name == "Python" and (source := _python_source(part.version, platform)):
        component.external_references.add(source)
    for inner in _inner(part, component.bom_ref.value or ""):
        component.components.add(inner)
    return component


def _inner(part: Part, parent: str) -> Iterator[Component]:
    """Yield what compiled packages say is inside of them (PEP 770), each once."""
    files = (part.package.files or ()) if part.package is not None else ()
    seen = set()
    for file in files:
        if "sboms" not in file.parts or file.suffix != ".json":
            continue
        known = json.loads(Path(str(file.locate())).read_text(encoding="utf-8"))
        for entry in known.get("components", ()):
            purl = str(entry.get("purl", "")).partition("?")[0]
            if purl.startswith("pkg:") and purl not in seen:
                seen.add(purl)
                yield Component(
                    name=entry["name"], version=entry.get("version"), type=ComponentType.LIBRARY,
                    purl=PackageURL.from_string(purl), bom_ref=f"{parent}/{purl}",
                    licenses=_licences(_licence_of(entry)),
                )  # fmt: skip


def _licence_of(entry: dict[str, Any]) -> str:
    """Return the licence that an entry of another list names; "" if it names none."""
    for choice in entry.get("licenses", ()):
        licence = choice.get("license", {})
        found = choice.get("expression") or licence.get("id") or licence.get("name")
        if found:
            return str(found)
    return ""


def _pack_components(locks: Path, platform: str) -> Iterator[Component]:
    """Yield the wheels that a person may fetch as the engine, from the locks of this platform."""
    seen = set()
    for path in sorted(locks.glob(f"pylock.*-{platform}.toml")):
        for package in tomllib.loads(path.read_text(encoding="utf-8")).get("packages", ()):
            for wheel in package.get("wheels", ()):
                url = wheel.get("url", "")
                reference = f"pack/{package['name']}/{package['version']}/{url.rpartition('/')[2]}"
                if reference in seen:
                    continue
                seen.add(reference)
                yield _wheel(package, wheel, url, reference)


def _wheel(package: dict[str, Any], wheel: dict[str, Any], url: str, reference: str) -> Component:
    hashes = [
        HashTypeFactory().from_hashlib_alg(alg, value) for alg, value in wheel["hashes"].items()
    ]
    references = [
        ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=XsUri(url), hashes=hashes)
    ] * bool(url)
    return Component(
        name=package["name"], version=package["version"], type=ComponentType.LIBRARY,
        purl=PackageURL("pypi", None, package["name"], package["version"]), bom_ref=reference,
        scope=ComponentScope.OPTIONAL, hashes=hashes, external_references=references,
    )  # fmt: skip


def _python_source(version: str, platform: str) -> ExternalReference | None:
    """Return where a Python comes from, if it is the one that the table names."""
    if platform not in tomllib.loads(TABLE.read_text(encoding="utf-8"))["targets"]:
        return None
    build = read_build(platform)
    if build.version != version:
        return None
    hashes = [HashTypeFactory().from_hashlib_alg("sha256", build.sha256)]
    kind = ExternalReferenceType.DISTRIBUTION
    return ExternalReference(type=kind, url=XsUri(quote(build.url, safe=":/%+")), hashes=hashes)


def _licences(licence: str) -> list[Any]:
    return [LicenseFactory().make_from_string(licence)] if licence else []
